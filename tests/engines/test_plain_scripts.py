"""The local engine where users are: a script without a main guard, a notebook, lambdas.

Nothing here may be left behind: every process that a script or a kernel starts carries a mark in
its environment, and none may be found afterwards.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gruppetto as gp

ROOT = Path(__file__).parents[2]
MARK = "GRUPPETTO_TEST_MARK"

HELPER = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

generator = torch.Generator().manual_seed(0)
features = torch.randn(640, 4, generator=generator)
labels = (features.sum(1) > 0).long()
train_set = TensorDataset(features[:512], labels[:512])
test_set = TensorDataset(features[512:], labels[512:])


def make_model():
    return nn.Linear(4, 2)
"""


def processes_with(mark: str) -> list[str]:
    """Command lines of all processes that were started with a mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(f"{process.pid} {process.name()} {process.cmdline()[:3]}")
    return found


def expect_none_left(mark: str) -> None:
    until = time.monotonic() + 5
    while (left := processes_with(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


def five_lines() -> str:
    """The example of the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.search(r"## Five lines\n\n```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    return code[1]


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    scripts, elsewhere = tmp_path / "scripts", tmp_path / "elsewhere"
    scripts.mkdir()
    elsewhere.mkdir()
    (scripts / "beside.py").write_text(HELPER, encoding="utf-8")
    script = scripts / "script.py"
    script.write_text(
        "import torch\nfrom beside import make_model, test_set, train_set\n"
        f"{five_lines()}"
        "assert run.result['engine'] == 'local'\n"
        "print(run.history[-1]['test_accuracy'] > 0.9, sum(run.staleness.values()))\n",
        encoding="utf-8",
    )
    assert "__main__" not in script.read_text(encoding="utf-8")
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=elsewhere,
        env={**os.environ, MARK: mark},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True 80\n"
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    assert [p.name for p in elsewhere.iterdir()] == ["runs"]
    expect_none_left(mark)


@contextlib.contextmanager
def notebook(folder: Path, mark: str) -> Iterator[Any]:
    """A kernel of this interpreter, and a function that runs a cell there."""
    pytest.importorskip("ipykernel")
    with warnings.catch_warnings():
        # jupyter_core announces, on import and per call, that its folders will move one day.
        warnings.filterwarnings("ignore", message="Jupyter is migrating", category=Warning)
        manager_module = pytest.importorskip("jupyter_client.manager")
        environment = {**os.environ, MARK: mark, "IPYTHONDIR": str(folder / "ipython")}
        manager = manager_module.KernelManager(
            kernel_name="python3", connection_file=str(folder / "kernel.json")
        )
        manager.start_kernel(cwd=str(folder), env=environment)
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=60)
            yield lambda code: _run_cell(client, code)
        finally:
            client.stop_channels()
            manager.shutdown_kernel()
            manager.cleanup_resources()


def _run_cell(client: Any, code: str) -> str:
    """What a cell prints on standard output; a cell that raises fails the test."""
    printed, errors = [], []
    request = client.execute(code)
    until = time.monotonic() + 90
    while time.monotonic() < until:
        with contextlib.suppress(queue.Empty):
            message = client.get_iopub_msg(timeout=1)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                printed.append(content["text"])
            elif message["msg_type"] == "error":
                errors.append("\n".join(content["traceback"]))
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                assert not errors, errors[0]
                return "".join(printed)
    raise AssertionError("the cell did not end in time")


def test_a_notebook(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    with notebook(tmp_path, mark) as run_cell:
        run_cell(
            "import torch\nfrom torch import nn\nfrom torch.utils.data import Dataset\n"
            "import gruppetto as gp"
        )
        run_cell(
            "class Points(Dataset):\n"
            "    def __init__(self, seed, n):\n"
            "        generator = torch.Generator().manual_seed(seed)\n"
            "        self.x = torch.randn(n, 4, generator=generator)\n"
            "    def __len__(self):\n"
            "        return len(self.x)\n"
            "    def __getitem__(self, i):\n"
            "        return self.x[i] + 0.01 * torch.randn(4), int(self.x[i].sum() > 0)\n"
        )
        run_cell(
            "class Net(nn.Module):\n"
            "    width = 8\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.hidden = nn.Linear(4, self.width)\n"
            "        self.classes = nn.Linear(self.width, 2)\n"
            "    def forward(self, x):\n"
            "        return self.classes(self.hidden(x).relu())\n"
        )
        train = (
            "task = gp.Task(model=Net, train=Points(0, 512), test=Points(1, 128), epochs=4,\n"
            "               optimizer='sgd:lr=0.2,momentum=0.9', batch_size=16)\n"
            "run = gp.train(task, protocol='k-batch-async:k=2', learners=2)\n"
        )
        assert run_cell(train) == ""
        assert run_cell("print(run.result['engine'], type(run.model) is Net)") == "local True\n"
        assert run_cell("print(run.history[-1]['test_accuracy'] > 0.85)") == "True\n"
        # The class as it is now, though the processes of the last run knew another one.
        run_cell("Net.width = 5\n" + train)
        assert run_cell("print(run.model.hidden.weight.shape[0])") == "5\n"
        assert processes_with(mark), "the mark does find them"
    expect_none_left(mark)


def test_lambdas_and_closures(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(320, 4, generator=generator)
    labels = (features.sum(1) > 0).long()
    width, smoothing, seen = 6, 0.05, 64

    class Local(nn.Module):
        """Of a class that no import can find."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.layers(x)
            return scores

    def evaluate(model: nn.Module, test: TensorDataset) -> dict[str, float]:
        x, y = test.tensors
        return {"accuracy": float((model(x[:seen]).argmax(1) == y[:seen]).float().mean())}

    task = gp.Task(
        model=lambda: Local(),
        train=TensorDataset(features[:256], labels[:256]),
        test=TensorDataset(features[256:], labels[256:]),
        loss=lambda outputs, batch: nn.functional.cross_entropy(
            outputs, batch[-1], label_smoothing=smoothing
        ),
        collate_fn=lambda samples: tuple(torch.stack(column) for column in zip(*samples)),  # noqa: B905
        sampler=lambda epoch: [(i + epoch) % 256 for i in range(256)],
        evaluate=evaluate,
    )
    run = gp.train(
        task,
        learners=2,
        protocol="async",
        batch_size=16,
        epochs=6,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5),
        schedule=gp.schedule(
            lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n),
            every="epoch",
        ),
        out=tmp_path / "run",
        progress=False,
    )
    assert isinstance(run.model, Local)
    assert run.result["engine"] == "local"
    assert run.result["test_accuracy"] > 0.85
    assert run.result["mini_batches_applied"] == 6 * 16
    # The objects once more, for there is no name to find them by.
    again = gp.replay(
        run.folder.path,
        task=task,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5),
        schedule=gp.schedule(
            lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n),
            every="epoch",
        ),
    )
    assert again["matches"], again["difference"]
