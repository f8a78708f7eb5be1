"""Contributions -> one gradient and one rate: an ordered left fold, bit for bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from training_tools import same_bits, seeded

from gruppetto.training.parameters import Flat
from gruppetto.training.server import combine


def formula(
    gradients: list[Tensor], samples: list[int], factors: list[float], divisor: float
) -> Tensor:
    """acc = g1*a1, then acc += a_i*g_i, with a_i = n_i s_i / divisor in Python's float64."""
    shares = [n * s / divisor for n, s in zip(samples, factors, strict=True)]
    total = gradients[0] * shares[0]
    for gradient, share in zip(gradients[1:], shares[1:], strict=True):
        total = torch.add(total, gradient, alpha=share)
    return total


def random_case(
    seed: int, count: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[int], list[float]]:
    draw = random.Random(seed)
    gradients = [torch.randn(192, generator=seeded(seed * 100 + i)).to(dtype) for i in range(count)]
    samples = [draw.randint(1, 17) for _ in range(count)]
    factors = [1.0 / draw.randint(1, 9) for _ in range(count)]
    return gradients, samples, factors


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_learning_rate_form_bit_for_bit(count: int, dtype: torch.dtype) -> None:
    gradients, samples, factors = random_case(count, count, dtype)
    weighted = sum(n * s for n, s in zip(samples, factors, strict=True))
    combined, rate = combine([Flat([g]) for g in gradients], samples, factors)
    assert same_bits(combined.vectors[0], formula(gradients, samples, factors, weighted))
    assert rate == weighted / sum(samples)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_form_bit_for_bit(count: int, dtype: torch.dtype) -> None:
    gradients, samples, factors = random_case(10 + count, count, dtype)
    combined, rate = combine([Flat([g]) for g in gradients], samples, factors, "gradient")
    assert same_bits(combined.vectors[0], formula(gradients, samples, factors, sum(samples)))
    assert rate == 1.0


def test_both_forms_are_the_weighted_means_they_claim_to_be() -> None:
    gradients, samples, factors = random_case(5, 5, torch.float64)
    n, s = np.array(samples, dtype=np.float64), np.array(factors)
    stack = np.stack([g.numpy() for g in gradients])
    by_rate, rate = combine([Flat([g]) for g in gradients], samples, factors)
    literal, one = combine([Flat([g]) for g in gradients], samples, factors, "gradient")
    by_hand = (n * s) @ stack
    np.testing.assert_allclose(by_rate.vectors[0].numpy(), by_hand / (n * s).sum(), rtol=1e-12)
    np.testing.assert_allclose(literal.vectors[0].numpy(), by_hand / n.sum(), rtol=1e-12)
    # For plain SGD the two are one rule: rate * gradient is the same step.
    np.testing.assert_allclose(
        rate * by_rate.vectors[0].numpy(), one * literal.vectors[0].numpy(), rtol=1e-12
    )


@pytest.mark.parametrize("num_samples", [1, 3, 13, 47])
@pytest.mark.parametrize("factor", [1.0, 1 / 3, 0.1])
def test_a_single_contribution_keeps_its_bits(num_samples: int, factor: float) -> None:
    gradient = torch.randn(1024, generator=seeded(1))
    # (13 * g) / 13 is not g: the case this guards against exists in this very vector.
    assert not torch.equal((13 * gradient) / 13, gradient)
    combined, rate = combine([Flat([gradient])], [num_samples], [factor])
    assert same_bits(combined.vectors[0], gradient)
    assert rate == pytest.approx(factor, rel=1e-15)


def test_weights_are_samples_not_mini_batches() -> None:
    """A ragged mini-batch of 1 beside one of 3: three quarters, not halves."""
    gradients = [Flat([torch.full((64,), 8.0)]), Flat([torch.full((64,), 4.0)])]
    combined, rate = combine(gradients, [3, 1], [1.0, 1.0])
    assert combined.vectors[0].unique().tolist() == [7.0]
    assert rate == 1.0


def test_hand_computed_numbers_of_both_forms() -> None:
    gradients = [Flat([torch.full((64,), 8.0)]), Flat([torch.full((64,), 4.0)])]
    combined, rate = combine(gradients, [4, 2], [0.5, 1.0])
    assert combined.vectors[0].unique().tolist() == [6.0]  # (4*.5*8 + 2*4) / (4*.5 + 2)
    assert rate == pytest.approx(4 / 6, rel=1e-15)
    combined, rate = combine(gradients, [4, 2], [0.5, 1.0], "gradient")
    assert combined.vectors[0].unique().tolist() == [4.0]  # 24 / 6
    assert rate == 1.0


def test_order_of_contributions_decides_the_bits_in_float32() -> None:
    """Shares of a quarter are exact, so every rounding here is the sum's own."""

    def summed(*values: float) -> float:
        gradients = [Flat([torch.full((64,), v)]) for v in values]
        return float(combine(gradients, [1] * 4, [1.0] * 4)[0].vectors[0][0])

    assert summed(2.0**27, -(2.0**27), 1.0, 0.0) == 0.25  # the large ones cancel first
    assert summed(2.0**27, 1.0, -(2.0**27), 0.0) == 0.0  # the 1 was swallowed


def test_all_vectors_are_combined_and_the_inputs_stay() -> None:
    first = Flat([torch.full((64,), 1.0), torch.full((64,), 2.0, dtype=torch.float64)])
    second = Flat([torch.full((64,), 3.0), torch.full((64,), 6.0, dtype=torch.float64)])
    combined, _ = combine([first, second], [1, 1], [1.0, 1.0])
    assert [v.unique().tolist() for v in combined.vectors] == [[2.0], [4.0]]
    assert [v.unique().tolist() for v in first.vectors] == [[1.0], [2.0]]
    assert [v.unique().tolist() for v in second.vectors] == [[3.0], [6.0]]


def test_a_factor_of_zero_leaves_its_gradient_out_even_when_the_first_is_whole() -> None:
    first, second = torch.full((64,), 5.0), torch.full((64,), 9.0)
    for gradients, factors, left in (
        ([first, second], [1.0, 0.0], 5.0),
        ([first, second], [0.0, 1.0], 9.0),
    ):
        combined, rate = combine([Flat([g]) for g in gradients], [1, 1], factors)
        assert combined.vectors[0].unique().tolist() == [left]
        assert rate == 0.5
    assert first.unique().tolist() == [5.0]
    assert second.unique().tolist() == [9.0]


def test_all_factors_zero_is_no_step_and_no_division_by_zero() -> None:
    combined, rate = combine([Flat([torch.ones(64)])] * 2, [2, 3], [0.0, 0.0])
    assert rate == 0.0
    assert combined.is_finite()


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 512), st.floats(1e-3, 1.0)), min_size=1, max_size=12),
    st.integers(0, 2**31),
)
def test_equal_gradients_combine_to_themselves(parts: list[tuple[int, float]], seed: int) -> None:
    gradient = torch.randn(64, generator=seeded(seed))
    samples, factors = [n for n, _ in parts], [s for _, s in parts]
    combined, rate = combine([Flat([gradient.clone()]) for _ in parts], samples, factors)
    torch.testing.assert_close(combined.vectors[0], gradient, rtol=3e-6, atol=1e-7)
    expected = np.dot(samples, factors) / np.sum(samples)
    assert rate == pytest.approx(float(expected), rel=1e-12)
    assert min(factors) * (1 - 1e-12) <= rate <= max(factors) * (1 + 1e-12)
