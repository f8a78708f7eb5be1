"""The tasks mnist and cifar10, and tasks with a model or data given apart."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from image_files import LAYOUTS, hub_whole, pictures
from torch import nn
from training_tools import CPU, same_bits, seeded

from gruppetto.errors import InvalidSetting, TaskError
from gruppetto.spec import split_spec
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.models import MODELS
from gruppetto.training.optimizers import build_optimizer
from gruppetto.training.tasks import (
    TASKS,
    load_task,
    resolve_data,
    resolve_model,
    resolve_task,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {n: hub_whole(tmp_path_factory.mktemp(n), n) for n in ("cifar10", "mnist")}


RESNETS = "sgd:lr=0.05,momentum=0.9,weight_decay=1e-4"


def augments(task: Any) -> bool:
    indices = torch.arange(len(task.train))
    plain, _ = task.train.make_batch(indices, None)
    images, _ = task.train.make_batch(indices, seeded(0))
    return not torch.equal(plain, images)


# ------------------------------------------------------------------------- tasks


@pytest.mark.parametrize(("name", "write", "_"), LAYOUTS)
def test_tasks_read_every_layout(tmp_path: Path, name: str, write: Any, _: Any) -> None:
    task = load_task(name, data=str(write(tmp_path, name)))
    assert (len(task.train), len(task.test), task.name) == (40, 12, name)
    images, _ = task.train.make_batch(torch.arange(40), None)
    torch.testing.assert_close(
        images.mean((0, 2, 3)), torch.zeros(images.shape[1]), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(images.var((0, 2, 3), correction=0), torch.ones(images.shape[1]))


def test_the_test_set_is_normalised_by_the_training_set(data: dict[str, Path]) -> None:
    task = load_task("mnist", data=str(data["mnist"]))
    train = torch.from_numpy(pictures("mnist", "train")[0]).double()
    test = torch.from_numpy(pictures("mnist", "test")[0]).double()
    expected = (test - train.mean()) / train.std(correction=0)
    images, labels = task.test.make_batch(torch.arange(12), None)
    torch.testing.assert_close(images, expected.float())
    assert labels.tolist() == pictures("mnist", "test")[1].tolist()


@pytest.mark.parametrize(
    ("reference", "augmented", "optimizer", "shape"),
    [
        ("mnist", False, "sgd:lr=0.02,momentum=0.9", (1, 28, 28)),
        ("mnist:augment=true", True, "sgd:lr=0.02,momentum=0.9", (1, 28, 28)),
        ("mnist:model=resnet8", False, RESNETS, (1, 28, 28)),
        ("mnist:model=softmax", False, "sgd:lr=0.001,momentum=0.9", (1, 28, 28)),
        ("cifar10", True, RESNETS, (3, 32, 32)),
        ("cifar10:model=resnet8", True, RESNETS, (3, 32, 32)),
        ("cifar10:augment=false", False, RESNETS, (3, 32, 32)),
        ("cifar10:model=rudra", False, "sgd:lr=0.001,momentum=0.9", (3, 32, 32)),
        ("cifar10:model=rudra,augment=true", True, "sgd:lr=0.001,momentum=0.9", (3, 32, 32)),
        ("cifar10:model=softmax,grey=true", False, "sgd:lr=0.001,momentum=0.9", (1, 32, 32)),
        ("cifar10:model=cnn,grey=true,augment=true", True, "sgd:lr=0.02,momentum=0.9", (1, 32, 32)),
        ("cifar10:model=resnet8,grey=true", True, RESNETS, (1, 32, 32)),
    ],
)
def test_options(
    data: dict[str, Path], reference: str, augmented: bool, optimizer: str, shape: tuple[int, ...]
) -> None:
    task = load_task(reference, data=str(data[split_spec(reference)[0]]))
    assert task.optimizer == optimizer
    assert augments(task) == augmented
    batch = task.train.make_batch(torch.arange(4), None)
    assert batch[0].shape == (4, *shape)
    torch.manual_seed(0)
    model = task.model()
    assert task.forward(model, batch).shape == (4, 10)
    assert set(task.measure(model, CPU)) == {"loss", "accuracy"}
    factory = task.default_optimizer()
    assert factory is not None
    build_optimizer(factory, model, task.param_groups).step()


def test_mnist_is_never_mirrored(data: dict[str, Path]) -> None:
    task = load_task("mnist:augment=true", data=str(data["mnist"]))
    indices = torch.zeros(200, dtype=torch.int64)
    images, _ = task.train.make_batch(indices, seeded(0))
    assert len({image.numpy().tobytes() for image in images}) == 25  # 5 x 5 offsets


def test_rudra_sees_pixels_less_their_mean(data: dict[str, Path]) -> None:
    task = load_task("cifar10:model=rudra", data=str(data["cifar10"]))
    pixels = torch.from_numpy(pictures("cifar10", "train")[0]).double()
    images, _ = task.train.make_batch(torch.arange(40), None)
    torch.testing.assert_close(images, (pixels - pixels.mean(0)).float())
    assert float(images.abs().max()) > 100
    other = torch.from_numpy(pictures("cifar10", "test")[0]).double()
    images, _ = task.test.make_batch(torch.arange(12), None)
    torch.testing.assert_close(images, (other - pixels.mean(0)).float())
    assert [g["weight_decay"] for g in task.param_groups(task.model())] == [0.004, 1.0, 0.0]  # type: ignore[misc]


@pytest.mark.parametrize("reference", ["mnist", "cifar10:model=rudra", "cifar10:model=resnet8"])
def test_tasks_travel_by_cloudpickle_and_give_the_same_gradients(
    data: dict[str, Path], reference: str
) -> None:
    task = load_task(reference, data=str(data[split_spec(reference)[0]]))
    again = cloudpickle.loads(cloudpickle.dumps(task))
    losses = []
    for each in (task, again):
        torch.manual_seed(0)
        model = each.model()
        batch, _ = MiniBatches(each, 8, 3).fetch(7, CPU)
        losses.append(each.compute_loss(each.forward(model, batch), batch).detach())
    assert same_bits(*losses)


def test_data_have_the_same_bits_whatever_the_threads(data: dict[str, Path]) -> None:
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        task = load_task("cifar10:model=resnet8", data=str(data["cifar10"]))
        squares = load_task("least-squares:n=3000,d=30")
        assert torch.get_num_threads() == threads  # given back
        found.append(
            [task.train.make_batch(torch.arange(40), seeded(0))[0], *squares.train.tensors]
        )
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


# --------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("cifar10", r"cifar10 needs the data: --data DIR with train\.parquet and test\.parquet"),
        ("cifar10:model=rudra", "or cifar-10-batches-py/$"),
        ("mnist", r"mnist needs the data: --data DIR with .*, or MNIST/raw/$"),
        (
            "cifar10:model=resnet21",
            r"unknown model 'resnet21'; valid: softmax, .*did you mean 'res",
        ),
        ("mnist:model=lenet", "mnist: unknown model 'lenet'; valid: softmax, cnn, rudra, resnet8"),
        (
            "mnist:model=rudra",
            "the model rudra takes colour pictures .* got grey ones of 28x28; ch",
        ),
        ("cifar10:model=rudra,grey=true", "takes colour pictures .* got grey ones of 32x32"),
        ("cifar10:colour=true", "task cifar10 has no option 'colour'; valid: data, model, augment"),
        ("mnist:grey=true", "task mnist has no option 'grey'"),
        ("cifar10:augment=maybe", "task cifar10:augment: expected true or false, got 'maybe'"),
    ],
)
def test_settings_refused(reference: str, sentence: str) -> None:
    with pytest.raises(InvalidSetting, match=sentence):
        load_task(reference)


def test_threads_are_given_back_after_a_refusal() -> None:
    torch.set_num_threads(2)
    with pytest.raises(InvalidSetting):
        load_task("cifar10")
    assert torch.get_num_threads() == 2


def test_a_folder_without_the_test_set(data: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes((data["mnist"] / "train.parquet").read_bytes())
    with pytest.raises(TaskError, match=r"holds no test pictures; looked for test\.parquet or tes"):
        load_task("mnist", data=str(tmp_path))


# ------------------------------------------------------- model= and data= of load_task


def test_the_option_and_the_argument_are_the_same(data: dict[str, Path]) -> None:
    folder = data["cifar10"]
    left = load_task(f"cifar10:data={folder},model=rudra")
    right = load_task("cifar10", data=str(folder), model="rudra")
    assert left.optimizer == right.optimizer
    assert same_bits(left.train[3][0], right.train[3][0])


@pytest.mark.parametrize(
    ("reference", "given", "sentence"),
    [
        ("digits", {"data": "x"}, "task digits takes no data, got 'x'; leave it out"),
        ("digits", {"model": "cnn"}, "task digits has no models to choose from by name, got 'cnn'"),
        ("least-squares", {"model": "cnn"}, "give file.py:name, a function or class that builds"),
        ("cifar10", {"model": "vgg"}, "cifar10: unknown model 'vgg'; valid: softmax"),
        ("mnist:data=a", {"data": "b"}, "mnist: data is given twice, as 'a' and as 'b'"),
        (
            "mnist:model=cnn",
            {"model": "softmax"},
            "model is given twice, as 'cnn' and as 'softmax'",
        ),
    ],
)
def test_arguments_refused(reference: str, given: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidSetting, match=sentence):
        load_task(reference, **given)


NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.LazyLinear(10)
    def forward(self, x):
        return self.out(x.flatten(1))

class Deep(Net):
    def __init__(self, depth):
        super().__init__()

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

def small():
    return nn.Linear(64, 10)

built = small()
number = 3
"""


