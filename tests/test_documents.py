"""What the documents show is run: the five-line example, the example scripts, named commands."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from gruppetto.cli import cli
from gruppetto.cli.options import OPTIONS

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]


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


def test_the_example_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "own_task.py"), run_name="__main__")
    assert "accuracy 0." in capsys.readouterr().out


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_documents_name_only_commands_and_options_there_are(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for command in re.findall(r"^(?:\$ )?gruppetto ([a-z]+)", text, re.MULTILINE):
        assert command in cli.commands, command
    flags = {o.flag for o in OPTIONS} | {"--json", "--out", "--resume", "--quiet", "--run", "--png",
                                         "--help", "--version", "--seeds", "--repeats"}  # fmt: skip
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text):
        assert flag in flags | {"--strict"}, flag
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target
    for target in re.findall(r"^(?:    )?make ([a-z]+)", text, re.MULTILINE):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(encoding="utf-8"), target
