"""What happens to a model's buffers when many learners train it.

* BatchNorm: the push carries the mini-batch's own mean and unbiased variance; the server moves
  its average once per update. (Averaging learners' running statistics loses accuracy with many
  learners, and adding up their changes diverges.)
* Counters (integer scalars) add up.
* Everything else comes from the newest contribution: the highest version, then the last listed.

A module with its own idea registers a rule for its class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = [
    "BATCH_NORM",
    "BufferChange",
    "BufferRule",
    "BufferUpdate",
    "recalibrated_batch_norm",
    "register_rule",
    "rules_of",
]


@dataclass(frozen=True, slots=True)
class BufferChange:
    """One learner's news about one module's buffers, and the samples behind it."""

    tensors: dict[str, Tensor]
    num_samples: int


class BufferRule:
    """How one class of module reports its buffers and how the server combines the reports."""

    #: Names of the buffers the rule takes care of.
    names: tuple[str, ...] = ()

    def is_active(self, module: nn.Module) -> bool:
        """Whether the rule holds for this module as it is now (in training mode)."""
        raise NotImplementedError

    def prepare(self, module: nn.Module) -> None:
        """Called on the learner's module before every forward pass."""
        raise NotImplementedError

    def collect(self, module: nn.Module) -> dict[str, Tensor]:
        """Called after the pass: what the push carries (fresh tensors)."""
        raise NotImplementedError

    def combine(self, module: nn.Module, changes: Sequence[BufferChange]) -> None:
        """Called on the server's module once per update."""
        raise NotImplementedError


class _BatchNormRule(BufferRule):
    """Ships the batch statistics.

    The learner's module averages cumulatively from zero (momentum None, count 0), so after the
    pass its running statistics are the mean over the calls of that pass, exactly the batch's own
    for the usual single call, and its counter is the number of calls.
    """

    names = ("running_mean", "running_var", "num_batches_tracked")

    def is_active(self, module: nn.Module) -> bool:
        # A module that the user froze with eval() uses its running statistics and keeps them.
        return module.training and module.running_mean is not None

    def prepare(self, module: nn.Module) -> None:
        module.momentum = None  # type: ignore[assignment]
        for name in self.names:
            getattr(module, name).zero_()

    def collect(self, module: nn.Module) -> dict[str, Tensor]:
        return {name: getattr(module, name).clone() for name in self.names}

    def combine(self, module: nn.Module, changes: Sequence[BufferChange]) -> None:
        changes = [c for c in changes if int(c.tensors["num_batches_tracked"]) > 0]
        if not changes:
            return
        calls = sum(int(c.tensors["num_batches_tracked"]) for c in changes)
        tracked: Tensor = module.get_buffer("num_batches_tracked")
        tracked.add_(calls)
        # Without a momentum the user wants a plain average over all mini-batches.
        momentum = module.momentum
        factor = calls / int(tracked) if momentum is None else float(momentum)  # type: ignore[arg-type]
        samples = sum(c.num_samples for c in changes)
        for name in ("running_mean", "running_var"):
            mean = changes[0].tensors[name] * (changes[0].num_samples / samples)
            for change in changes[1:]:
                mean.add_(change.tensors[name], alpha=change.num_samples / samples)
            module.get_buffer(name).mul_(1 - factor).add_(mean, alpha=factor)


BATCH_NORM = _BatchNormRule()
_RULES: list[tuple[type[nn.Module], BufferRule]] = [(_BatchNorm, BATCH_NORM)]


def register_rule(module_class: type[nn.Module], rule: BufferRule) -> None:
    """Use ``rule`` for modules of this class from now on, in this process."""
    _RULES.insert(0, (module_class, rule))


def rules_of(model: nn.Module) -> dict[str, tuple[nn.Module, BufferRule]]:
    """Module name -> the module and its rule, for modules that have one and it is active."""
    found: dict[str, tuple[nn.Module, BufferRule]] = {}
    for name, module in model.named_modules():
        for module_class, rule in _RULES:
            if isinstance(module, module_class):
                if rule.is_active(module):
                    found[name] = (module, rule)
                break
    return found


@contextmanager
def recalibrated_batch_norm(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Inside, BatchNorm modules average cumulatively from zero; after, they are as before.

    Yields:
        The modules, those that are frozen left out; run batches through the model in training
        mode to fill their averages.
    """
    modules = [module for module, rule in rules_of(model).values() if rule is BATCH_NORM]
    kept = [
        (m, m.momentum, {n: b.clone() for n, b in m.named_buffers(recurse=False)}) for m in modules
    ]
    try:
        for module in modules:
            BATCH_NORM.prepare(module)
        yield modules
    finally:
        for module, momentum, buffers in kept:
            module.momentum = momentum
            for name, buffer in buffers.items():
                module.get_buffer(name).copy_(buffer)


def _is_counter(buffer: Tensor) -> bool:
    is_number = not buffer.is_floating_point() and not buffer.is_complex()
    return buffer.dim() == 0 and is_number and buffer.dtype != torch.bool


class BufferUpdate:
    """All buffers of one model, on the learner's side and on the server's.

    Args:
        model: in training mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._ruled = rules_of(model)
        covered = {
            f"{prefix}.{name}" if prefix else name
            for prefix, (_, rule) in self._ruled.items()
            for name in rule.names
        }
        #: Buffers without a rule, by name; a learner starts from the server's.
        self.other_names = tuple(n for n, _ in model.named_buffers() if n not in covered)

    def others(self) -> dict[str, Tensor]:
        """Copies of the buffers without a rule."""
        if not self.other_names:
            return {}
        buffers = dict(self._model.named_buffers())
        return {name: buffers[name].detach().clone() for name in self.other_names}

    def load_others(self, values: dict[str, Tensor]) -> None:
        """Learner: start from the server's buffers."""
        if values:
            buffers = dict(self._model.named_buffers())
            for name, value in values.items():
                buffers[name].copy_(value)

    def prepare(self) -> None:
        """Learner: before a forward pass."""
        for module, rule in self._ruled.values():
            rule.prepare(module)

    def collect(self, before: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Learner: after the pass, the news of each ruled module, and of the rest (``/others``)."""
        news = {name: rule.collect(module) for name, (module, rule) in self._ruled.items()}
        others = self.others()
        if others:
            for name, value in others.items():
                if _is_counter(value):
                    others[name] = value - before[name]
            news["/others"] = others
        return news

    def example(self) -> dict[str, dict[str, Tensor]]:
        """What :meth:`collect` gives, as far as names, shapes and dtypes go; values are void.

        For a replica that learners have not used yet: its ruled buffers are changed.
        """
        self.prepare()
        return self.collect(self.others())

    def combine(
        self, news: Sequence[dict[str, dict[str, Tensor]]], num_samples: Sequence[int], newest: int
    ) -> None:
        """Server: once per update; ``newest`` indexes the contribution others come from."""
        if not news or not news[0]:
            return
        with torch.no_grad():
            for name, (module, rule) in self._ruled.items():
                rule.combine(
                    module,
                    [BufferChange(n[name], c) for n, c in zip(news, num_samples, strict=True)],
                )
            if self.other_names:
                buffers = dict(self._model.named_buffers())
                for name in self.other_names:
                    if _is_counter(buffers[name]):
                        for change in news:
                            buffers[name].add_(change["/others"][name])
                    else:
                        buffers[name].copy_(news[newest]["/others"][name])
