"""What the documents show is run or looked up: examples, commands, options, models, files."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import gruppetto as gp
from gruppetto.cli import cli
from gruppetto.cli.options import OPTIONS
from gruppetto.training.models import MODELS
from gruppetto.training.tasks import TASKS

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
#: Flags of other programs.
OTHER_FLAGS = {"--again", "--tables", "--strict", "--seeds", "--repeats"}


def test_the_five_lines_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.search(r"## Five lines\n\n```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(640, 4, generator=generator)
    labels = (features.sum(1) > 0).long()
    names = {
        "torch": torch,
        "make_model": lambda: nn.Linear(4, 2),
        "train_set": TensorDataset(features[:512], labels[:512]),
        "test_set": TensorDataset(features[512:], labels[512:]),
    }
    exec(code[1], names)
    run = names["run"]
    assert isinstance(run.model, nn.Module)
    accuracy = (run.model(features[512:]).argmax(1) == labels[512:]).float().mean()
    assert accuracy > 0.9
    assert [row["epoch"] for row in run.history] == pytest.approx([1, 2, 3, 4, 5], abs=0.3)
    assert run.history[-1]["test_accuracy"] == pytest.approx(float(accuracy))
    assert sum(run.staleness.values()) == run.result["mini_batches_applied"] == 5 * 16


def _flags(command: click.Command) -> set[str]:
    options = {flag for parameter in command.params for flag in parameter.opts}
    return options | {"--help", "--version"}


#: Of any command.
FLAGS = set().union(*(_flags(command) for command in cli.commands.values()))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_documents_name_only_commands_and_options_there_are(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for command in re.findall(r"(?:^|`)(?:\$ )?gruppetto ([a-z]+)", text, re.MULTILINE):
        assert command in cli.commands, command
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text):
        assert flag in FLAGS | OTHER_FLAGS, flag
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target
    for words in re.findall(r"^gruppetto ([a-z]+ [^#\n]*)", text, re.MULTILINE):
        name, *others = words.split()
        for flag in (word for word in others if word.startswith("--")):
            assert flag in _flags(cli.commands[name]), f"{flag} of {name}"
    for target in re.findall(r"^(?:    )?make ([a-z]+)", text, re.MULTILINE):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(encoding="utf-8"), target


def test_the_documents_name_every_new_option() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    named = ("--engine", "--model", "--data", "--evaluate", "--evaluate-every", "--max-restarts",
             "--warmup", "--scale-lr", "--scale-batch", "--tensorboard", "--threads")  # fmt: skip
    assert {o.flag for o in OPTIONS} | {"--tensorboard"} >= set(named)
    assert all(f"| `{flag}`" in text or f", `{flag}`" in text for flag in named)
    listings = {name for name, command in cli.commands.items() if "List" in (command.help or "")}
    assert all(f"`{name}`" in text or f"`gruppetto {name}`" in text for name in listings)


def test_the_documents_name_every_key_of_a_result(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    run = gp.train(
        "least-squares:n=64,d=3", optimizer="sgd:lr=0.1", updates=2, out=tmp_path / "run",
        progress=False,
    )  # fmt: skip
    named = set(re.findall(r"`(\w+)`", text))
    named |= {f"mini_batches{ending}" for ending in named if ending.startswith("_")}
    assert run.result.keys() <= named, run.result.keys() - named


def test_the_table_of_models() -> None:
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`(.*?) \| `(sgd:.*?)` \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    found = {name: (spec, int(batch), float(epochs)) for name, _, spec, batch, epochs in rows}
    assert found == {n: (m.optimizer, m.batch_size, m.epochs) for n, m in MODELS.items()}
    defaults = {task: name for name, words, *_ in rows for task in TASKS if f"{task}'s" in words}
    for task, model in defaults.items():
        assert inspect.signature(TASKS[task]).parameters["model"].default == model
    assert defaults.keys() == {"mnist", "cifar10"}


def test_the_dataset_that_makes_whole_batches(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"__name__": "a_notebook"}
    exec(code[1], names)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(320, 4, generator=generator)
    labels = (features.sum(1) > 0).long()
    task = gp.Task(
        model=lambda: nn.Linear(4, 2),
        train=names["Noisy"](features[:256], labels[:256]),
        test=names["Noisy"](features[256:], labels[256:]),
    )
    run = gp.train(
        task, learners=2, batch_size=16, epochs=4, optimizer="sgd:lr=0.3", out=tmp_path / "run",
        progress=False,
    )  # fmt: skip
    assert run.result["test_accuracy"] > 0.85
    assert gp.replay(run.folder.path, task=task)["matches"]


def test_the_trace_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "trace.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    gp.train("digits", protocol="async", updates=5, out="runs/digits-async-001", progress=False)
    exec(code[1], {})
