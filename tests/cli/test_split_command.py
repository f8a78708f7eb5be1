"""``gruppetto split`` shows where a network would be cut, and the options to do so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gruppetto.cli import _run

FILE = """
import torch, gruppetto as gp
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = Block(), Block(), nn.Linear(4, 2)
    def forward(self, x):
        return self.head(self.two(self.one(x)))

data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.arange(20) % 2)
task = gp.Task(model=Net, train=data)
"""


def test_a_table_and_the_options_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["split", "digits:batchnorm=true", "--modules", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["block", "module", "parameters", "forward,", "ms", "backward,",
                                "ms", "gives,", "KiB"]  # fmt: skip
    assert [line.split()[:3] for line in lines[1:5]] == [
        ["0", "1", "4,160"], ["1", "2", "128"], ["2", "2", "0"], ["3", "2", "650"],
    ]  # fmt: skip
    assert lines[6].split()[:3] == ["blocks", "module", "parameters"]
    # 16 x 64 numbers of four bytes cross.
    assert lines[7].split()[:3] == ["0", "1", "4,160"] and lines[7].split()[-1] == "4"
    assert lines[8].split()[:5] == ["1", "to", "3", "2", "778"]
    assert "One mini-batch of 16 takes" in lines[10] and "times as fast free-running" in lines[10]
    assert lines[11:] == ["--decouple ddg:modules=2 --cut 1"]


def test_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["split", "digits", "--modules", "3", "--batch-size", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["task"], found["modules"], found["batch_size"]) == ("digits", 3, 8)
    assert found["begins"] == ["1", "2"]
    assert found["options"] == "--decouple ddg:modules=3 --cut 1 --cut 2"
    assert [row["blocks"] for row in found["per_module"]] == [["0"], ["1"], ["2"]]
    assert [row["name"] for row in found["per_block"]] == ["0", "1", "2"]
    assert [row["output_bytes"] for row in found["per_module"]] == [8 * 64 * 4, 8 * 64 * 4, 0]
    assert sum(row["share"] for row in found["per_module"]) == pytest.approx(1)
    assert all(row["forward"] > 0 and row["backward"] > 0 for row in found["per_block"])
    assert 1 <= found["barrier_speedup"] < found["free_running_speedup"] <= 3
    assert found["imbalance"] == pytest.approx(3 / found["free_running_speedup"])


def test_a_network_of_a_file_and_named_cuts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    words = ["split", str(path), "--modules", "2", "--batch-size", "5", "--json"]
    assert _run([*words, "--cut", "two"]) == 0
    assert json.loads(capsys.readouterr().out)["begins"] == ["two"]
    assert _run([*words, "--cut", "two.second"]) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "gruppetto: cut 'two.second': 2 values are needed across it, as inside a skip connection; "
        "the nearest valid cuts are 'two' before it and 'head' after it\n"
    )
    assert captured.out == "" and [p.name for p in tmp_path.glob("*.py")] == ["mine.py"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["digits"], "Missing option '--modules'"),
        (["digits", "--modules", "4"], "modules: expected at most 3, the blocks of the model"),
        (["digits", "--modules", "0"], "modules: expected at least 1, got 0"),
        (["digits", "--modules", "2", "--balance", "sie"], "balance: expected time, parameters"),
        (["digits", "--modules", "2", "--cut", "7"], "cut '7': the model has no block"),
        (["digits", "--modules", "3", "--cut", "1"], "cuts: expected 2 for 3 modules"),
        (["digits", "--modules", "2", "--batch-size", "0"], "batch size: expected"),
        (["digits", "--modules", "2", "--seed", "-1"], "seed: expected"),
        (["digits", "--modules", "2", "--threads", "0"], "threads: expected"),
        (["digits", "--modules", "2", "--device", "moon"], "device 'moon' cannot be used"),
        (["digits", "--modules", "2", "--model", "cnn"], "no models to choose from"),
        (["cifar10", "--modules", "2"], "cifar10 needs the data"),
        (["least-squares", "--modules", "2"], "modules: expected at most 1"),
        (["nothing", "--modules", "2"], "unknown task 'nothing'"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["split", *words]) == 2
    captured = capsys.readouterr()
    assert why in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_help_says_defaults_and_gives_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["split", "--help"]) == 0
    text = capsys.readouterr().out
    assert "Example: gruppetto split cifar10" in text and "[time]" in text and "[cpu]" in text
