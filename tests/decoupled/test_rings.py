"""Rings between processes: what goes in comes out, in order, to the last bit."""

from __future__ import annotations

import os
import pickle
import select
import struct
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shared_slots
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from gruppetto.decoupled.schedule import Schedule
from gruppetto.engines.decoupled import device_slots
from gruppetto.engines.decoupled.batches import BatchPacking, copied_batch
from gruppetto.engines.decoupled.channels import Channels
from gruppetto.engines.decoupled.rings import Message, Ring, copied
from gruppetto.engines.local.forking import fork
from gruppetto.errors import GruppettoError, TaskError
from gruppetto.protocols.messages import StopAt

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
PATIENCE_MS = 20_000


def in_child(work: Callable[[], bool]) -> int:
    """Fork a process that does something and ends with 0 if that was true."""
    pid = fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return pid


def ended_well(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def wait_for(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(PATIENCE_MS), "waited in vain"


def send(ring: Ring, message: Message) -> None:
    while not ring.offer(message):
        wait_for(ring.free)


def receive(ring: Ring, mini_batch: int) -> Message | StopAt:
    while (message := ring.take(mini_batch)) is None:
        wait_for(ring.filled)
    return message


def same(a: Tensor, b: Tensor) -> bool:
    """Bits, dtype, shape, strides and alignment; not-a-numbers included."""
    if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
        return False
    if not a.numel():
        return True
    if a.data_ptr() % 64 != b.data_ptr() % 64:
        return False
    return bytes_of(a).equal(bytes_of(b))


def bytes_of(tensor: Tensor) -> Tensor:
    own = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return own.copy_(tensor.reshape(-1)).view(torch.uint8)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype and up to four dimensions, also empty, permuted, sliced, expanded, misaligned."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    size = max(1, int(np.prod(shape)))
    raw = torch.randint(0, 256, (size * 16 + 64,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        raw = raw % 2
    past = draw(st.integers(0, 3)) * dtype.itemsize
    value = raw[past : past + size * dtype.itemsize].view(dtype)[: int(np.prod(shape))].view(shape)
    how = draw(st.sampled_from(["plain", "permuted", "sliced", "expanded"]))
    if how == "permuted":
        return value.permute(draw(st.permutations(range(value.dim()))))
    if how == "sliced" and value.dim():
        return value[::2]
    return value.expand(3, *value.shape) if how == "expanded" else value


#: Through the file, or through slots that the receiver makes, here in the CPU's memory.
WAYS = pytest.mark.parametrize("way", ["file", "device"])


@pytest.fixture(autouse=True)
def slots_of_the_cpu() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        shared_slots.use(patch)
        yield patch


@WAYS
@given(given=st.lists(tensors(), max_size=4), rest=st.binary(max_size=40))
def test_tensors_come_out_as_they_went_in(way: str, given: list[Tensor], rest: bytes) -> None:
    ring = Ring("it", 1, 100_000)
    if way == "device":
        ring.receive_on(shared_slots.CPU)
    for number in range(3):  # the slot is used again
        assert ring.offer(Message(number, 7, given, rest))
        assert not ring.offer(Message(9, 7, given, rest)), "the slot is taken"
        got = ring.take(number)
        assert isinstance(got, Message)
        assert (got.mini_batch, got.num_samples, got.rest) == (number, 7, rest)
        assert all(same(a, b) for a, b in zip(given, got.tensors, strict=True))
    assert ring.take(3) is None
    ring.close()


@given(given=tensors())
def test_a_copy_has_the_same_bits_strides_and_alignment(given: Tensor) -> None:
    made = copied(given)
    assert same(given, made)
    assert not given.numel() or given.untyped_storage().data_ptr() != (
        made.untyped_storage().data_ptr()
    )


@WAYS
def test_what_was_received_stays_when_its_slot_is_written_again(way: str) -> None:
    ring = Ring("it", 1, 400)
    if way == "device":
        ring.receive_on(shared_slots.CPU)
    ring.offer(Message(0, 1, [torch.zeros(100)]))
    first = ring.take(0)
    ring.offer(Message(1, 1, [torch.ones(100)]))
    second = ring.take(1)
    assert isinstance(first, Message)
    assert isinstance(second, Message)
    assert first.tensors[0].eq(0).all()
    assert second.tensors[0].eq(1).all()
    ring.close()


@WAYS
@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_between_processes_in_order_under_pressure(capacity: int, way: str) -> None:
    """Both sides run as fast as they can; the echo comes back through a ring of its own."""
    there, back = Ring("there", capacity, 4096), Ring("back", capacity, 4096)
    ready = os.eventfd(0, os.EFD_CLOEXEC)

    def echo() -> bool:
        if way == "device":
            there.receive_on(shared_slots.CPU)
        os.eventfd_write(ready, 1)
        number = 0
        while isinstance(message := receive(there, number), Message):
            send(back, message)
            number += 1
        back.send_stop(StopAt(message.version + 1, message.reason))
        return number == message.version

    child = in_child(echo)
    if way == "device":
        back.receive_on(shared_slots.CPU)
    wait_for(ready)
    os.close(ready)
    total, sent, heard = 200, 0, 0
    value = torch.arange(1000, dtype=torch.float32)
    while heard < total:
        while sent < total and there.offer(Message(sent, sent % 5, [value + sent])):
            sent += 1
        got = receive(back, heard)
        assert isinstance(got, Message)
        assert got.num_samples == heard % 5
        assert got.tensors[0].equal(value + heard)
        heard += 1
    there.send_stop(StopAt(total, "callback"))
    assert receive(back, total) == StopAt(total + 1, "callback")
    assert ended_well(child)
    there.close()
    back.close()


def test_a_stop_keeps_its_place_and_needs_no_room() -> None:
    ring = Ring("it", 2, 100)
    for number in range(2):
        assert ring.offer(Message(number, 1, [torch.full((4,), number)]))
    ring.send_stop(StopAt(2, "é" * 600))
    assert not ring.offer(Message(2, 1, []))
    for number in range(2):
        got = ring.take(number)
        assert isinstance(got, Message)
        assert got.tensors[0].eq(number).all()
        # There is room for what comes after the stop, and it comes after it.
        assert ring.offer(Message(2 + number, 1, [torch.full((4,), 2 + number)]))
    stop = ring.take(2)
    assert isinstance(stop, StopAt)
    assert stop.version == 2
    assert set(stop.reason) == {"é"}
    for number in (2, 3):
        got = ring.take(number)
        assert isinstance(got, Message)
        assert got.tensors[0].eq(number).all()
    ring.close()


def test_a_message_of_another_mini_batch_is_a_bug() -> None:
    ring = Ring("the outputs of module 1", 1, 100)
    ring.offer(Message(3, 1, []))
    with pytest.raises(
        GruppettoError, match="the outputs of module 1: expected mini-batch 2, got 3"
    ):
        ring.take(2)
    ring.close()


def test_what_does_not_fit_is_refused_in_one_sentence() -> None:
    ring = Ring("the outputs of module 1", 1, 100)
    with pytest.raises(TaskError) as caught:
        ring.offer(Message(5, 1, [torch.zeros(100_000)]))
    assert "the outputs of module 1 for mini-batch 5 take 4000" in str(caught.value)
    assert "pad them alike in collate_fn" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ring.offer(Message(5, 1, [torch.zeros(10)])), "no slot was lost"
    ring.close()


def test_a_device_has_room_for_the_usual_size_and_the_file_for_larger_ones() -> None:
    ring = Ring("it", 2, 4000, headroom=4)
    ring.receive_on(shared_slots.CPU)
    assert ring._device_slots is not None
    ring._device_slots.fill_(7)
    large, small = torch.arange(4000, dtype=torch.float32), torch.arange(1000, dtype=torch.float32)
    assert ring.offer(Message(0, 1, [large]))
    assert ring._device_slots.eq(7).all(), "too large for these slots"
    assert ring.offer(Message(1, 1, [small]))
    assert ring._device_slots[1].ne(7).any(), "goes through these slots"
    for number, value in enumerate([large, small]):
        got = ring.take(number)
        assert isinstance(got, Message)
        assert got.tensors[0].equal(value)
    with pytest.raises(TaskError, match="pad them alike in collate_fn"):
        ring.offer(Message(2, 1, [torch.zeros(100_000)]))
    ring.close()


def test_memory_that_cannot_be_shared_is_named_in_one_sentence(
    slots_of_the_cpu: pytest.MonkeyPatch,
) -> None:
    slots_of_the_cpu.undo()
    ring = Ring("it", 1, 4000)

    class Refused:
        def __reduce__(self) -> Any:
            return fail, ()

    handle = pickle.dumps(Refused())
    struct.pack_into("<q", ring._handle, 0, len(handle))
    ring._handle[8 : 8 + len(handle)] = handle
    with pytest.raises(TaskError) as caught:
        ring.offer(Message(0, 1, [torch.zeros(4)]))
    assert str(caught.value) == (
        "two modules' processes cannot share memory of cpu: CUDA error: invalid argument; expected "
        "a driver with CUDA inter-process communication: use --engine virtual, or --device cpu"
    )
    ring.close()


def fail() -> None:
    raise RuntimeError("CUDA error: invalid argument\nCUDA kernel errors might be reported")


def test_slots_as_torch_shares_them() -> None:
    slots = device_slots.make_slots(shared_slots.CPU, 2, 8)
    assert slots.shape == (2, 8)
    opened = device_slots.open_slots(device_slots.handle_of(slots), shared_slots.CPU)
    slots[1].copy_(torch.arange(8))
    assert opened[1].tolist() == list(range(8))


def test_what_a_killed_process_leaves_is_removed(tmp_path: Path) -> None:
    for name in ("torch_12_34_0", "torch_12_5_1", "torch_123_4_0", "sem.12"):
        (tmp_path / name).touch()
    device_slots.tidy(12, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["sem.12", "torch_123_4_0"]
    device_slots.tidy(12, tmp_path / "nowhere")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_tensors_come_out_on_the_device_of_the_receiver(
    slots_of_the_cpu: pytest.MonkeyPatch,
) -> None:
    slots_of_the_cpu.undo()
    ring = Ring("it", 1, 4000)
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    ring.receive_on(device)
    for number in range(3):
        value = torch.arange(1000, dtype=torch.float32, device="cuda:0") * number
        assert ring.offer(Message(number, 1, [value.t()]))
        got = ring.take(number)
        assert isinstance(got, Message)
        assert got.tensors[0].device == device
        assert got.tensors[0].cpu().equal(value.cpu())
    ring.close()


# --------------------------------------------------------------------- batches

Point = namedtuple("Point", "x y")

plain = st.one_of(
    st.text(max_size=5),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.binary(max_size=5),
)
keys = st.text(max_size=3)
nests = st.recursive(
    st.one_of(plain, tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=2).map(OrderedDict),
    ),
    max_leaves=8,
)


def equal(a: Any, b: Any) -> bool:
    leaves, nest = pytree.tree_flatten(a)
    others, other = pytree.tree_flatten(b)
    if nest != other or type(a) is not type(b):
        return False
    return all(
        same(x, y) if isinstance(x, Tensor) else (type(x), x) == (type(y), y)
        for x, y in zip(leaves, others, strict=True)
    )


@given(example=nests, batch=nests)
def test_batches_come_out_as_they_went_in(example: Any, batch: Any) -> None:
    """The nest of the example, which does not travel, and any other."""
    packing = BatchPacking(example)
    for given_batch in (example, batch):
        assert equal(packing.unpack(*packing.pack(given_batch)), given_batch)


def test_the_usual_nest_does_not_travel_and_may_be_of_named_tuples() -> None:
    packing = BatchPacking(Point([torch.ones(2)], "a"))
    tensors_of, rest = packing.pack(Point([torch.zeros(2)], "b"))
    assert len(rest) < 10
    got = packing.unpack(tensors_of, rest)
    assert isinstance(got, Point)
    assert got.y == "b"
    with pytest.raises(TaskError, match="differs from the first"):
        packing.pack([Point(1, 2)])


def test_arrays_travel_as_arrays() -> None:
    batch = {"x": np.arange(6.0).reshape(2, 3).T, "flags": np.array([True, False])}
    batch["x"].setflags(write=False)
    packing = BatchPacking(batch)
    got = packing.unpack(*packing.pack(batch))
    for name, array in batch.items():
        assert got[name].dtype == array.dtype
        assert np.array_equal(got[name], array)


class Thing:
    """Not a tensor."""


@pytest.mark.parametrize(
    "leaf", [Thing(), np.array(["a"]), {1, 2}, torch.ones(2).to_sparse(), 2**70, np.float64(1)]
)
def test_what_cannot_travel_is_refused(leaf: Any) -> None:
    with pytest.raises(TaskError, match="inputs= and collate_fn") as caught:
        BatchPacking([torch.ones(1), leaf])
    assert "\n" not in str(caught.value)


def test_a_copied_batch_is_independent_of_its_memory() -> None:
    block = torch.zeros(8)
    batch = {"x": block[2:6].view(2, 2).t(), "name": "a"}
    made = copied_batch(batch)
    block.fill_(1.0)
    assert made["x"].eq(0).all()
    assert made["x"].stride() == batch["x"].stride()
    assert made["name"] == "a"


# -------------------------------------------------------------------- channels


@pytest.mark.parametrize("modules", [1, 2, 4])
def test_channels_join_neighbours_and_ends(modules: int) -> None:
    schedule = Schedule(tuple(range(modules - 1, -1, -1)), 5, barrier=True)
    channels = Channels(schedule, [100] * (modules - 1), 100)
    ends = {k: channels.ends(k) for k in range(1, modules + 1)}
    assert ends[1].inputs is ends[1].input_gradients is None
    assert ends[modules].outputs is ends[modules].gradients is None
    for k in range(1, modules):
        assert ends[k].outputs is ends[k + 1].inputs is not None
        assert ends[k].gradients is ends[k + 1].input_gradients is not None
    assert (ends[1].batches is None) == (modules == 1)
    assert ends[1].batches is ends[modules].batches
    assert ends[1].barrier == {k: ends[k].passed for k in range(2, modules + 1)}
    channels.close()