@pytest.fixture
def nets(tmp_path: Path) -> str:
    path = tmp_path / "nets.py"
    path.write_text(NETS)
    return str(path)


def test_a_model_from_a_file_replaces_any_tasks(nets: str, data: dict[str, Path]) -> None:
    task = load_task("digits:standardise=false", model=f"{nets}:small")
    assert isinstance(task.model(), nn.Linear)
    assert same_bits(task.train[0][0], load_task("digits:standardise=false").train[0][0])
    mnist = load_task("mnist", model=nets, data=str(data["mnist"]))
    assert isinstance(mnist.model(), nn.Sequential)
    plain = load_task("mnist", data=str(data["mnist"]))
    assert same_bits(mnist.train[5][0], plain.train[5][0])  # the default preprocessing
    assert mnist.optimizer == plain.optimizer
    assert set(mnist.measure(mnist.model(), CPU)) == {"loss", "accuracy"}
    assert type(load_task("digits", model=f"{nets}:Net").model()).__name__ == "Net"


def test_a_users_task_takes_a_model_and_options_too(nets: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nimport gruppetto as gp\n"
        "from torch.utils.data import TensorDataset\n"
        "rows = TensorDataset(torch.randn(8, 64), torch.arange(8))\n"
        "task = gp.Task(model=lambda: torch.nn.Linear(64, 8), train=rows)\n"
        "def make(data: str, model: str = 'a'):\n"
        "    return gp.Task(model=lambda: 0, train=rows, name=f'{data} {model}')\n"
    )
    mine = str(tmp_path / "mine.py")
    assert load_task(mine, model=f"{nets}:small").model().out_features == 10  # type: ignore[union-attr]
    assert load_task(f"{mine}:make", data="d", model="b").name == "d b"
    with pytest.raises(InvalidSetting, match=r"mine\.py:task has no models to choose from by name"):
        load_task(mine, model="cnn")
    with pytest.raises(InvalidSetting, match=r"mine\.py:task takes no data"):
        load_task(mine, data="d")


