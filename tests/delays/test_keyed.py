"""Keyed draws: the n-th job of a slot takes equally long in every engine, whoever asks, whenever.

The Philox-4x64 words are checked against an independent implementation, so that a change of
numpy's counter would be noticed as well.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from gruppetto.delays import DELAYS, KeyedDelays, keyed_uniforms
from gruppetto.errors import InvalidSetting

LAWS = (
    "exponential:mean=1.0",
    "gamma:shape=0.7,scale=2.0",
    "lognormal:median=1.0,sigma=1.0",
    "pareto:shape=1.5,scale=0.5",
    "weibull:shape=0.7,scale=1.0",
)
MASK = 2**64 - 1


def _keyed(law: str, seed: int = 3, learners: int = 4) -> KeyedDelays:
    return KeyedDelays(seed, DELAYS.parse(law), {}, learners)


def _philox_first_word(counter: int, key: tuple[int, int]) -> int:
    """Philox-4x64-10 of Salmon et al. 2011, §3.3, with plain integers."""
    c = [counter & MASK, counter >> 64 & MASK, 0, 0]
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(right >> 64) ^ c[1] ^ k0, right & MASK, (left >> 64) ^ c[3] ^ k1, left & MASK]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return c[0]


@pytest.mark.parametrize(("seed", "slot"), [(0, 0), (3, 1), (2**63, 2**63 + 5), (2**64 - 1, 7)])
def test_uniforms_are_the_first_words_of_philox_blocks(seed: int, slot: int) -> None:
    """Key (seed, slot); the counter steps before a block is made, so draw n is block n + 1."""
    drawn = keyed_uniforms(seed, slot, 0, 5).tolist()
    words = [_philox_first_word(n + 1, (seed, slot)) for n in range(5)]
    assert drawn == [((word >> 11) + 0.5) * 2.0**-53 for word in words]


def test_uniforms_lie_strictly_between_zero_and_one_and_are_uniform() -> None:
    """100,000 of them: mean and variance, every tenth equally full; neighbours unrelated."""
    u = keyed_uniforms(11, 2, 0, 100_000)
    assert float(u.min()) > 0.0
    assert float(u.max()) < 1.0
    assert float(u.mean()) == pytest.approx(0.5, abs=0.005)
    assert float(u.var()) == pytest.approx(1.0 / 12.0, rel=0.02)
    counts, _ = np.histogram(u, bins=10, range=(0.0, 1.0))
    assert counts.min() > 9_600
    assert counts.max() < 10_400
    assert abs(float(np.corrcoef(u[:-1], u[1:])[0, 1])) < 0.015


def test_uniforms_do_not_depend_on_how_many_are_asked_for_at_once() -> None:
    """Number n is number n, alone or among others, near and far from the start."""
    together = keyed_uniforms(5, 1, 0, 600)
    for start, count in [(0, 1), (1, 1), (255, 2), (256, 256), (599, 1)]:
        assert (keyed_uniforms(5, 1, start, count) == together[start : start + count]).all()
    far = keyed_uniforms(5, 1, 10**12, 3)
    assert (keyed_uniforms(5, 1, 10**12 + 1, 2) == far[1:]).all()


@pytest.mark.parametrize("law", LAWS)
def test_draws_do_not_depend_on_order_or_block(law: str) -> None:
    """Forwards, backwards, at random, twice, from a fresh object each time: the same bits."""
    forwards = _keyed(law)
    expected = {(s, n): forwards.draw(s, n) for s in range(4) for n in range(600)}
    jobs = list(expected)
    again = _keyed(law)
    assert all(again.draw(*job) == expected[job] for job in reversed(jobs))
    random.Random(1).shuffle(jobs)
    shuffled = _keyed(law)
    assert all(shuffled.draw(*job) == expected[job] for job in jobs[:800])
    for job in jobs[:30]:
        assert _keyed(law).draw(*job) == expected[job]
        assert shuffled.draw(*job) == shuffled.draw(*job) == expected[job]


def test_draws_are_the_law_of_the_uniforms() -> None:
    """Through the inverse CDF, block by block."""
    law = DELAYS.parse("exponential:mean=2.0")
    keyed = KeyedDelays(9, law, {}, 2)
    expected = law.quantile(keyed_uniforms(9, 1, 256, 256)).tolist()
    assert [keyed.draw(1, 256 + n) for n in range(256)] == expected


def test_seeds_and_slots_have_streams_of_their_own() -> None:
    """No two of them agree anywhere near the start."""
    streams = {
        tuple(KeyedDelays(seed, DELAYS.parse(LAWS[0]), {}, 5).draw(slot, n) for n in range(5))
        for seed in range(5)
        for slot in range(5)
    }
    assert len(streams) == 25
    assert len({value for stream in streams for value in stream}) == 125


def test_seeds_beyond_64_bits_wrap() -> None:
    """A key has 64 bits for the seed; negative seeds have a stream as well."""
    assert (keyed_uniforms(2**64 + 3, 0, 0, 4) == keyed_uniforms(3, 0, 0, 4)).all()
    assert (keyed_uniforms(-1, 0, 0, 4) == keyed_uniforms(2**64 - 1, 0, 0, 4)).all()


def test_a_learner_may_have_a_law_of_its_own() -> None:
    """Only that one: the others draw what they drew, and it draws by the same uniforms."""
    plain = _keyed("exponential:mean=1.0")
    own = DELAYS.parse("exponential:mean=5.0")
    mixed = KeyedDelays(3, DELAYS.parse("exponential:mean=1.0"), {2: own}, 4)
    assert mixed.law(2) == own
    assert mixed.law(1) == plain.law(1)
    for n in range(20):
        for slot in (0, 1, 3):
            assert mixed.draw(slot, n) == plain.draw(slot, n)
        assert mixed.draw(2, n) == pytest.approx(5.0 * plain.draw(2, n), rel=1e-12)


def test_without_a_law_every_job_takes_one() -> None:
    """One virtual unit."""
    assert [KeyedDelays(0, None, {}, 2).draw(1, n) for n in range(3)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("learner", [-1, 4, 100])
def test_a_law_for_a_learner_that_does_not_exist_is_refused(learner: int) -> None:
    """In a sentence with the range."""
    with pytest.raises(InvalidSetting) as caught:
        KeyedDelays(0, None, {learner: DELAYS.parse("constant:value=1")}, 4)
    assert str(caught.value) == (
        f"a delay is given for learner {learner}; expected a learner from 0 to 3"
    )
