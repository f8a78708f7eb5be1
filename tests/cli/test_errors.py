"""A newcomer's mistakes: one sentence that says what was expected and what came, exit 2, and
nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from gruppetto.cli import _run

FILES = {
    "syntax.py": "task = (\n",
    "no_task.py": "x = 1\n",
    "other_name.py": "import gruppetto as gp\nfrom torch import nn\n"
    "mine = gp.Task(model=lambda: nn.Linear(1, 1), train=[(0, 0)])\n",
    "raises.py": "import nothing_like_this\n",
    "iterable.py": "import gruppetto as gp\nfrom torch import nn\n"
    "from torch.utils.data import IterableDataset\n"
    "class Stream(IterableDataset):\n    def __iter__(self):\n        yield 1\n"
    "task = gp.Task(model=lambda: nn.Linear(1, 1), train=Stream())\n",
    "lbfgs.py": "import torch, gruppetto as gp\nfrom torch import nn\n"
    "task = gp.Task(model=lambda: nn.Linear(1, 1), train=[(torch.ones(1), 0)], batch_size=1,\n"
    "               epochs=1, optimizer=lambda m: torch.optim.LBFGS(m.parameters()))\n",
    "needs_all.py": "import torch, gruppetto as gp\nfrom torch import nn\n"
    "task = gp.Task(model=lambda: nn.Linear(1, 1), train=[(torch.ones(1), 0)])\n",
    "instance.py": "import torch, gruppetto as gp\nfrom torch import nn\n"
    "task = gp.Task(model=nn.Linear(1, 1), train=[(torch.ones(1), 0)])\n",
    "returns.py": "def task():\n    return 3\n",
    "a_file": "",
}
TRAIN = ("train", "digits")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


CASES = [
    ((*TRAIN, "--protocol", "k-asink"), "unknown protocol 'k-asink'; valid: k-sync"),
    ((*TRAIN, "--protocol", "k-asink"), "(did you mean 'k-async'?)"),
    ((*TRAIN, "--protocol", "k-sync"), "'k-sync' needs k=; expected k-sync:k="),
    ((*TRAIN, "--protocol", "k-sync:n=3"), "has no key 'n'; valid: k"),
    ((*TRAIN, "--protocol", "k-sync:k=two"), "expected a whole number, got 'two'"),
    ((*TRAIN, "--protocol", "k-sync:k=9"), "waits for 9 distinct learners of 4; expected k <= 4"),
    ((*TRAIN, "--protocol", "k-async:k=5"), "waits for 5 distinct learners of 4"),
    ((*TRAIN, "--protocol", "k-sync:k=0"), "expected k >= 1, got k=0"),
    ((*TRAIN, "--protocol", "backup:b=4"), "leaves no learner to wait for"),
    ((*TRAIN, "--protocol", "softsync:n=5"), "expected n <= learners = 4"),
    ((*TRAIN, "--protocol", "adasync:over=k-sync"), "'adasync' needs k0=; expected adasync:over="),
    ((*TRAIN, "--protocol", "adasync:over=k-sync,k0=4,interval=1"), "expected k0 < learners = 4"),
    (("simulate", "--protocol", "adasync:over=k-sync,k0=1,interval=1"), "computes no gradients"),
    ((*TRAIN, "--warmup", "softsync:epochs=1"), "unknown warmup 'softsync'; valid: hardsync"),
    ((*TRAIN, "--warmup", "hardsync"), "'hardsync' needs epochs=; expected hardsync:epochs="),
    ((*TRAIN, "--warmup", "hardsync:epochs=0"), "expected epochs > 0 and finite, got epochs=0"),
    ((*TRAIN, "--warmup", "hardsync:epochs=inf"), "finite, got epochs=inf"),
    ((*TRAIN, "--warmup", "hardsync:epochs=1", "--protocol", "k-async:k=5"), "5 distinct learners"),
    ((*TRAIN, "--scale-lr", "sqrt-batch"), "'sqrt-batch' needs batch="),
    ((*TRAIN, "--scale-lr", "sqrt-batch:batch=0"), "expected batch >= 1, got batch=0"),
    ((*TRAIN, "--scale-lr", "sqrt:batch=1"), "unknown learning-rate scaling 'sqrt'; valid: sqrt-b"),
    ((*TRAIN, "--scale-batch", "product:total=130"), "expected a multiple of 4, nearest 128 and"),
    ((*TRAIN, "--scale-batch", "product:total=3"), "expected a multiple of 4, nearest 4"),
    ((*TRAIN, "--scale-batch", "product:total=0"), "expected total >= 1, got total=0"),
    ((*TRAIN, "--scale-batch", "product:total=64", "--batch-size", "16"), "one of the two, got bo"),
    ((*TRAIN, "--scale-batch", "product:total=64", "--learners", "0"), "expected a whole number"),
    ((*TRAIN, "--scale-batch", "product:total=8000"), "expected 1 to 1437 (the training samples"),
    ((*TRAIN, "--batch-size", "1438"), "expected 1 to 1437 (the training samples of digits)"),
    ((*TRAIN, "--batch-size", "0"), "batch size: expected it to be greater than or equal to 1"),
    ((*TRAIN, "--learners", "0"), "learners: expected it to be greater than or equal to 1, got 0"),
    ((*TRAIN, "--learners", "-1"), "got -1"),
    ((*TRAIN, "--learners", "many"), "'many' is not a valid integer"),
    ((*TRAIN, "--delay", "exponential:mean=-1"), "expected mean >= 0 and finite, got mean=-1.0"),
    ((*TRAIN, "--delay", "exponential:mean=nan"), "got mean=nan"),
    ((*TRAIN, "--delay", "exponential"), "'exponential' needs mean="),
    ((*TRAIN, "--delay", "gauss:mean=1"), "unknown delay 'gauss'; valid: constant"),
    ((*TRAIN, "--delay", "4=constant:value=1"), "learner 4; expected a learner from 0 to 3"),
    ((*TRAIN, "--delay", "constant:value=1", "--delay", "constant:value=2"), "one law for all"),
    ((*TRAIN, "--delay", "1=constant:value=1", "--delay", "1=constant:value=2"), "two laws"),
    ((*TRAIN, "--epochs", "0"), "epochs: expected it to be greater than 0, got 0"),
    ((*TRAIN, "--epochs", "nan"), "expected it to be a finite number"),
    ((*TRAIN, "--optimizer", "sdg:lr=1"), "unknown optimizer 'sdg'"),
    ((*TRAIN, "--optimizer", "sgd:rate=1"), "has no key 'rate'; valid: lr, momentum"),
    ((*TRAIN, "--optimizer", "sgd:lr=-1"), "Invalid learning rate: -1.0"),
    ((*TRAIN, "--optimizer", "sgd:lr=fast"), "expected a number"),
    ((*TRAIN, "--optimizer", "lbfgs"), "LBFGS is refused"),
    ((*TRAIN, "--optimizer", "rprop", "--protocol", "async"), "modulation cannot reach it"),
    ((*TRAIN, "--modulation", "inverse-meen"), "(did you mean 'inverse-mean'?)"),
    ((*TRAIN, "--clip", "norm:max=0"), "expected max > 0"),
    ((*TRAIN, "--target", "accuracy"), "expected metric=number like accuracy=0.95"),
    ((*TRAIN, "--target", "f1=0.5"), "has no 'f1'; it has loss, accuracy"),
    ((*TRAIN, "--target", "accuracy=1", "--evaluate", "off"), "target needs evaluation"),
    ((*TRAIN, "--device", "tpu"), "device 'tpu' cannot be used"),
    ((*TRAIN, "--device", "meta"), "device 'meta' cannot be used"),
    ((*TRAIN, "--decouple", "ddg:modules=2", "--device", "meta"), "device 'meta' cannot be used"),
    ((*TRAIN, "--memory", "1e-9"), "this run needs about"),
    ((*TRAIN, "--initial", "none.pt"), "none.pt does not exist"),
    ((*TRAIN, "--initial", "a_file"), "a_file cannot be read"),
    ((*TRAIN, "--out", "a_file"), "expected a folder to write to, got a file"),
    ((*TRAIN, "--out", "a_file/run"), "a_file is a file"),
    ((*TRAIN, "--out", "full"), "full is not empty"),
    ((*TRAIN, "--resume"), "expected --out"),
    ((*TRAIN, "--bogus"), "No such option '--bogus'"),
    (("train",), "Missing argument 'TASK'"),
    (("train", "digit"), "valid: digits, least-squares, mnist, cifar10 (did you mean"),
    (("train", "digits:layers=3"), "has no option 'layers'; valid: hidden"),
    (("train", "digits:hidden=0"), "expected hidden >= 1, got 0"),
    (("train", "least-squares:n=0"), "expected n >= 1"),
    (("train", "nothing.py"), "task file nothing.py does not exist"),
    (("train", "syntax.py"), "syntax.py has a syntax error in line 1: '(' was never closed"),
    (("train", "no_task.py"), "no_task.py defines no 'task'; it has no Task"),
    (("train", "other_name.py"), "write other_name.py:mine"),
    (("train", "raises.py"), "line 1 failed to load: ModuleNotFoundError"),
    (("train", "returns.py"), "returned int; expected a Task"),
    (("train", "iterable.py"), "the IterableDataset Stream"),
    (("train", "lbfgs.py"), "LBFGS is refused"),
    (("train", "instance.py"), "write model=lambda: MyModel()"),
    (("train", "needs_all.py"), "an optimizer is required for this task, like sgd:lr=0.1"),
    (("train", "needs_all.py", "--optimizer", "sgd:lr=1"), "a batch size is required"),
    (("train", "needs_all.py", "--optimizer", "sgd:lr=1", "--batch-size", "1"), "needs an end"),
    (("replay", "nowhere"), "nowhere does not exist; expected the folder of a run"),
    (("replay", "full"), "full holds no run: expected config.json in it"),
    (("report", "full"), "full holds no run"),
    (("export", "full"), "full holds no run"),
    (("resume", "full"), "full holds no run"),
    (("compare", "digits", "--run", "protokol=async"), "unknown key 'protokol'"),
    (("compare", "digits", "--run", "async"), "expected key=value, got 'async'"),
    (("compare", "digits", "--protocol", "async", "--protocol", "k-sync:k=7"), "7 distinct"),
    (("compare", "digits", "--seed", "0", "--seed", "1", "--run", "seed=2"), "got both"),
    (("compare", "digits", "--target", "f1=1"), "has no 'f1'"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "sentence"), CASES, ids=[" ".join(w) for w, _ in CASES])
def test_one_sentence_exit_2_nothing_written(
    words: tuple[str, ...], sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    assert _run(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gruppetto: ")
    assert captured.err.count("\n") == 1, captured.err
    assert sentence in captured.err
    after = [p for p in sorted(folder.rglob("*")) if "__pycache__" not in p.parts]
    assert after == before


def test_a_folder_that_holds_a_run_is_left_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TRAIN, "--updates", "2", "--out", "run"]
    assert _run(words) == 0
    trace = (folder / "run" / "trace" / "000.jsonl").read_bytes()
    capsys.readouterr()
    assert _run(words) == 2
    assert "run already holds a run" in capsys.readouterr().err
    assert (folder / "run" / "trace" / "000.jsonl").read_bytes() == trace


def test_a_foreign_or_damaged_trace_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run([*TRAIN, "--updates", "2", "--out", "run"]) == 0
    path = folder / "run" / "trace" / "000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"not json\n", *lines[3:]]))
    capsys.readouterr()
    assert _run(["replay", "run"]) == 2
    assert "000.jsonl, line 4" in capsys.readouterr().err
    (folder / "run" / "config.json").write_text("[]")
    assert _run(["report", "run"]) == 2
    assert "expected a run's settings" in capsys.readouterr().err


def test_json_errors_of_usage_print_nothing_on_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _run([*TRAIN, "--protocol", "x", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_wrong_arguments_in_python_are_as_clear() -> None:
    import gruppetto as gp

    with pytest.raises(gp.InvalidSetting, match="unknown setting 'learner_count'"):
        gp.train("digits", learner_count=3, engine="virtual")
    with pytest.raises(gp.InvalidSetting, match="expected a protocol or its name, got int"):
        gp.train("digits", protocol=3, engine="virtual")  # type: ignore[arg-type]
    with pytest.raises(gp.InvalidSetting, match=r"gp\.optimizer"):
        gp.train("digits", optimizer=3, engine="virtual")  # type: ignore[arg-type]
    with pytest.raises(gp.TaskError, match="expected a Task or its name, got int"):
        gp.train(3, engine="virtual")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="did you mean"):
        gp.train("digits", protocol="k-asink", engine="virtual")
