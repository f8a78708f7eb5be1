"""The flat vector: where each parameter lies, and what its norm and its hash are."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from training_tools import CPU, same_bits, seeded

from gruppetto.training.parameters import Flat, Layout, hash_tensors, squared_norm


class Mixed(nn.Module):
    """Shapes of all kinds: scalar, empty, over 64 elements, two dtypes, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.wide = nn.Parameter(torch.arange(65.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.doubles = nn.Parameter(torch.arange(6.0, dtype=torch.float64).reshape(2, 3))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.block = nn.Parameter(torch.arange(64.0).reshape(8, 8).T.contiguous().T)
        self.halves = nn.Parameter(torch.arange(5.0).to(torch.bfloat16))
        self.late = nn.Parameter(torch.full((3,), 7.0))


class Tied(nn.Module):
    """An output layer that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.output = nn.Linear(4, 5)
        self.output.weight = self.embedding.weight


def all_in_one(model: nn.Module) -> Layout:
    return Layout(model, [list(model.parameters())])


def placed(layout: Layout) -> list[tuple[str, int, int]]:
    return [(s.name, s.start, s.size) for s in layout.slots]


# ------------------------------------------------------------------ the layout


def test_layout_written_out_by_hand() -> None:
    layout = all_in_one(Mixed())
    assert placed(layout) == [
        ("scalar", 0, 1),
        ("wide", 64, 65),
        ("empty", 192, 0),
        ("doubles", 0, 6),
        ("block", 192, 64),
        ("halves", 0, 5),
        ("late", 256, 3),
    ]
    assert layout.dtypes == (torch.float32, torch.float64, torch.bfloat16)
    assert layout.lengths == (320, 64, 64)
    assert layout.num_parameters == 1 + 65 + 0 + 6 + 64 + 5 + 3


def test_order_is_by_group_then_by_named_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    # The groups list their members backwards; the order within a group must not follow that.
    groups = [
        [model[2].bias, model[0].bias, model[1].bias],
        [model[2].weight, model[0].weight],
    ]
    layout = Layout(model, groups)
    assert [(s.name, s.group) for s in layout.slots] == [
        ("0.bias", 0),
        ("1.bias", 0),
        ("2.bias", 0),
        ("0.weight", 1),
        ("2.weight", 1),
    ]
    assert [s.start for s in layout.slots] == [0, 64, 128, 192, 256]


def test_tied_weights_have_one_slot() -> None:
    model = Tied()
    layout = Layout(model, [[model.output.weight, model.output.bias]])
    assert [s.name for s in layout.slots] == ["embedding.weight", "output.bias"]


def test_frozen_and_ungrouped_parameters_stay_outside_and_are_not_moved() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    frozen, ungrouped = model[0].weight.data_ptr(), model[1].bias.data_ptr()
    layout = Layout(model, [[model[0].weight, model[0].bias, model[1].weight]])
    assert [s.name for s in layout.slots] == ["0.bias", "1.weight"]
    layout.adopt(model, CPU)
    assert model[0].weight.data_ptr() == frozen
    assert model[1].bias.data_ptr() == ungrouped


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), max_size=3),
            st.sampled_from([torch.float32, torch.float64, torch.float16]),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_slots_never_overlap_and_start_at_multiples_of_64(
    entries: list[tuple[list[int], torch.dtype, int]],
) -> None:
    model = nn.Module()
    groups: list[list[nn.Parameter]] = [[], [], []]
    for i, (shape, dtype, group) in enumerate(entries):
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        model.register_parameter(f"p{i}", parameter)
        groups[group].append(parameter)
    layout = Layout(model, groups)
    assert len(layout.slots) == len(entries)
    for dtype, length in zip(layout.dtypes, layout.lengths, strict=True):
        taken: set[int] = set()
        for slot in (s for s in layout.slots if s.dtype == dtype):
            own = set(range(slot.start, slot.start + slot.size))
            assert slot.start % 64 == 0
            assert not taken & own
            taken |= own
        assert length % 64 == 0
        assert max(taken, default=-1) < length


def test_adopt_keeps_values_and_makes_the_parameters_views() -> None:
    model = Mixed()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    layout = all_in_one(model)
    flat = layout.adopt(model, CPU)
    for name, parameter in model.named_parameters():
        assert same_bits(parameter, before[name]), name
    # Written through the vector, seen by the module, and the other way round.
    flat.vectors[0][64] = -3.0
    assert model.wide[0] == -3.0
    with torch.no_grad():
        model.doubles[1, 2] = 9.0
    assert flat.vectors[1][5] == 9.0


def test_adopt_keeps_the_tie() -> None:
    model = Tied()
    flat = all_in_one(model).adopt(model, CPU)
    flat.vectors[0][0] = 42.0
    assert model.output.weight is model.embedding.weight
    assert model.output.weight[0, 0] == 42.0


def test_the_gaps_are_zero() -> None:
    model = Mixed()
    layout = all_in_one(model)
    flat = layout.adopt(model, CPU)
    inside = torch.zeros(320, dtype=torch.bool)
    for start, size in ((0, 1), (64, 65), (192, 64), (256, 3)):
        inside[start : start + size] = True
    assert not flat.vectors[0][~inside].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_is_finite_sees_one_bad_element_of_any_vector(bad: float) -> None:
    flat = Flat([torch.zeros(128), torch.zeros(64, dtype=torch.float64)])
    assert flat.is_finite()
    flat.vectors[1][17] = bad
    assert not flat.is_finite()


def test_is_finite_although_the_sum_overflows() -> None:
    assert Flat([torch.full((64,), 3e38)]).is_finite()


# ------------------------------------------------------------------- the norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_squared_norm_is_the_float64_sum(dtype: torch.dtype, size: int) -> None:
    vector = torch.randn(size, generator=seeded(size)).to(dtype)
    expected = sum(float(x) ** 2 for x in vector.tolist())
    assert squared_norm(vector) == pytest.approx(expected, rel=1e-13)


def test_squared_norm_does_not_lose_small_elements_as_float32_would() -> None:
    vector = torch.full((1 << 16,), 1e-4)
    vector[0] = 1e4
    assert squared_norm(vector) - 1e8 == pytest.approx((2**16 - 1) * 1e-8, rel=1e-4)


def test_squared_norm_of_a_cut_vector_is_the_sum_of_its_pieces() -> None:
    """Integers: every order of summation is exact, so the cut must lose or repeat nothing."""
    vector = torch.randint(-50, 50, (640,), generator=seeded(0)).float()
    for cut in (64, 128, 320, 576):
        assert squared_norm(vector[:cut]) + squared_norm(vector[cut:]) == squared_norm(vector)


def test_squared_norm_of_a_piece_is_the_same_wherever_it_lies() -> None:
    """Bit for bit: the blocks are cut from the piece's own start, never from its address."""
    whole = torch.randn(64 * 9, generator=seeded(3))
    for start in range(0, 64 * 8, 64):
        piece = whole[start : start + 64]
        assert squared_norm(piece) == squared_norm(piece.clone())


# ------------------------------------------------------------------- the hash


def sha_by_hand(entries: Iterable[tuple[str, str, list[int], bytes]]) -> str:
    digest = hashlib.sha256()
    for name, dtype, shape, data in entries:
        digest.update(f"torch.{dtype} {shape} {name}\n".encode() + data)
    return digest.hexdigest()


def test_hash_equals_one_written_with_struct() -> None:
    tensors = {
        "a.weight": torch.tensor([[1.0, -2.5, 0.1], [3.0, 4.0, 5.0]]),
        "b": torch.tensor(7, dtype=torch.int64),
        "c": torch.tensor([0.1, 0.2], dtype=torch.float64),
        "flag": torch.tensor([True, False]),
        "nothing": torch.zeros(0, 3),
        # The upper half of a float32 is the bfloat16 of the same value, when that is exact.
        "half": torch.tensor([1.5, -0.75], dtype=torch.bfloat16),
    }
    upper = b"".join(struct.pack("<f", v)[2:] for v in (1.5, -0.75))
    assert hash_tensors(tensors) == sha_by_hand(
        [
            ("a.weight", "float32", [2, 3], struct.pack("<6f", 1.0, -2.5, 0.1, 3.0, 4.0, 5.0)),
            ("b", "int64", [], struct.pack("<q", 7)),
            ("c", "float64", [2], struct.pack("<2d", 0.1, 0.2)),
            ("flag", "bool", [2], b"\x01\x00"),
            ("nothing", "float32", [0, 3], b""),
            ("half", "bfloat16", [2], upper),
        ]
    )


def test_hash_of_a_transposed_view_is_that_of_its_rows() -> None:
    transposed = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T
    assert hash_tensors({"t": transposed}) == sha_by_hand(
        [("t", "float32", [2, 2], struct.pack("<4f", 1.0, 3.0, 2.0, 4.0))]
    )
    strided = torch.arange(6.0)[::2]
    assert hash_tensors({"t": strided}) == sha_by_hand(
        [("t", "float32", [3], struct.pack("<3f", 0.0, 2.0, 4.0))]
    )


def flipped(tensor: Tensor, bit: int) -> Tensor:
    data = tensor.clone()
    raw = data.view(-1).view(torch.uint8)
    raw[bit // 8] ^= 1 << (bit % 8)
    return data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_hash_changes_with_every_single_bit(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, -2.0], dtype=dtype)
    bits = tensor.numel() * tensor.element_size() * 8
    hashes = {hash_tensors({"p": flipped(tensor, bit)}) for bit in range(bits)}
    assert len(hashes | {hash_tensors({"p": tensor})}) == bits + 1


def test_hash_changes_with_name_shape_dtype_and_order() -> None:
    a, b = torch.zeros(4), torch.ones(4)
    variants = [
        {"a": a, "b": b},
        {"b": b, "a": a},
        {"a": b, "b": a},
        {"x": a, "b": b},
        {"a": a.view(2, 2), "b": b},
        {"a": a.to(torch.int32), "b": b},  # the same bytes
        {"a": a},
        {},
    ]
    assert len({hash_tensors(v) for v in variants}) == len(variants)
    assert hash_tensors({"a": a, "b": b}) == hash_tensors({"a": a.clone(), "b": b.clone()})
    assert hash_tensors({"e": torch.zeros(0, 3)}) != hash_tensors({"e": torch.zeros(3, 0)})
