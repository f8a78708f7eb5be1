"""A task: model, data, loss, evaluation. What a user brings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from gruppetto.errors import GruppettoError, InvalidSetting, TaskError
from gruppetto.training.optimizers import OptimizerFactory, parse_optimizer

__all__ = ["Task", "default_evaluate", "to_device"]

_EVALUATION_BATCH = 512


@dataclass(frozen=True)
class Task:
    """Everything about what is trained, nothing about how.

    Args:
        model: builds the ``nn.Module``, called with no arguments under the run's seed.
        train: map-style dataset (``__getitem__`` and ``__len__``); one with ``make_batch`` makes
            whole batches itself, see :class:`gruppetto.training.mini_batches.MiniBatches`.
        test: the same, for evaluation; without it nothing is evaluated by default.
        loss: ``loss(outputs, batch)``, the mean over the batch's samples, a scalar tensor.
            Default: cross-entropy of the outputs with the last element of the batch.
        inputs: ``inputs(batch)``, a tuple of positional or a dict of keyword arguments of the
            model. Default: all but the last element.
        evaluate: ``evaluate(model, test)``, a dict of floats; the model is in eval mode.
            Default: ``loss``, and ``accuracy`` for class outputs.
        collate_fn: list of samples -> batch. Default: torch's ``default_collate``.
        sampler: ``sampler(epoch)``, the sample indices of an epoch in order, equally many in
            every epoch. Default: a permutation by the run's seed.
        param_groups: ``param_groups(model)``, the optimizer's groups as dicts; ``lr_scale`` in
            one multiplies the learning rate.
        optimizer, batch_size, epochs: defaults of this task, for runs that give none.
        name: for tables and traces.

    Raises:
        TaskError: a model that is not a function, an IterableDataset or DataLoader for data.
    """

    model: Callable[[], nn.Module]
    train: Any
    test: Any = None
    loss: Callable[[Any, Any], Tensor] | None = None
    inputs: Callable[[Any], tuple[Any, ...] | dict[str, Any]] | None = None
    evaluate: Callable[[nn.Module, Any], Mapping[str, float]] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    sampler: Callable[[int], Sequence[int]] | None = None
    param_groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    optimizer: OptimizerFactory | str | None = None
    batch_size: int | None = None
    epochs: float | None = None
    name: str = "task"

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise TaskError(
                "model: expected a function that builds the model, got "
                f"{type(self.model).__name__}; write model=lambda: MyModel()"
            )
        _check_dataset(self.train, "train")
        if self.test is not None:
            _check_dataset(self.test, "test")

    def default_optimizer(self) -> OptimizerFactory | None:
        """The optimizer this task carries, if any."""
        carried = self.optimizer
        return parse_optimizer(carried) if isinstance(carried, str) else carried

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """The model's outputs for a batch."""
        if self.inputs is None:
            if not isinstance(batch, (tuple, list)) or len(batch) < 2:
                raise TaskError(
                    "expected batches (input, ..., target) or a task with inputs=, got a "
                    f"{type(batch).__name__}"
                )
            return model(*batch[:-1])
        arguments = self.inputs(batch)
        if isinstance(arguments, dict):
            return model(**arguments)
        return model(*arguments)

    def compute_loss(self, outputs: Any, batch: Any) -> Tensor:
        """The mean loss over a batch: a scalar tensor.

        Raises:
            TaskError: a batch without a target, a label the model has no class score for, or a
                loss function that returns no scalar tensor.
        """
        if self.loss is None:
            if not isinstance(batch, (tuple, list)):
                raise TaskError(
                    "expected batches (input, ..., target) or a task with loss=, got a "
                    f"{type(batch).__name__}"
                )
            try:
                return nn.functional.cross_entropy(outputs, batch[-1])
            except (IndexError, RuntimeError):
                _check_labels(outputs, batch[-1])
                raise
        loss = self.loss(outputs, batch)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TaskError(f"loss: expected a scalar tensor, the mean over samples; got {got}")
        return loss

    def collate(self, samples: list[Any]) -> Any:
        """Samples -> batch."""
        return (self.collate_fn or default_collate)(samples)

    def measure(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Evaluate a model in eval mode without gradients; its mode is given back.

        Raises:
            TaskError: evaluating fails, or returns something else than a dict of numbers.
        """
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                if self.evaluate is None:
                    return default_evaluate(self, model, device)
                metrics = self.evaluate(model, self.test)
        except GruppettoError:
            raise
        except Exception as error:
            raise TaskError(f"evaluate failed: {type(error).__name__}: {error}") from error
        finally:
            model.train(was_training)
        try:
            return {str(k): float(v) for k, v in metrics.items()}
        except (AttributeError, TypeError, ValueError):
            raise TaskError(
                f"evaluate: expected a dict of numbers like {{'loss': 0.3}}, got {metrics!r}"
            ) from None


def default_evaluate(task: Task, model: nn.Module, device: torch.device) -> dict[str, float]:
    """Mean loss over the test set, and accuracy where outputs are class scores [N, classes]."""
    total = correct = 0.0
    count = scored = 0
    make_batch = batch_maker(task, task.test)
    # Indexing whole tensors gives the same bits as collating their rows, much faster.
    whole = task.collate_fn in (None, default_collate) and type(task.test) is TensorDataset
    whole = whole and all(tensor.is_contiguous() for tensor in task.test.tensors)
    for start in range(0, len(task.test), _EVALUATION_BATCH):
        indices = range(start, min(start + _EVALUATION_BATCH, len(task.test)))
        picked = torch.arange(indices.start, indices.stop)
        if make_batch is not None:
            batch = make_batch(picked, None)
        elif whole:
            batch = [torch.index_select(tensor, 0, picked) for tensor in task.test.tensors]
        else:
            batch = task.collate([task.test[i] for i in indices])
        batch = to_device(batch, device)
        outputs = task.forward(model, batch)
        total += float(task.compute_loss(outputs, batch)) * len(indices)
        count += len(indices)
        target = batch[-1] if isinstance(batch, (tuple, list)) else None
        if (
            isinstance(outputs, Tensor)
            and isinstance(target, Tensor)
            and outputs.dim() == 2
            and target.dim() == 1
            and not target.is_floating_point()
        ):
            correct += float((outputs.argmax(1) == target).sum())
            scored += len(indices)
    metrics = {"loss": total / count}
    if scored == count:
        metrics["accuracy"] = correct / count
    return metrics


def batch_maker(task: Task, data: Any) -> Callable[[Tensor, torch.Generator | None], Any] | None:
    """The dataset's own ``make_batch``; None without one, or where the task collates samples."""
    if task.collate_fn not in (None, default_collate):
        return None
    return getattr(data, "make_batch", None)


def to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return type(value)((k, to_device(v, device)) for k, v in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a namedtuple
        return type(value)(*(to_device(v, device) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(v, device) for v in value)
    return value


def _check_labels(outputs: Any, labels: Any) -> None:
    """Say which label is out of range, where that is why cross-entropy failed."""
    if not (isinstance(outputs, Tensor) and isinstance(labels, Tensor)) or outputs.dim() < 1:
        return
    if labels.is_floating_point() or labels.dim() != outputs.dim() - 1:
        return
    classes = outputs.shape[min(1, outputs.dim() - 1)]
    # -100 is what cross-entropy leaves out.
    wrong = labels[((labels < 0) | (labels >= classes)) & (labels != -100)]
    if wrong.numel():
        raise TaskError(
            f"label {int(wrong.flatten()[0])} but the model gives {classes} class scores (0 to "
            f"{classes - 1})"
        )


def _check_dataset(data: Any, what: str) -> None:
    if isinstance(data, DataLoader):
        raise TaskError(
            f"{what}: expected a dataset, got a DataLoader; pass loader.dataset, and its "
            "collate_fn as collate_fn="
        )
    if isinstance(data, IterableDataset):
        raise TaskError(
            f"{what}: expected a map-style dataset (__getitem__ and __len__), got the "
            f"IterableDataset {type(data).__name__}, whose samples cannot be leased again when a "
            "learner is lost"
        )
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise TaskError(
            f"{what}: expected a map-style dataset (__getitem__ and __len__), got "
            f"{type(data).__name__}"
        )
    if len(data) == 0:
        raise TaskError(f"{what}: expected at least one sample, got an empty dataset")


def check_batch_size(task: Task, batch_size: int) -> None:
    """Refuse a mini-batch larger than the data.

    Raises:
        InvalidSetting: batch_size < 1 or more than the training samples.
    """
    if not 1 <= batch_size <= len(task.train):
        raise InvalidSetting(
            f"batch size: expected 1 to {len(task.train)} (the training samples of "
            f"{task.name}), got {batch_size}"
        )