@pytest.mark.parametrize(
    ("ending", "error", "sentence"),
    [
        (":nothing", TaskError, r"nets\.py defines no 'nothing'; write .*nets\.py:Net"),
        (":built", TaskError, "built: expected a function or class that builds the model, got Lin"),
        (":number", TaskError, "number: expected a function or class that builds the model, got i"),
        (
            ":Deep",
            TaskError,
            "Deep: expected to build the model from no arguments, but it needs de",
        ),
        (":small:depth=3", InvalidSetting, "a model takes no options, got depth=3"),
    ],
)
def test_models_from_files_refused(
    nets: str, ending: str, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        load_task("digits", model=nets + ending)


def test_model_files_that_cannot_be_loaded(tmp_path: Path, data: dict[str, Path]) -> None:
    with pytest.raises(TaskError, match=r"model file no\.py does not exist"):
        load_task("digits", model="no.py:net")
    (tmp_path / "bad.py").write_text("def x(:\n")
    with pytest.raises(TaskError, match=r"model file .*bad\.py has a syntax error in line 1"):
        load_task("digits", model=str(tmp_path / "bad.py"))
    with pytest.raises(InvalidSetting, match="the model is given twice, in 'mnist:model=cnn' and"):
        load_task("mnist:model=cnn", model=str(tmp_path / "bad.py"), data=str(data["mnist"]))


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = os.fspath(tmp_path.resolve())
    assert resolve_model("a/net.py:Net") == f"{here}/a/net.py:Net"
    assert resolve_model("net.py") == f"{here}/net.py"
    assert resolve_model("resnet20") == "resnet20"
    assert resolve_data("a/../b") == f"{here}/b"
    assert resolve_data("/b") == "/b"
    assert resolve_task("cifar10:model=cnn,data=b,grey=true") == (
        f"cifar10:model=cnn,data={here}/b,grey=true"
    )
    assert resolve_task("mnist:data=b") == f"mnist:data={here}/b"
    assert resolve_task("digits:hidden=3") == "digits:hidden=3"
    assert resolve_task("t.py:make:data=b") == f"{here}/t.py:make:data=b"


def test_what_there_is() -> None:
    assert {"mnist", "cifar10", "digits", "least-squares"} <= set(TASKS)
    assert set(MODELS) == {
        "softmax",
        "cnn",
        "rudra",
        "resnet8",
        "resnet20",
        "resnet56",
        "resnet110",
    }
