"""The contract of an engine, as a class of pytest tests that every engine inherits.

    class TestMyEngine(EngineConformance):
        engine_name = "mine"
        engine_class = MyEngine

Only the public functions are used: train, resume, replay. What an engine does not promise, it
declares in class attributes. Needs pytest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, get_args

import pytest
import torch
from torch import nn

import gruppetto as gp
from gruppetto.engines.base import Engine
from gruppetto.errors import Diverged, RunFailed, TooManyGivenUp
from gruppetto.protocols import PROTOCOLS
from gruppetto.protocols.adaptive import Over
from gruppetto.protocols.messages import (
    GradientFailed,
    GradientPushed,
    ProgressMeasured,
    StopRequested,
)
from gruppetto.runs.execute import Run
from gruppetto.testing.checks import Story, check_accounts, check_trace, tell
from gruppetto.testing.task import BATCHES_PER_EPOCH, conformance_task, reference
from gruppetto.trace import EventRow, Row

__all__ = ["EngineConformance", "protocols_for"]

EPOCHS = 2
SAMPLES_PER_EPOCH = 44
TOTAL = EPOCHS * BATCHES_PER_EPOCH
#: Seconds between measurements of progress, as cases name them; see EngineConformance.interval.
INTERVAL = 2.0
HASHES = ("weights_sha256", "state_sha256", "events_sha256", "commands_sha256")
LEARNERS = (1, 2, 3, 4)

Finished: TypeAlias = Callable[[str, int], Run]


#: Each bound on staleness, over cells with and without waiting for distinct learners.
BOUNDED = (
    "k-async:k=2,max_staleness=0,on_stale=discard",
    "async:max_staleness=1,on_stale=discard",
    "k-async:k=2,max_staleness=0,on_stale=restart",
    "k-batch-async:k=2,max_staleness=1",
    "k-async:k=2,max_staleness=1,on_stale=wait",
    "softsync:n=3,max_staleness=2,on_stale=wait",
)


def protocols_for(learners: int) -> list[str]:
    """One spec of every registered protocol that so many learners can run; bounds with three."""
    k = min(2, learners)
    numbers: dict[str, Any] = {"k": k, "n": k, "b": learners - 1 if learners < 3 else 1}
    numbers |= {"r": k, "s": 1, "k0": 1, "interval": INTERVAL}
    # What is over the cells is tried over all of them once.
    overs = get_args(Over) if learners == 3 else get_args(Over)[-1:]
    specs = []
    for name in PROTOCOLS:
        fields = PROTOCOLS.keys_of(name).items()
        needed = [key for key, field in fields if field.default is dataclasses.MISSING]
        for over in overs if "over" in needed else ("",):
            keys = ",".join(f"{key}={(numbers | {'over': over})[key]}" for key in needed)
            specs.append(name + (f":{keys}" if keys else ""))
    return specs + list(BOUNDED if learners == 3 else ())


#: Every registered protocol with every number of learners.
CASES = [(spec, learners) for learners in LEARNERS for spec in protocols_for(learners)]
#: One protocol of each cell, with three learners.
CELLS = ("k-sync:k=2", "k-batch-sync:k=2", "k-async:k=2", "k-batch-async:k=2")
#: One that adapts K.
ADAPTIVE = f"adasync:over=k-batch-async,k0=1,interval={INTERVAL}"


def _own_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups from a function of the model; one optimizer with state of two vectors."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in trained if n.startswith("head")], "lr": 0.002},
        {"params": [p for n, p in trained if not n.startswith("head")]},
    ]
    return torch.optim.Adam(groups, lr=0.01)


class EngineConformance:
    """What every engine promises. Subclass it under a name that pytest collects."""

    #: As in ``gp.train(engine=...)``.
    engine_name: ClassVar[str]
    #: The class behind it.
    engine_class: ClassVar[type[Engine]]
    #: Same seed and settings: same events, weights, state, bit for bit.
    is_deterministic: ClassVar[bool] = False
    #: The one loop runs in the process of the caller, where it can be counted.
    loop_is_here: ClassVar[bool] = True
    #: Law of delays that makes gradients arrive out of order; keep its mean short in real time.
    delay: ClassVar[str] = "exponential:mean=1.0"
    #: Seconds between measurements of progress: a few of those delays.
    interval: ClassVar[float] = INTERVAL

    # ------------------------------------------------------------- running

    @classmethod
    def train(cls, out: Path, task: str | gp.Task | None = None, **settings: Any) -> Run:
        """A run of the conformance task on this engine."""
        chosen = {
            "engine": cls.engine_name,
            "epochs": EPOCHS,
            "delay": cls.delay,
            "progress": False,
            **settings,
        }
        if "protocol" in settings:
            at_pace = f"interval={cls.interval}"
            chosen["protocol"] = settings["protocol"].replace(f"interval={INTERVAL}", at_pace)
        return gp.train(reference() if task is None else task, out=out, **chosen)

    def story(self, run: Run, total: int | None = TOTAL) -> Story:
        """Its trace, folded again and checked."""
        story = tell(run.folder.path, total)
        check_trace(story)
        check_accounts(story, SAMPLES_PER_EPOCH)
        return story

    @pytest.fixture(scope="class")
    @classmethod
    def finished(cls, tmp_path_factory: pytest.TempPathFactory) -> Finished:
        """Finished runs by protocol and number of learners, each made once."""
        runs: dict[tuple[str, int], Run] = {}

        def get(protocol: str, learners: int) -> Run:
            key = protocol, learners
            if key not in runs:
                out = tmp_path_factory.mktemp("run") / "out"
                runs[key] = cls.train(out, protocol=protocol, learners=learners)
            return runs[key]

        return get

    # --------------------------------------------------------- whole runs

    @pytest.mark.parametrize(("protocol", "learners"), CASES)
    def test_every_mini_batch_is_applied_once(
        self, finished: Finished, protocol: str, learners: int
    ) -> None:
        """The run ends by its epochs, and the trace accounts for each mini-batch."""
        run = finished(protocol, learners)
        story = self.story(run)
        result = run.result
        assert result["stopped_by"] == "epochs"
        assert result["engine"] == self.engine_name
        assert story.applied() == dict.fromkeys(range(TOTAL), 1)
        assert result["mini_batches_left"] == result["mini_batches_given_up"] == 0
        assert result["samples"] == EPOCHS * SAMPLES_PER_EPOCH
        assert result["updates"] == len(story.updates) == story.coordinator.version
        assert [u.version for u in story.updates] == list(range(1, result["updates"] + 1))

    @pytest.mark.parametrize(("protocol", "learners"), CASES)
    def test_staleness_is_what_the_cell_allows(
        self, finished: Finished, protocol: str, learners: int
    ) -> None:
        """None where unfinished work is cancelled, nor with one learner; at most its bound."""
        run, rules = finished(protocol, learners), PROTOCOLS.parse(protocol)
        if rules.cell.cancels or learners == 1:
            assert run.result["max_staleness"] == 0
            assert set(run.staleness) == {0}
        elif not rules.bound.restarts:
            assert run.result["mini_batches_cancelled"] == 0
        if rules.staleness_limit is not None:
            assert run.result["max_staleness"] <= rules.staleness_limit
        assert sum(run.staleness.values()) == TOTAL

    @pytest.mark.parametrize(("protocol", "learners"), CASES)
    def test_replay_gives_the_same_bits(
        self, finished: Finished, protocol: str, learners: int
    ) -> None:
        """The reference engine makes the same weights, state and commands of its events."""
        run = finished(protocol, learners)
        replayed = gp.replay(run.folder.path, progress=False)
        assert replayed["matches"], replayed["difference"]
        assert [replayed[h] for h in HASHES] == [run.result[h] for h in HASHES]

    @pytest.mark.parametrize(
        ("protocol", "learners"), [(ADAPTIVE, 3), (ADAPTIVE, 4), (CELLS[0], 3)]
    )
    def test_progress_is_measured_where_it_is_asked_for(
        self, finished: Finished, protocol: str, learners: int
    ) -> None:
        """Before the first update, and at most once in an interval; by others never."""
        story = self.story(finished(protocol, learners))
        rows = [row for row in story.trace.events if row.type == ProgressMeasured.__name__]
        if PROTOCOLS.parse(protocol).measures_every is None:
            assert not rows
            return
        assert rows[0].time < story.trace.updates[0].time
        numbers = [int(row.time / self.interval + 1e-9) for row in rows]
        assert numbers == sorted(set(numbers))

    @pytest.mark.parametrize("protocol", CELLS)
    @pytest.mark.parametrize("seed", [1, 2, 3])
    def test_other_seeds(self, tmp_path: Path, protocol: str, seed: int) -> None:
        """The same promises under other seeds: other weights, all mini-batches, same replay."""
        run = self.train(tmp_path / "out", protocol=protocol, learners=3, seed=seed)
        assert self.story(run).applied() == dict.fromkeys(range(TOTAL), 1)
        assert gp.replay(run.folder.path, progress=False)["matches"]

    @pytest.mark.parametrize("protocol", CELLS)
    @pytest.mark.parametrize("optimizer", ["adam:lr=0.01", "own"])
    def test_optimizers_with_state(self, tmp_path: Path, protocol: str, optimizer: str) -> None:
        """Adam by name with the task's groups, and a function of the model with groups."""
        chosen = _own_optimizer if optimizer == "own" else optimizer
        task = conformance_task() if optimizer == "own" else reference()
        run = self.train(
            tmp_path / "out", task=task, protocol=protocol, learners=3, optimizer=chosen
        )
        self.story(run)
        given: dict[str, Any] = {"task": task, "optimizer": chosen} if optimizer == "own" else {}
        assert gp.replay(run.folder.path, progress=False, **given)["matches"]

    def test_the_trained_model_is_the_one_that_was_hashed(self, tmp_path: Path) -> None:
        """Tied weights stay tied, frozen ones stay as they were, the counter of BatchNorm too."""
        run = self.train(tmp_path / "out", protocol="k-async:k=2", learners=3)
        model: Any = run.model
        assert not model.training
        assert model.again.weight is model.middle.weight
        assert bool((model.scale == 0.9).all())
        assert int(model.norm.num_batches_tracked) == TOTAL
        assert bool(torch.isfinite(model.norm.running_var).all())

    def test_the_callers_random_numbers_are_untouched(self, tmp_path: Path) -> None:
        """Training draws from streams of its own."""
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        self.train(tmp_path / "out", learners=2)
        assert torch.equal(torch.rand(3), expected)

    # -------------------------------------------------------------- the loop

    def test_the_loop_is_the_one_in_base(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An engine has no loop of its own and goes through the common one once per run."""
        assert "run" not in {name for c in self.engine_class.__mro__[:-1] for name in _own(c)}
        assert self.engine_class.run is Engine.run
        if not self.loop_is_here:
            return
        calls: list[Engine] = []
        original = Engine.run

        def counted(engine: Engine, *args: Any) -> str:
            calls.append(engine)
            return original(engine, *args)

        monkeypatch.setattr(Engine, "run", counted)
        self.train(tmp_path / "out", learners=2)
        assert [type(engine) for engine in calls] == [self.engine_class]

    # -------------------------------------------------------------- failures

    def test_an_exception_in_user_code_fails_its_mini_batch(self, tmp_path: Path) -> None:
        """It becomes GradientFailed and a row with the traceback; the learners stay."""
        with pytest.raises(TooManyGivenUp) as caught:
            self.train(tmp_path / "out", task=reference("fail"), learners=2, epochs=1)
        _one_sentence(caught.value)
        assert "sample 17 is damaged" in str(caught.value)
        story = tell(tmp_path / "out", BATCHES_PER_EPOCH)
        check_trace(story)
        check_accounts(story, SAMPLES_PER_EPOCH)
        failed = [event for event, _ in story.log if isinstance(event, GradientFailed)]
        assert len(failed) == 3, "the mini-batch is tried three times"
        assert {story.given[event.lease].mini_batch for event in failed} == {
            row.mini_batch for row in story.trace.failures
        }
        for event, row in zip(failed, story.trace.failures, strict=True):
            assert event.reason == "ValueError: sample 17 is damaged"
            assert "Traceback" in row.traceback
            assert "__getitem__" in row.traceback
            assert row.learner == story.given[event.lease].learner
        result = _end(story)
        assert result["stopped_by"] == "given-up"
        assert result["mini_batches_given_up"] == 1
        assert result["gradients_rejected"] == 3
        assert result["learners_lost"] == 0
        assert gp.replay(tmp_path / "out", progress=False)["matches"]

    def test_a_failure_that_is_allowed(self, tmp_path: Path) -> None:
        """With one mini-batch allowed to be given up, the rest is trained."""
        run = self.train(
            tmp_path / "out", task=reference("fail"), learners=3, epochs=1, max_given_up=1
        )
        story = self.story(run, BATCHES_PER_EPOCH)
        assert len(story.applied()) == BATCHES_PER_EPOCH - 1
        assert run.result["mini_batches_given_up"] == 1

    @pytest.mark.parametrize("protocol", CELLS)
    def test_gradients_that_are_not_finite_are_divergence(
        self, tmp_path: Path, protocol: str
    ) -> None:
        """Three different mini-batches end the run before a weight is spoiled."""
        with pytest.raises(Diverged) as caught:
            self.train(
                tmp_path / "out", task=reference("not-finite"), protocol=protocol, learners=3
            )
        _one_sentence(caught.value)
        story = tell(tmp_path / "out", TOTAL)
        check_trace(story)
        check_accounts(story, SAMPLES_PER_EPOCH)
        assert _end(story)["stopped_by"] == "diverged"
        assert not any(isinstance(event, GradientPushed) for event, _ in story.log)
        assert _end(story)["updates"] == 0

    # -------------------------------------------------- stopping and resuming

    @pytest.mark.parametrize("protocol", [*CELLS, ADAPTIVE])
    def test_a_callback_stops_the_run_and_it_can_go_on(self, tmp_path: Path, protocol: str) -> None:
        """What is left is counted; resumed, the run ends by its epochs with nothing lost."""
        out = tmp_path / "out"
        run = self.train(out, protocol=protocol, learners=3, on_event=_StopAtRow(9))
        story = self.story(run)
        stop, _ = story.log[-1]
        assert stop == StopRequested("callback")
        assert run.result["stopped_by"] == "callback"
        assert run.result["mini_batches_left"] > 0
        resumed = gp.resume(out, progress=False)
        story = self.story(resumed)
        assert resumed.result["stopped_by"] == "epochs"
        assert story.applied() == dict.fromkeys(range(TOTAL), 1)
        assert gp.replay(out, progress=False)["matches"]
        if self.is_deterministic:
            whole = self.train(tmp_path / "whole", protocol=protocol, learners=3)
            assert [resumed.result[h] for h in HASHES] == [whole.result[h] for h in HASHES]

    def test_a_number_of_updates_ends_the_run(self, tmp_path: Path) -> None:
        """Not by epochs, so it is stopped: all counts are of mini-batches ever leased."""
        run = self.train(
            tmp_path / "out", protocol="k-async:k=2", learners=3, epochs=None, updates=5
        )
        story = self.story(run, None)
        assert (run.result["stopped_by"], run.result["updates"]) == ("updates", 5)
        parts = ("applied", "given_up", "dropped", "left")
        leased = {compute.mini_batch for compute in story.given.values()}
        assert sum(run.result[f"mini_batches_{part}"] for part in parts) == len(leased)

    # ------------------------------------------------- where it is promised

    @pytest.mark.parametrize("protocol", CELLS)
    def test_the_same_seed_gives_the_same_bits(
        self, tmp_path: Path, finished: Finished, protocol: str
    ) -> None:
        """Only of engines that promise it: events, commands, weights and state."""
        if not self.is_deterministic:
            pytest.skip("this engine's events depend on real time")
        again = self.train(tmp_path / "out", protocol=protocol, learners=3)
        first = finished(protocol, 3).result
        assert [again.result[h] for h in HASHES] == [first[h] for h in HASHES]


class _StopAtRow:
    """Asks for a stop when an event row with a number is written."""

    def __init__(self, row: int) -> None:
        self._row = row

    def __call__(self, row: Row) -> bool:
        return isinstance(row, EventRow) and row.row == self._row


def _own(cls: type) -> set[str]:
    return set() if cls is Engine or not issubclass(cls, Engine) else set(vars(cls))


def _end(story: Story) -> dict[str, Any]:
    assert story.trace.end is not None
    return story.trace.end.result


def _one_sentence(error: RunFailed) -> None:
    text = str(error)
    assert text and "\n" not in text, f"expected one line, got {text!r}"
    assert "Traceback" not in text
