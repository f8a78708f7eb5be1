"""What a user brings: defaults, hooks, and the sentences for what cannot work."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate
from training_tools import CPU, class_data, make_server, make_task, mlp, named, same_bits, train

import gruppetto as gp
from gruppetto.errors import InvalidSetting, TaskError
from gruppetto.training.task import Task

SGD = gp.optimizer(torch.optim.SGD, lr=0.1)


# --------------------------------------------------------------------- defaults


def test_default_evaluation_is_loss_and_accuracy_over_all_test_samples() -> None:
    """700 samples: more than one evaluation batch, the second one ragged."""
    torch.manual_seed(1)
    test = class_data(700, seed=3)
    model = mlp().train()
    found = make_task(test=test).measure(model, CPU)
    x, y = test.tensors
    with torch.no_grad():
        logits = model(x)
    log_likelihood = logits - logits.exp().sum(1, keepdim=True).log()
    assert found["loss"] == pytest.approx(float(-log_likelihood[range(700), y].mean()), rel=1e-6)
    assert found["accuracy"] == float((logits.argmax(1) == y).double().mean())
    assert found.keys() == {"loss", "accuracy"}
    assert model.training  # its mode is given back


@pytest.mark.parametrize("is_contiguous", [True, False])
def test_data_in_tensors_are_evaluated_to_the_bits_of_their_rows_collated(
    is_contiguous: bool,
) -> None:
    x, y = class_data(700, seed=3).tensors
    test = TensorDataset(x if is_contiguous else x.t().contiguous().t(), y)
    model = mlp()
    by_rows = make_task(test=test, collate_fn=lambda samples: default_collate(samples))
    assert make_task(test=test).measure(model, CPU) == by_rows.measure(model, CPU)


def test_evaluation_is_in_eval_mode_and_without_gradients() -> None:
    seen: list[Any] = []

    def evaluate(model: nn.Module, test: Any) -> dict[str, Any]:
        seen.append((model.training, torch.is_grad_enabled(), test))
        return {"loss": torch.tensor(0.25), "f1": 1}

    task = make_task(evaluate=evaluate, test=[1, 2])
    for training in (True, False):
        model = mlp().train(training)
        assert task.measure(model, CPU) == {"loss": 0.25, "f1": 1.0}
        assert seen.pop() == (False, False, [1, 2])
        assert model.training == training  # given back


def test_no_accuracy_where_outputs_are_no_class_scores() -> None:
    x = torch.randn(5, 6)
    task = Task(
        model=lambda: nn.Linear(6, 3), train=TensorDataset(x, torch.randn(5, 3)),
        test=TensorDataset(x, torch.randn(5, 3)),
        loss=lambda out, batch: (out - batch[1]).square().mean(),
    )  # fmt: skip
    assert task.measure(task.model(), CPU).keys() == {"loss"}


def test_the_history_of_a_run_has_the_measured_numbers(tmp_path: Path) -> None:
    test = class_data(30, seed=8)
    run = train(
        make_task(test=test), tmp_path / "run", batch_size=10, epochs=2, optimizer=SGD,
        evaluate="live",
    )  # fmt: skip
    assert [row["epoch"] for row in run.history] == [pytest.approx(1.6), 2.0]
    with torch.no_grad():
        loss = nn.functional.cross_entropy(run.model(test.tensors[0]), test.tensors[1])
    assert run.history[-1]["test_loss"] == pytest.approx(float(loss), rel=1e-6)
    assert run.result["test_loss"] == run.history[-1]["test_loss"]


class Adding(nn.Module):
    """Two inputs by position or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.out(left - 2 * right)


LEFT, RIGHT, TARGET = torch.randn(2, 6), torch.randn(2, 6), torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("inputs", "batch"),
    [
        (None, [LEFT, RIGHT, TARGET]),
        (None, (LEFT, RIGHT, TARGET)),
        (lambda b: (b["l"], b["r"]), {"l": LEFT, "r": RIGHT}),
        (lambda b: {"right": b[0], "left": b[1]}, (RIGHT, LEFT)),
    ],
    ids=["list", "tuple", "positional", "keywords"],
)
def test_inputs(inputs: Any, batch: Any) -> None:
    task = Task(model=Adding, train=[0], inputs=inputs)
    model = Adding()
    assert torch.equal(task.forward(model, batch), model.out(LEFT - 2 * RIGHT))


