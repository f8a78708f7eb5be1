"""What late gradients were computed on is there when the server asks for it, on every engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gruppetto as gp
from gruppetto.engines.local.memory import MemoryPlan
from gruppetto.engines.local.versions import Versions
from gruppetto.runs.execute import Run
from gruppetto.runs.folder import RunFolder
from gruppetto.runs.parts import predict_local_memory, predict_memory
from gruppetto.testing import NullServer, conformance_task, reference
from gruppetto.trace import EventRow, Row, UpdateRow, read_trace
from gruppetto.training.parameters import Flat
from gruppetto.training.server import Server

CELLS = ("k-sync:k=2", "k-batch-sync:k=2", "k-async:k=2", "k-batch-async:k=2", "async")
HASHES = ("weights_sha256", "state_sha256", "events_sha256", "commands_sha256")
METHODS: tuple[dict[str, Any], ...] = (
    {"modulation": "distance:c=0.001"},
    {"modulation": "none", "compensation": "dc-asgd:strength=1.0"},
    {"modulation": "inverse", "compensation": "dc-asgd-adaptive"},
    {"modulation": "distance:c=0.001", "compensation": "gap-aware"},
)
OPTIMIZERS = ("sgd:lr=0.05,momentum=0.9", "adam:lr=0.01")


def train(out: Path, **settings: Any) -> Run:
    """Three learners on the conformance task: BatchNorm, absent gradients, two groups."""
    chosen = {"learners": 3, "progress": False, "delay": "exponential:mean=1.0", **settings}
    return gp.train(reference(), out=out, **{"engine": "virtual", **chosen})


def hashes(result: dict[str, Any]) -> list[str]:
    return [result[h] for h in HASHES]


class StopAt:
    def __init__(self, row: int) -> None:
        self.row = row

    def __call__(self, row: Row) -> bool:
        return isinstance(row, EventRow) and row.row >= self.row


# ---------------------------------------------------------------- the same on all engines


@pytest.mark.parametrize(
    ("protocol", "method"),
    [*zip(["async", "k-async:k=2", "k-batch-async:k=2", "async"], METHODS, strict=True)],
    ids=str,
)
def test_real_processes_and_their_replay(
    tmp_path: Path, protocol: str, method: dict[str, Any]
) -> None:
    delay = "exponential:mean=0.002"
    run = train(tmp_path / "out", engine="local", protocol=protocol, delay=delay, **method)
    assert run.result["max_staleness"] > 0
    again = gp.replay(tmp_path / "out", progress=False)
    assert again["matches"], again["difference"]
    assert hashes(again) == hashes(run.result)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("protocol", ["k-sync:k=2", "k-async:k=2", "k-batch-async:k=2"])
def test_virtual_time_its_replay_and_its_resume(
    tmp_path: Path, protocol: str, optimizer: str, method: dict[str, Any]
) -> None:
    settings = {"protocol": protocol, "optimizer": optimizer, **method}
    whole = train(tmp_path / "whole", **settings)
    assert gp.replay(tmp_path / "whole", progress=False)["matches"]
    train(tmp_path / "part", on_event=StopAt(9), **settings)
    resumed = gp.resume(tmp_path / "part", progress=False)
    assert hashes(resumed.result) == hashes(whole.result)
    if protocol == "k-sync:k=2":
        plain = {"protocol": protocol, "optimizer": optimizer, "modulation": "none"}
        without = train(tmp_path / "without", **plain)
        # Nothing is late where late work is cancelled, so nothing is changed.
        assert without.result["weights_sha256"] == whole.result["weights_sha256"]


@pytest.mark.parametrize("method", METHODS[2:], ids=str)
def test_real_processes_resume_with_held_gradients(tmp_path: Path, method: dict[str, Any]) -> None:
    """Each version they were computed on is saved once, and is there after the resume."""
    out = tmp_path / "out"
    settings = {"engine": "local", "protocol": "k-batch-async:k=5", "epochs": 3, **method}
    # Three join, two waves of three push: the sixth waits for the next wave.
    train(out, delay="constant:value=0.1", on_event=StopAt(8), **settings)
    _, tensors, plain = RunFolder(out).load_checkpoint()
    assert plain["held"]
    assert sorted(plain["past"]) == sorted(plain["held"])
    saved = {name.split("/")[1] for name in tensors if name.startswith("past/")}
    assert saved == {str(version) for version in plain["past"].values()}
    resumed = gp.resume(out, progress=False)
    assert resumed.result["stopped_by"] == "epochs"
    again = gp.replay(out, progress=False)
    assert again["matches"], again["difference"]


def test_the_past_is_what_the_gradient_was_computed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every time, under every protocol: the flat weights published as that version."""
    published: list[list[torch.Tensor]] = []
    seen = []
    original_apply, original_snapshot = Server.apply, Server.snapshot

    def snapshot(server: Server) -> Any:
        made = original_snapshot(server)
        published.append([v.clone() for v in made.flat.vectors])
        return made

    def apply(server: Server, contributions: Any, gradients: Any, past: Any = ()) -> None:
        for contribution, then in zip(contributions, past, strict=True):
            expected = published[contribution.version]
            assert all(torch.equal(a, b) for a, b in zip(then.vectors, expected, strict=True))
            seen.append(contribution.staleness)
        original_apply(server, contributions, gradients, past)

    monkeypatch.setattr(Server, "snapshot", snapshot)
    monkeypatch.setattr(Server, "apply", apply)
    for protocol in CELLS:
        published.clear()
        train(tmp_path / protocol, protocol=protocol, compensation="dc-asgd", epochs=2)
    assert max(seen) >= 3


