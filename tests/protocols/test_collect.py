"""The table of protocols: K, round trips of specs, and the sentences of refusals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import RULES

from gruppetto.errors import InvalidSetting, UsageError
from gruppetto.protocols import (
    PROTOCOLS,
    AdaSync,
    Async,
    Backup,
    Hardsync,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    Protocol,
    Rennala,
    Ringmaster,
    Softsync,
    Ssp,
)
from gruppetto.spec import Registry
from gruppetto.staleness import (
    MODULATIONS,
    AnnealedPower,
    DelayAdaptive,
    Distance,
    Exponential,
    Inverse,
    InverseMean,
    InverseSqrt,
    NoModulation,
    Polynomial,
    Threshold,
)

SPECS = [
    ("k-sync:k=3", KSync(3)),
    ("k-batch-sync:k=3", KBatchSync(3)),
    ("k-async:k=3", KAsync(3)),
    ("k-batch-async:k=3", KBatchAsync(3)),
    ("hardsync", Hardsync()),
    ("softsync:n=2", Softsync(2)),
    ("async", Async()),
    ("backup:b=1", Backup(1)),
    ("rennala:k=5", Rennala(5)),
    ("ringmaster:r=4", Ringmaster(4)),
    ("ssp:s=0", Ssp(0)),
    ("adasync:over=k-async,k0=2,interval=0.5", AdaSync("k-async", 2, 0.5)),
]
MODULATION_SPECS = [
    ("none", NoModulation()),
    ("inverse", Inverse()),
    ("inverse:apply_to=gradient", Inverse(apply_to="gradient")),
    ("inverse-mean", InverseMean()),
    ("inverse-mean:cap=true", InverseMean(cap=True)),
    ("inverse-mean:cap=true,apply_to=gradient", InverseMean(cap=True, apply_to="gradient")),
    ("inverse:normalise=true", Inverse(normalise=True)),
    ("distance:c=5e-05", Distance(5e-5)),
    ("delay-adaptive:apply_to=gradient", DelayAdaptive("gradient")),
    ("threshold", Threshold()),
    ("threshold:scale=2.0,limit=4", Threshold(2.0, 4)),
    ("inverse-sqrt:normalise=true", InverseSqrt(normalise=True)),
    ("polynomial:a=2.0", Polynomial(2.0)),
    ("exponential:beta=0.5", Exponential(0.5)),
    ("annealed-power:updates=100", AnnealedPower(100)),
]


# ------------------------------------------------------------------------- round trips


@pytest.mark.parametrize(("text", "protocol"), SPECS)
def test_protocol_round_trip(text: str, protocol: Protocol) -> None:
    assert PROTOCOLS.parse(text) == protocol
    assert PROTOCOLS.format(protocol) == text
    assert PROTOCOLS.parse(protocol) is protocol


@pytest.mark.parametrize(("text", "modulation"), MODULATION_SPECS)
def test_modulation_round_trip(text: str, modulation: Any) -> None:
    assert MODULATIONS.parse(text) == modulation
    assert MODULATIONS.format(modulation) == text


def test_every_registered_name_has_a_round_trip() -> None:
    assert sorted(text.partition(":")[0] for text, _ in SPECS) == sorted(PROTOCOLS)
    assert {text.partition(":")[0] for text, _ in MODULATION_SPECS} == set(MODULATIONS)


def test_spaces_and_default_keys_are_read_and_not_written() -> None:
    parsed = MODULATIONS.parse(" inverse-mean:cap = false, apply_to = learning-rate ")
    assert MODULATIONS.format(parsed) == "inverse-mean"


@pytest.mark.parametrize("registry", [PROTOCOLS, MODULATIONS], ids=lambda r: r.kind)
def test_every_entry_says_what_it_is(registry: Registry[Any]) -> None:
    for name in registry:
        assert registry.summary(name).endswith("."), name
        assert registry.usage(name).startswith(name)


def test_usage_shows_keys_and_defaults() -> None:
    assert PROTOCOLS.usage("backup") == "backup:b="
    assert PROTOCOLS.usage("async") == "async[:max_staleness=][,on_stale=discard|restart|wait]"
    assert MODULATIONS.usage("inverse-mean") == "inverse-mean:cap=false,apply_to=learning-rate"


# --------------------------------------------------------------------------- the rules


@settings(max_examples=200, derandomize=True, deadline=None)
@given(name=st.sampled_from(sorted(RULES)), live=st.integers(0, 64), number=st.integers(1, 70))
def test_k_and_cell_are_those_of_the_oracle(name: str, live: int, number: int) -> None:
    """Also with fewer learners than `check` would start with: members die."""
    distinct, cancels, rule = RULES[name]
    keys = {"softsync": "n", "backup": "b", "hardsync": "", "async": ""}
    key = {**keys, "ringmaster": "r", "ssp": "s"}.get(name, "k")
    spec = f"{name}:{key}={number}" if key else name
    protocol = PROTOCOLS.parse(f"{name},k0={number},interval=1" if "over=" in name else spec)
    assert (protocol.cell.distinct, protocol.cell.cancels) == (distinct, cancels)
    assert protocol.num_to_wait(live) == max(1, rule(live, number))


@pytest.mark.parametrize(
    ("text", "num_learners", "mean"),
    [
        ("k-async:k=2", 8, 3.0),
        ("k-async:k=8", 8, 0.0),
        ("k-async:k=8", 5, 0.0),  # three of eight died: nobody is left to be late
        ("k-batch-async:k=2", 8, 3.5),
        ("k-batch-async:k=16", 8, 7 / 16),
        ("softsync:n=4", 8, 3.5),
        ("async", 8, 7.0),
        ("async", 0, 0.0),
        ("k-sync:k=2", 8, 0.0),
        ("k-batch-sync:k=2", 8, 0.0),
        ("hardsync", 8, 0.0),
        ("backup:b=2", 8, 0.0),
        ("rennala:k=2", 8, 0.0),
    ],
)
def test_expected_mean_staleness(text: str, num_learners: int, mean: float) -> None:
    assert PROTOCOLS.parse(text).expected_mean_staleness(num_learners) == mean


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "kasync:k=2",
            f"unknown protocol 'kasync'; valid: {', '.join(PROTOCOLS)} (did you mean 'k-async'?)",
        ),
        ("k-sync", "protocol 'k-sync' needs k=; expected k-sync:k="),
        (
            "softsync",
            "protocol 'softsync' needs n=; expected "
            "softsync:n=[,max_staleness=][,on_stale=discard|restart|wait]",
        ),
        ("k-async:K=2", "protocol 'k-async' has no key 'K'; valid: k, max_staleness, on_stale"),
        ("async:k=2", "protocol 'async' has no key 'k'; valid: max_staleness, on_stale"),
        ("hardsync:k=2", "protocol 'hardsync' has no key 'k'; it takes no keys"),
        ("k-async:k=two", "protocol k-async:k: expected a whole number, got 'two'"),
        ("k-async:k=2.5", "protocol k-async:k: expected a whole number, got '2.5'"),
        ("k-async:k=", "protocol k-async:k: expected a whole number, got ''"),
        ("k-async:", "protocol 'k-async:' ends in a colon; expected k-async:key=value"),
        ("k-async:2", "protocol 'k-async:2': expected key=value, got '2'"),
        ("k-async:k=2,k=3", "protocol 'k-async:k=2,k=3': 'k' is given twice"),
        ("", "protocol: expected something like name:key=value, got ''"),
        ("k-sync:k=0", "k-sync: expected k >= 1, got k=0"),
        ("rennala:k=-1", "rennala: expected k >= 1, got k=-1"),
        ("softsync:n=0", "softsync: expected n >= 1, got n=0"),
        ("backup:b=-1", "backup: expected b >= 0, got -1"),
    ],
)
def test_refused_protocols(text: str, message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        PROTOCOLS.parse(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("invers", "unknown modulation 'invers'; valid: none, inverse, inverse-mean, distance, "),
        ("inverse-mean:cap=yes", "modulation inverse-mean:cap: expected true or false, got 'yes'"),
        (
            "inverse:apply_to=rate",
            "modulation inverse:apply_to: expected one of learning-rate, gradient, got 'rate'",
        ),
    ],
)
def test_refused_modulations(text: str, message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        MODULATIONS.parse(text)
    assert str(caught.value).startswith(message)


def test_refusals_are_usage_errors_and_value_errors() -> None:
    for kind in (UsageError, ValueError):
        with pytest.raises(kind):
            KSync(0)


def test_an_object_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="expected a protocol or its name, got Inverse; valid"):
        PROTOCOLS.parse(Inverse())  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["k-sync:k=5", "k-async:k=5"])
def test_more_distinct_learners_than_there_are_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        PROTOCOLS.parse(text).check(4)
    assert str(caught.value) == (
        f"{text} waits for 5 distinct learners of 4; expected k <= 4, or use the k-batch form"
    )


@pytest.mark.parametrize(
    "text",
    [
        *("k-batch-sync:k=5", "k-batch-async:k=5", "rennala:k=5", "hardsync", "async"),
        *("k-sync:k=4", "k-async:k=4", "softsync:n=4", "backup:b=3"),
    ],
)
def test_allowed_with_four_learners(text: str) -> None:
    """K > P is refused in the distinct cells only."""
    PROTOCOLS.parse(text).check(4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("softsync:n=5", "softsync:n=5 waits for floor(4/5) = 0 mini-batches; expected n <= "),
        ("backup:b=4", "backup:b=4 leaves no learner to wait for; expected b < learners = 4"),
    ],
)
def test_derived_k_of_zero_is_refused_at_the_start(text: str, message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        PROTOCOLS.parse(text).check(4)
    assert str(caught.value).startswith(message)