def test_default_loss_takes_the_last_element() -> None:
    logits = torch.randn(2, 3)
    task = Task(model=Adding, train=[0])
    expected = -(logits - logits.logsumexp(1, keepdim=True))[range(2), TARGET].mean()
    actual = task.compute_loss(logits, [LEFT, RIGHT, TARGET])
    torch.testing.assert_close(actual, expected)


def test_a_run_with_dicts_all_the_way(tmp_path: Path) -> None:
    """collate_fn, inputs and loss of one's own give the bits of the plain task."""

    def collate(samples: list[Any]) -> dict[str, Tensor]:
        return {
            "pixels": torch.stack([x for x, _ in samples]),
            "labels": torch.stack([y for _, y in samples]),
        }

    runs = [
        train(task, tmp_path / str(i), batch_size=8, epochs=2, optimizer=SGD, evaluate="live")
        for i, task in enumerate(
            (
                make_task(test=class_data(9, seed=1)),
                make_task(
                    test=class_data(9, seed=1),
                    collate_fn=collate,
                    inputs=lambda batch: {"input": batch["pixels"]},
                    loss=lambda out, batch: nn.functional.cross_entropy(out, batch["labels"]),
                ),
            )
        )
    ]
    assert runs[0].result["weights_sha256"] == runs[1].result["weights_sha256"]
    assert runs[0].result["test_loss"] == runs[1].result["test_loss"]


def test_defaults_of_a_task(tmp_path: Path) -> None:
    task = make_task(optimizer="sgd:lr=0.1", batch_size=25, epochs=3)
    run = train(task, tmp_path / "run")
    assert run.result["batch_size"] == 25
    assert run.result["mini_batches_applied"] == 6


# ------------------------------------------------------------------- refusals


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": mlp()}, "expected a function that builds the model, got Sequential; write "),
        ({"model": "resnet"}, "expected a function that builds the model, got str"),
        ({"train": DataLoader(class_data())}, "train: expected a dataset, got a DataLoader; pass"),
        ({"test": DataLoader(class_data())}, "test: expected a dataset, got a DataLoader"),
        ({"train": Endless()}, "got the IterableDataset Endless, whose samples cannot be leased"),
        ({"train": []}, "train: expected at least one sample, got an empty dataset"),
        ({"test": class_data(0)}, "test: expected at least one sample"),
        ({"train": 5}, r"map-style dataset \(__getitem__ and __len__\), got int"),
        ({"train": iter([1])}, "map-style dataset"),
    ],
)
def test_tasks_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        make_task(**given)


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda out, batch: out, r"shape \(2, 3\)"),
        (lambda out, batch: out.sum(1), r"shape \(2,\)"),
        (lambda out, batch: 1.5, "float"),
        (lambda out, batch: None, "NoneType"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(loss: Any, got: str) -> None:
    task = make_task(loss=loss)
    with pytest.raises(TaskError, match=f"expected a scalar tensor, the mean .*; got {got}"):
        task.compute_loss(torch.zeros(2, 3), None)


@pytest.mark.parametrize("value", [0.5, [0.5], {"loss": "low"}, None, {"loss": torch.zeros(2)}])
def test_an_evaluation_that_is_no_dict_of_numbers_is_refused(value: Any) -> None:
    task = make_task(evaluate=lambda model, test: value)
    with pytest.raises(TaskError, match="evaluate: expected a dict of numbers like"):
        task.measure(mlp(), CPU)


@pytest.mark.parametrize("batch", [[LEFT], (LEFT,), LEFT, {"x": LEFT}])
def test_a_batch_without_a_target_is_refused(batch: Any) -> None:
    with pytest.raises(TaskError, match=r"expected batches \(input, \.\.\., target\) or a task wi"):
        make_task().forward(mlp(), batch)


def test_lazy_modules_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about lazy modules
        with pytest.raises(TaskError, match=r"model: 0\.weight is lazy, its shape unknown"):
            make_server(lambda: nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize(
    ("model", "error", "sentence"),
    [
        (lambda: "a model", TaskError, "expected it to build an nn.Module, got str"),
        (nn.Flatten, gp.UsageError, "no parameter|an empty parameter list"),
        (
            lambda: nn.Linear(6, 3).requires_grad_(False),
            TaskError,
            "holds no parameter of the model that needs a gradient",
        ),
    ],
    ids=["no-module", "no-parameters", "all-frozen"],
)
def test_models_refused(model: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make_server(model)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"batch_size": 10}, "an optimizer is required for this task"),
        ({"optimizer": "sgd:lr=0.1"}, "a batch size is required for this task"),
        ({"optimizer": "sgd:lr=0.1", "batch_size": 51}, "batch size: expected 1 to 50"),
        ({"optimizer": "sgd:lr=-1", "batch_size": 5}, "Invalid learning rate"),
    ],
)
def test_train_refuses_in_a_sentence_and_writes_nothing(
    tmp_path: Path, given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidSetting, match=sentence):
        train(make_task(), tmp_path / "run", epochs=1, **given)
    assert not (tmp_path / "run").exists()