def test_distance_factors_are_recorded(tmp_path: Path) -> None:
    rows: list[UpdateRow] = []

    def keep(row: Row) -> None:
        if isinstance(row, UpdateRow):
            rows.append(row)

    train(tmp_path / "out", protocol="async", modulation="distance:c=1e-5", on_event=keep)
    late = [f for r in rows for s, f in zip(r.staleness, r.factors, strict=True) if s > 0]
    fresh = [f for r in rows for s, f in zip(r.staleness, r.factors, strict=True) if s == 0]
    assert set(fresh) == {1.0}
    # After a step made short, the next gradient has hardly been left behind and counts fully.
    assert min(late) > 0.0 and max(late) <= 1.0
    assert len({factor for factor in late if factor < 1.0}) > 3
    assert read_trace(tmp_path / "out" / "trace").updates == rows


@pytest.mark.parametrize("optimizer", [torch.optim.Rprop, torch.optim.ASGD])
def test_rules_need_an_optimizer_that_follows_its_rate(
    tmp_path: Path, optimizer: type[torch.optim.Optimizer]
) -> None:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        return optimizer(model.parameters(), lr=0.01)  # type: ignore[call-arg]

    given: dict[str, Any] = {"protocol": "async", "optimizer": build, "progress": False}
    with pytest.raises(gp.InvalidSetting, match="does not follow its learning rate"):
        gp.train(
            conformance_task(), out=tmp_path / "a", modulation="distance:c=1.0",
            engine="virtual", **given,
        )  # fmt: skip
    run = gp.train(
        conformance_task(), out=tmp_path / "b", modulation="none", compensation="gap-aware",
        engine="virtual", **given,
    )  # fmt: skip
    assert run.result["stopped_by"] == "epochs"


# ------------------------------------------------------------------------------- memory


class CountingServer(NullServer):
    """Publishes its version's number."""

    def publish_to(self, place: Any) -> None:
        place.flat.vectors[0].fill_(self.version)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=120))
def test_a_version_stays_for_the_gradients_of_it(steps: list[tuple[int, int]]) -> None:
    """As many are pushed and held as there are blocks for gradients, and no version is lost."""
    plan = MemoryPlan.for_run(4, 3, keeps_past=True)
    memory = [SimpleNamespace(flat=Flat([torch.zeros(1)])) for _ in range(plan.num_versions)]
    space: Any = SimpleNamespace(plan=plan, version=memory.__getitem__)
    server: Any = CountingServer()
    versions = Versions(space, keeps_past=True)
    versions.publish(0, server)
    computing: dict[int, tuple[int, int]] = {}
    held: dict[int, int] = {}
    lease = 0
    for kind, learner in steps:
        if kind == 0:
            server.version += 1
            versions.publish(server.version, server)
        elif learner not in computing:
            computing[learner] = versions.hold(), versions.newest
        elif kind == 1 and len(held) + len(computing) < plan.num_gradients:
            block, version = computing.pop(learner)
            versions.keep(lease, version, block)
            held[lease] = version
            lease += 1
        elif held:
            versions.forget(min(held))
            del held[min(held)]
        assert [float(p.vectors[0]) for p in versions.past(held)] == list(held.values())
    tensors, plain = versions.past_state(held)
    assert len(tensors) == len(set(held.values()))
    other = Versions(space, keeps_past=True)
    other.restore_past({name: t.clone() for name, t in tensors.items()}, plain)
    assert [float(p.vectors[0]) for p in other.past(held)] == list(held.values())


def test_without_a_need_no_version_is_kept() -> None:
    plan = MemoryPlan.for_run(1, 1)
    memory = [SimpleNamespace(flat=Flat([torch.zeros(1)])) for _ in range(plan.num_versions)]
    space: Any = SimpleNamespace(plan=plan, version=memory.__getitem__)
    server: Any = CountingServer()
    versions = Versions(space)
    versions.publish(0, server)
    for number in range(1, 20):
        block = versions.hold()
        versions.publish(number, server)
        versions.keep(number, number - 1, block)
    assert versions.past([1, 2]) == [] and versions.past_state([1, 2]) == ({}, {})


def test_memory_that_is_predicted() -> None:
    """The versions of held gradients, and what compensation keeps."""
    protocol = gp.KBatchAsync(k=4)
    plain = predict_local_memory(protocol, 8, 100, 1)
    more = predict_local_memory(protocol, 8, 100, 1, keeps_past=True, num_more=4)
    assert more - plain == ((2 * 8 + 4 + 2) - (8 + 2) + 4) * 100
    assert predict_memory(protocol, 8, 100, 4) - predict_memory(protocol, 8, 100) == 400


def test_a_run_that_needs_too_much_is_refused(tmp_path: Path) -> None:
    """The limit lies between what the run needs without compensation and with it."""
    given: dict[str, Any] = {"protocol": "async", "learners": 1, "epochs": 1}
    layout = train(tmp_path / "size", **given).folder.path / "config.json"
    size = 4 * sum(json.loads(layout.read_text())["arithmetic"]["lengths"])
    memory = predict_memory(gp.Async(), 1, size, 2) / 2**30
    train(tmp_path / "a", memory=memory, **given)
    with pytest.raises(gp.InvalidSetting, match="memory: this run needs about"):
        train(tmp_path / "b", memory=memory, compensation="gap-aware", **given)
