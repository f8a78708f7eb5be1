"""Decoupled runs from settings to trace, in virtual time: bits, endings, resume, replay."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from decoupled_tasks import PER_EPOCH, SAMPLES, blocks
from lockstep import plain
from torch import Tensor, nn

import gruppetto as gp
from gruppetto.decoupled.methods import METHODS
from gruppetto.decoupled.schedule import NetworkProgram, Schedule
from gruppetto.errors import Diverged, InvalidSetting, RunFailed, RunFolderError
from gruppetto.protocols.messages import BackwardFinished, ModuleUpdated, PassFailed
from gruppetto.trace import EventRow, ModuleRow, Row, UpdateRow, follow_rows, read_trace
from gruppetto.training.parameters import hash_tensors
from gruppetto.training.tasks import load_task

HASHES = ("weights_sha256", "state_sha256", "events_sha256", "commands_sha256")
KEYS = {
    "run", "task", "engine", "protocol", "learners", "seed", "updates", "samples", "epochs", "time",
    "wall_time", "stopped_by", "train_loss", "test_loss", "test_accuracy", "mean_staleness",
    "max_staleness", "mini_batches_applied", "mini_batches_cancelled", "mini_batches_discarded",
    "mini_batches_given_up", "mini_batches_dropped", "mini_batches_left", "learners_lost",
    "gradients_rejected", "target_reached_at", "threads", *HASHES,
    "decouple", "modules", "tail", "begins", "per_module",
}  # fmt: skip
#: Of each module.
OF_MODULES = {
    "module", "blocks", "parameters", "staleness", "utilisation", "forward", "backward", "step",
    "loading", "waiting_for_inputs", "waiting_for_gradients", "waiting_for_others",
    "predicted_bytes", "peak_bytes",
}  # fmt: skip
FOLDERS = count()


def train(tmp_path: Path, decouple: str, **settings: Any) -> gp.Run:
    """Three epochs of six mini-batches, the last of each smaller; BatchNorm and dropout."""
    values: dict[str, Any] = {"engine": "virtual", "progress": False, "epochs": 3, **settings}
    task = values.pop("task", None) or blocks()
    return gp.train(task, decouple=decouple, out=tmp_path / f"run-{next(FOLDERS)}", **values)


def told(run: gp.Run) -> dict[str, Any]:
    """What two equal runs have in common, whenever they ran."""
    history = [{k: v for k, v in row.items() if k != "time"} for row in run.history]
    keys = (*HASHES, "updates", "samples", "train_loss", "metrics", "mini_batches_left")
    return {"history": history, **{key: run.result[key] for key in keys}}


# -------------------------------------------------------------------- what it is


@pytest.mark.parametrize(
    ("decouple", "dropout"), [("bp:modules=1", 0.1), ("ddg:modules=1", 0.1), ("bp:modules=3", 0.0)]
)
@pytest.mark.parametrize("optimizer", ["sgd:lr=0.05,momentum=0.9,nesterov=true", "adam:lr=0.01"])
def test_it_is_plain_training(
    tmp_path: Path, decouple: str, dropout: float, optimizer: str
) -> None:
    task = load_task(f"digits:batchnorm=true,dropout={dropout}")
    run = train(tmp_path, decouple, task=task, epochs=0.1, optimizer=optimizer)
    model, losses = plain(task, 9, optimizer)
    assert run.result["updates"] == 9
    assert run.result["weights_sha256"] == hash_tensors(dict(model.named_parameters()))
    rows = read_trace(run.folder.trace).updates
    assert [row.losses[0] for row in rows] == losses
    mine = run.model.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(mine[name], value), name


def test_what_the_summary_and_the_run_tell(tmp_path: Path) -> None:
    run = train(tmp_path, "fdg:modules=3", epochs=1.5)
    result = run.result
    json.dumps(result)
    assert result.keys() >= KEYS
    assert result["protocol"] is None and result["learners"] is None
    assert result["decouple"] == "fdg:modules=3" and result["begins"] == ["1", "2"]
    assert result["stopped_by"] == "epochs" and result["mini_batches_left"] == 0
    assert result["mini_batches_applied"] == result["updates"] == 9
    assert result["samples"] == SAMPLES + 24 and result["epochs"] == (SAMPLES + 24) / SAMPLES
    first, second, last = result["per_module"]
    assert first.keys() >= OF_MODULES
    assert (first["blocks"], last["blocks"]) == (["0"], ["2"])
    assert [each["max_staleness"] for each in result["per_module"]] == [4, 2, 0]
    assert last["staleness"] == 0.0 and second["staleness"] == (0 + 1 + 2 * 7) / 9
    assert run.staleness == {0: 1 + 1 + 9, 1: 2, 2: 8, 3: 1, 4: 5}
    assert result["mean_staleness"] == sum(s * n for s, n in run.staleness.items()) / 27
    total = sum(each["parameters"] for each in result["per_module"])
    assert total == sum(p.numel() for p in run.model.parameters())
    for each in result["per_module"]:
        assert 0 < each["peak_bytes"] <= each["predicted_bytes"]
        assert 0 < each["utilisation"] <= 1
    # Module 1, which is never done sooner, has nearly all of the work.
    busy = [each["forward"] + each["backward"] for each in result["per_module"]]
    assert result["expected_update_time"] == pytest.approx(max(busy) / 9)
    assert result["mean_update_time"] >= result["expected_update_time"]
    assert not run.model.training
    assert [row["version"] for row in run.history] == [6, 9]
    assert result["test_accuracy"] == run.history[-1]["test_accuracy"]


def test_weights_do_not_depend_on_clocks(tmp_path: Path) -> None:
    runs = [
        train(tmp_path, "ddg:modules=3", **more)
        for more in ({}, {"pass_times": "5/1,0.1/0.1,1/9"}, {"pass_times": "measured"})
    ]
    runs.append(train(tmp_path, "ddg:modules=3,schedule=barrier"))
    assert all(told(run) == told(runs[0]) for run in runs)
    assert len({run.result["time"] for run in runs}) == 4
    orders = [[row.row for row in read_trace(run.folder.trace).events] for run in runs]
    assert all(order == list(range(len(orders[0]))) for order in orders)


def test_rows_are_whole_groups_in_order(tmp_path: Path) -> None:
    run = train(tmp_path, "ddg:modules=2", epochs=1)
    rows: list[Row] = list(follow_rows(run.folder.trace))
    kinds = {EventRow: "event", ModuleRow: "module", UpdateRow: "update"}
    shown = []
    for row in rows:
        if isinstance(row, EventRow):
            event = row.decode()
            shown.append(f"{event.module}{type(event).__name__[0]}{event.version}")  # type: ignore[union-attr]
        elif type(row) in kinds:
            shown.append(kinds[type(row)])
    assert shown[:16] == [
        "1M0", "2M0",
        "1F0", "1F0", "1B0", "1M1", "module", "2F0", "2B0", "2M1", "module", "update",
        "1F1", "1B1", "1M2", "module",
    ]  # fmt: skip
    assert shown[-8:] == ["1B5", "1M6", "module", "2F5", "2B5", "2M6", "module", "update"]
    updates = read_trace(run.folder.trace).updates
    assert [row.version for row in updates] == list(range(1, 7))
    assert updates[-1].staleness == [1, 0] and updates[-1].learners == [1, 2]
    assert updates[-1].num_samples == [4, 4] and updates[-1].losses[0] == updates[-1].losses[1]
    assert [row.samples for row in updates] == [8, 16, 24, 32, 40, 44]


# --------------------------------------------------------------- going on later

RESUMED = [
    {"decouple": "ddg:modules=3", "optimizer": "sgd:lr=0.05,momentum=0.9,nesterov=true"},
    {"decouple": "ddg:modules=3,lookahead=0.5", "optimizer": "adam:lr=0.01", "tail": "drop"},
    {"decouple": "ddg:modules=3,stash=none", "clip": "norm:max=0.5"},
    {"decouple": "fr:modules=3", "optimizer": "adam:lr=0.01"},
    {"decouple": "fdg:modules=3,beta=0.7", "modulation": "inverse:normalise=true"},
    {"decouple": "fdg:modules=2", "tail": "drop", "compensation": "dc-asgd-adaptive"},
]


@pytest.mark.parametrize("settings", RESUMED, ids=lambda s: s["decouple"])
def test_a_stopped_run_that_goes_on_is_the_whole_run(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    whole = train(tmp_path, **settings, evaluate_every=0.5)
    part = train(tmp_path, **settings, evaluate_every=0.5, updates=4)
    assert (part.result["stopped_by"], part.result["updates"]) == ("updates", 4)
    assert part.result["mini_batches_left"] == 14
    assert gp.replay(part.folder.path, task=blocks(), progress=False)["matches"]

    def stop(row: Row) -> bool:
        return isinstance(row, UpdateRow) and row.version == 9

    again: dict[str, Any] = {"task": blocks(), "updates": 1000, "progress": False}
    part = gp.resume(part.folder.path, on_event=stop, **again)
    assert part.result["stopped_by"] == "callback"
    assert 9 <= part.result["updates"] <= 9 + 5
    part = gp.resume(part.folder.path, **again)
    assert told(part) == told(whole)
    assert part.staleness == whole.staleness
    replayed = gp.replay(part.folder.path, task=blocks(), progress=False)
    assert replayed["difference"] is None
    with pytest.raises(RunFolderError, match=r"is complete \(epochs\)"):
        gp.resume(part.folder.path, **again)


def test_what_is_in_flight_at_the_end_is_drained_or_dropped(tmp_path: Path) -> None:
    drained = train(tmp_path, "ddg:modules=3", epochs=1)
    dropped = train(tmp_path, "ddg:modules=3", epochs=1, tail="drop")
    assert drained.result["mini_batches_dropped"] == 0
    keys = ("updates", "mini_batches_applied", "mini_batches_dropped", "mini_batches_left")
    assert [dropped.result[key] for key in keys] == [4, 4, 2, 0]
    assert [each["updates"] for each in dropped.result["per_module"]] == [4, 5, 6]
    assert dropped.result["samples"] == 32
    last = read_trace(dropped.folder.trace).updates[-1]
    assert (last.version, last.learners, last.dropped) == (6, [3], 2)
    # Module 3 has seen all mini-batches either way, and module 1 all but the last two.
    assert dropped.result["weights_sha256"] != drained.result["weights_sha256"]
    assert gp.replay(dropped.folder.path, task=blocks(), progress=False)["matches"]
    exported = gp.export(dropped.folder.path)
    state = torch.load(exported, weights_only=True)
    for name, value in dropped.model.state_dict().items():
        assert torch.equal(state[name], value), name
    with pytest.raises(InvalidSetting, match="module 1 applies nothing in a run of 2 mini-batch"):
        train(tmp_path, "ddg:modules=3", epochs=1 / 3, tail="drop")


def test_limits_that_come_close_to_the_end(tmp_path: Path) -> None:
    """With tail=drop modules end at different versions; a stop in between stops nobody."""
    for updates, ended in ((4, "updates"), (5, "epochs"), (6, "epochs"), (7, "epochs")):
        run = train(tmp_path, "ddg:modules=3", epochs=1, tail="drop", updates=updates)
        assert (run.result["stopped_by"], run.result["updates"]) == (ended, 4), updates
    run = train(tmp_path, "ddg:modules=3", epochs=1, updates=6)
    assert (run.result["stopped_by"], run.result["updates"]) == ("epochs", 6)
    run = train(tmp_path, "ddg:modules=3", epochs=None, updates=7)
    assert (run.result["stopped_by"], run.result["mini_batches_left"]) == ("updates", 2)


def test_a_target_stops_it(tmp_path: Path) -> None:
    run = train(tmp_path, "ddg:modules=2", target="loss=100", evaluate_every=1 / 3)
    assert run.result["stopped_by"] == "target"
    reached = run.history[0]
    assert run.result["target_reached_at"] == reached["time"] and reached["version"] == 2
    assert run.result["updates"] < 6
    with pytest.raises(InvalidSetting, match="has no 'f1'"):
        train(tmp_path, "ddg:modules=2", target="f1=1")


def test_time_stops_it(tmp_path: Path) -> None:
    run = train(tmp_path, "ddg:modules=2", max_time=10.0, pass_times="1/1,1/1")
    assert run.result["stopped_by"] == "max-time"
    assert 3 < run.result["updates"] < 8
    assert gp.replay(run.folder.path, task=blocks(), progress=False)["matches"]


def test_evaluation_may_wait_or_be_left_out(tmp_path: Path) -> None:
    live = train(tmp_path, "ddg:modules=2")
    deferred = train(tmp_path, "ddg:modules=2", evaluate="deferred")
    off = train(tmp_path, "ddg:modules=2", evaluate="off")
    assert deferred.history == live.history
    assert off.history == [] and off.result["test_accuracy"] is None
    assert off.result["weights_sha256"] == live.result["weights_sha256"]
    fresh = train(tmp_path, "ddg:modules=2", recalibrate_bn=3)
    assert fresh.result["state_sha256"] == live.result["state_sha256"]
    assert fresh.history != live.history


def test_a_changed_trace_does_not_match(tmp_path: Path) -> None:
    run = train(tmp_path, "ddg:modules=2", epochs=1)
    path = run.folder.trace / "000.jsonl"
    lines = path.read_text().split("\n")
    wanted = next(i for i, line in enumerate(lines) if '"loss":1' in line)
    lines[wanted] = lines[wanted].replace('"loss":1', '"loss":3')
    path.write_text("\n".join(lines))
    replayed = gp.replay(run.folder.path, task=blocks(), progress=False)
    assert not replayed["matches"]
    assert "event row" in replayed["difference"] and '"loss":3' in replayed["difference"]


# ------------------------------------------------------------------ going wrong


class Spoilt(nn.Module):
    """Gives numbers that are not, or raises, from the n-th training pass on."""

    def __init__(self, at: int, raises: bool) -> None:
        super().__init__()
        self.at, self.raises = at, raises
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            if self.passes > self.at:
                if self.raises:
                    raise ValueError("no more")
                return x * float("nan")
        return x


def spoilt(at: int, raises: bool = False) -> gp.Task:
    task = blocks()

    def model() -> nn.Module:
        made = task.model()
        assert isinstance(made, nn.Sequential)
        return nn.Sequential(made[0], nn.Sequential(Spoilt(at, raises), made[1]), made[2])

    return gp.Task(
        model=model, train=task.train, test=task.test, optimizer="sgd:lr=0.05", batch_size=8,
        epochs=3, name="spoilt",
    )  # fmt: skip


def test_numbers_that_are_not_finite_end_it(tmp_path: Path) -> None:
    said = (
        r"diverged after 6 updates: the loss or a gradient of mini-batch 8 in module 3 was not "
        r"finite; the loss was .*; try a lower learning rate, --clip norm:max=1 or fewer modules; "
        r"the run is in"
    )
    with pytest.raises(Diverged, match=said) as caught:
        train(tmp_path, "ddg:modules=3", task=spoilt(8))
    result = caught.value.result
    json.dumps(result)
    assert result["stopped_by"] == "diverged" and result["test_accuracy"] is not None
    assert result["diverged"]["module"] == 3 and result["diverged"]["mini_batch"] == 8  # type: ignore[index]
    trace = read_trace(Path(str(result["run"])) / "trace")
    assert trace.end is not None and trace.end.result == result
    assert isinstance(trace.events[-1].decode(), PassFailed)
    replayed = gp.replay(str(result["run"]), task=spoilt(8), progress=False)
    assert replayed["matches"]
    replayed = gp.replay(str(result["run"]), task=spoilt(9), progress=False)
    assert "mini_batch=8" in replayed["difference"]
    assert gp.export(str(result["run"])).is_file()


def test_an_exception_ends_it_with_its_traceback(tmp_path: Path) -> None:
    said = r"mini-batch 10 in module 2 failed after \d updates: ValueError: no more; the run is in"
    with pytest.raises(RunFailed, match=said) as caught:
        train(tmp_path, "fdg:modules=3", task=spoilt(10, raises=True))
    result = caught.value.result
    assert result["stopped_by"] == "failed" and result["weights_sha256"] is None
    [failure] = read_trace(Path(str(result["run"])) / "trace").failures
    assert (failure.learner, failure.mini_batch) == (2, 10) and "no more" in failure.traceback
    # Whoever repairs the task goes on from the last epoch.
    run = gp.resume(str(result["run"]), task=spoilt(1000, raises=True), progress=False)
    whole = train(tmp_path, "fdg:modules=3", task=spoilt(1000))
    assert run.result["weights_sha256"] == whole.result["weights_sha256"]


def test_losses_beyond_all_measure_end_it(tmp_path: Path) -> None:
    task = load_task("digits")
    settings = {"optimizer": "sgd:lr=0.6,momentum=0.9", "epochs": 0.5}
    with pytest.raises(Diverged, match=r"the loss is .* against .* at the start") as caught:
        train(tmp_path, "ddg:modules=3", task=task, **settings)
    result = caught.value.result
    assert "try a lower learning rate, less momentum, --clip norm:max=1 or fewer modules" in str(
        caught.value
    )
    assert result["stopped_by"] == "diverged" and result["weights_sha256"] is not None
    assert gp.replay(str(result["run"]), task=task, progress=False)["matches"]
    run = train(tmp_path, "ddg:modules=3", task=task, guard="off", **settings)
    assert run.result["stopped_by"] == "epochs"


# ---------------------------------------------------------------------- planning


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"decouple": "ddg:modules=99"}, r"modules: expected at most \d+, the blocks of the"),
        ({"decouple": "ddg:modules=0"}, "expected modules >= 1"),
        ({"decouple": "gdd"}, "did you mean"),
        ({"decouple": "ddg", "learners": 2}, "expected --decouple or --learners, got both"),
        ({"decouple": "ddg", "protocol": "async"}, "expected --decouple or --protocol"),
        ({"decouple": "ddg", "delays": {0: "constant:value=1"}}, "--decouple or --delays"),
        ({"decouple": "ddg", "max_restarts": 1}, "--decouple or --max-restarts"),
        ({"decouple": "ddg", "cuts": ["1", "2"]}, "2 modules begin at 1 cuts"),
        ({"decouple": "ddg", "cuts": ["7"]}, "cut '7'"),
        ({"decouple": "ddg", "cuts": ["1"], "balance": "time"}, "expected cuts or balance"),
        ({"decouple": "ddg", "balance": "luck"}, "balance: expected time, parameters"),
        ({"decouple": "ddg", "tail": "cut"}, "tail: expected it to be 'drain' or 'drop'"),
        ({"decouple": "ddg", "pass_times": "1/2"}, "expected forward/backward of 2 module"),
        ({"decouple": "ddg", "pass_times": "1,2"}, "pass times: expected measured, or"),
        ({"decouple": "ddg", "engine": "local", "pass_times": "measured"}, "engine virtual"),
        ({"decouple": "fr", "compensation": "dc-asgd"}, "compensation needs the weights"),
        ({"decouple": "fr", "modulation": "distance:max=2"}, None),
        ({"decouple": "ddg", "memory": 1e-9}, "memory: this run needs about"),
        ({"tail": "drop"}, "tail is for decoupled runs"),
        ({"cuts": ["1"]}, "cuts is for decoupled runs"),
        ({"decouple": "ddg", "epochs": None, "optimizer": "rprop:lr=0.1", "modulation": "inverse"},
         "does not follow its learning rate"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(
    tmp_path: Path, settings: dict[str, Any], said: str | None
) -> None:
    values = {"engine": "virtual", "progress": False, **settings}
    with pytest.raises(InvalidSetting, match=said):
        gp.train(blocks(), out=tmp_path / "run", **values)
    assert not (tmp_path / "run").exists()


def test_cuts_are_chosen_named_and_kept(tmp_path: Path) -> None:
    chosen = train(tmp_path, "ddg:modules=2", epochs=1, updates=3)
    named = train(tmp_path, "ddg:modules=2", epochs=1, cuts=["2"])
    assert named.result["begins"] == ["2"] != chosen.result["begins"]
    recorded = json.loads((chosen.folder.path / "config.json").read_text())["settings"]
    assert recorded["begins"] == chosen.result["begins"] and "/" in recorded["pass_times"]
    again = gp.resume(chosen.folder.path, task=blocks(), updates=99, progress=False)
    assert again.result["begins"] == chosen.result["begins"]
    by_object = train(tmp_path, gp.Decoupled("ddg", modules=2), epochs=1, cuts=["2"])  # type: ignore[arg-type]
    assert told(by_object) == told(named)


def test_initial_weights_and_a_schedule(tmp_path: Path) -> None:
    state = {name: torch.full_like(t, 0.1) for name, t in blocks().model().state_dict().items()}
    schedule = gp.schedule(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    settings: dict[str, Any] = {"initial": state, "schedule": schedule}
    whole = train(tmp_path, "ddg:modules=2", **settings)
    rates = [row.learning_rate for row in read_trace(whole.folder.trace).updates]
    assert rates == [0.05] * 6 + [0.025] * 6 + [0.0125] * 6
    part = train(tmp_path, "ddg:modules=2", updates=7, **settings)
    part = gp.resume(part.folder.path, task=blocks(), schedule=schedule, updates=99, progress=False)
    assert told(part) == told(whole)


def test_a_comparison_cuts_alike(tmp_path: Path) -> None:
    comparison = gp.compare(
        blocks(),
        [{"decouple": "bp"}, {"decouple": "ddg"}, {"protocol": "hardsync", "learners": 2}],
        out=tmp_path / "compared",
        engine="virtual",
        epochs=1,
        progress=False,
        target="accuracy=0.3",
    )
    bp, ddg, other = comparison.results
    assert bp["begins"] == ddg["begins"] and bp["decouple"] == "bp:modules=2"
    assert other["protocol"] == "hardsync" and other["stopped_by"] == "epochs"
    names = [folder.name for folder in comparison.folders]
    assert names == ["00-bp-modules=2", "01-ddg-modules=2", "02-hardsync-learners=2"]


def test_tensorboard_is_written_along(tmp_path: Path) -> None:
    run = train(tmp_path, "ddg:modules=2", epochs=1, updates=2, tensorboard=True)
    gp.resume(run.folder.path, task=blocks(), updates=99, progress=False)
    assert len(list((run.folder.path / "tensorboard").glob("events.*"))) == 2


def test_events_are_fed_again_in_the_order_of_the_trace(tmp_path: Path) -> None:
    """A prefix of whole groups is a network version to the program, too."""
    run = train(tmp_path, "fdg:modules=3", updates=8)
    program = NetworkProgram(Schedule(METHODS.parse("fdg:modules=3").delays, 3 * PER_EPOCH))
    for row in follow_rows(run.folder.trace):
        if isinstance(row, EventRow):
            program.handle(row.decode())
        elif isinstance(row, UpdateRow):
            assert {module.version for module in program.modules} == {row.version}
    assert {module.finished for module in program.modules} == {"updates"}
    assert {type(row.decode()) for row in read_trace(run.folder.trace).events} > {
        BackwardFinished,
        ModuleUpdated,
    }