def test_train_refuses_a_run_without_end(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="a run needs an end"):
        train(make_task(), tmp_path / "run", batch_size=5, optimizer=SGD)


def test_train_refuses_what_is_no_task(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="expected a Task or its name, got Sequential"):
        gp.train(mlp(), out=tmp_path / "run", batch_size=5, epochs=1, engine="virtual")  # type: ignore[arg-type]


def test_a_mistake_in_the_loss_ends_the_run_with_its_sentence(tmp_path: Path) -> None:
    task = make_task(loss=lambda out, batch: out)
    with pytest.raises(gp.TooManyGivenUp, match="expected a scalar tensor, the mean over samples"):
        train(task, tmp_path / "run", batch_size=5, epochs=1, optimizer=SGD)


# ------------------------------------------------- sparse gradients, tied weights


class Words(nn.Module):
    """An embedding of nine words, some of them never seen."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4, sparse=sparse)
        self.out = nn.Linear(4, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.embedding(words).sum(1))


WORDS = TensorDataset(torch.arange(60).reshape(20, 3) % 7, torch.arange(20) % 3)


def test_sparse_gradients_are_densified_with_one_warning(tmp_path: Path) -> None:
    optimizer = gp.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.warns(UserWarning, match="sparse gradients are made dense") as record:
        sparse = train(
            make_task(lambda: Words(True), train=WORDS), tmp_path / "sparse", batch_size=4,
            epochs=2, learners=3, optimizer=optimizer,
        )  # fmt: skip
    assert len(record) == 1
    dense = train(
        make_task(lambda: Words(False), train=WORDS), tmp_path / "dense", batch_size=4, epochs=2,
        learners=3, optimizer=optimizer,
    )  # fmt: skip
    left, right = named(sparse.model), named(dense.model)
    for name, value in right.items():
        # Repeated words are summed in another order.
        torch.testing.assert_close(left[name], value, rtol=1e-5, atol=1e-6)


class TiedWithBuffers(nn.Module):
    """A tied weight, a BatchNorm, a counter, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.out = nn.Linear(6, 3)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.out(self.second(self.norm(self.first(x)).tanh()))


def tied_run(folder: Path, **given: Any) -> Any:
    settings = {"batch_size": 10, "epochs": 2, "learners": 2, "optimizer": SGD, **given}
    return train(make_task(TiedWithBuffers), folder, **settings)


def test_tied_weights_stay_tied_and_train(tmp_path: Path) -> None:
    model = tied_run(tmp_path / "run").model
    assert model.second.weight is model.first.weight
    assert not model.training
    torch.manual_seed(0)
    assert (model.first.weight != TiedWithBuffers().first.weight).all()
    assert int(model.calls) == 10


@pytest.mark.parametrize("ending", ["pt", "pth", "safetensors"])
def test_export_reloads_into_a_plain_model(tmp_path: Path, ending: str) -> None:
    run = tied_run(tmp_path / "run")
    path = gp.export(run.folder.path, tmp_path / f"model.{ending}")
    state = load_file(path) if ending == "safetensors" else torch.load(path, weights_only=True)
    plain = TiedWithBuffers()
    before = plain.first.weight.detach().clone()
    plain.load_state_dict(state, strict=True)
    plain.eval()
    assert not same_bits(plain.first.weight, before)
    for name, value in run.model.state_dict().items():
        assert same_bits(plain.state_dict()[name], value), name
    x = torch.randn(5, 6)
    with torch.no_grad():
        assert torch.equal(plain(x), run.model(x))
    assert int(plain.calls) == 10
    assert plain.second.weight is plain.first.weight


def test_the_trained_model_is_its_owners(tmp_path: Path) -> None:
    """No parameter is a view of the others' memory: it can be moved, pickled and trained on."""
    model = tied_run(tmp_path / "run").model
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 4
        assert parameter.grad is None
    torch.save(model.state_dict(), tmp_path / "own.pt")


# ------------------------------------------------------------- starting weights


def start_state() -> dict[str, Tensor]:
    torch.manual_seed(77)
    model = TiedWithBuffers()
    model.norm.running_mean.fill_(0.5)
    model.calls.fill_(1000)
    return {n: t.clone() for n, t in model.state_dict().items()}


@pytest.mark.parametrize("form", ["dict", "pt", "safetensors"])
def test_training_starts_from_given_weights(tmp_path: Path, form: str) -> None:
    """With a rate of zero the weights stay what they were; buffers go on from where they were."""
    state = start_state()
    kept = {n: t.clone() for n, t in state.items()}
    initial: Any = state
    if form == "pt":
        initial = tmp_path / "start.pt"
        torch.save(state, initial)
    elif form == "safetensors":
        initial = str(tmp_path / "start.safetensors")
        save_file(state, initial)
    frozen = gp.optimizer(torch.optim.SGD, lr=0.0)
    run = tied_run(tmp_path / "still", initial=initial, optimizer=frozen)
    for name, parameter in run.model.named_parameters():
        assert same_bits(parameter, kept[name]), name
    assert int(run.model.calls) == 1010
    moved = tied_run(tmp_path / "moved", initial=initial)
    assert not same_bits(moved.model.out.weight, kept["out.weight"])
    # The caller's own tensors are not trained on.
    assert all(same_bits(state[n], kept[n]) for n in kept)


def test_two_short_runs_one_after_the_other(tmp_path: Path) -> None:
    """The weights that come out go in again, by way of an exported file."""
    first = train(make_task(), tmp_path / "a", batch_size=10, epochs=1, optimizer=SGD)
    path = gp.export(first.folder.path)
    second = train(
        make_task(), tmp_path / "b", batch_size=10, epochs=1, initial=path,
        optimizer=gp.optimizer(torch.optim.SGD, lr=0.0),
    )  # fmt: skip
    assert second.result["weights_sha256"] == first.result["weights_sha256"]


@pytest.mark.parametrize(
    ("initial", "sentence"),
    [
        ({"0.weight": torch.zeros(7, 6)}, "initial weights do not fit the model: Missing key"),
        ("missing.pt", "initial weights: missing.pt does not exist"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, initial: Any, sentence: str) -> None:
    with pytest.raises(InvalidSetting, match=sentence):
        train(
            make_task(), tmp_path / "run", batch_size=10, epochs=1, optimizer=SGD, initial=initial
        )
    assert not (tmp_path / "run").exists()


def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pt"
    junk.write_bytes(b"not a file of weights")
    settings: dict[str, Any] = {"batch_size": 10, "epochs": 1, "optimizer": SGD}
    with pytest.raises(InvalidSetting, match=r"junk\.pt cannot be read"):
        train(make_task(), tmp_path / "run", initial=junk, **settings)
