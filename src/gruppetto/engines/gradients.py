"""Which versions and gradients are alive: the tensor side of an engine that lives in one process.

A version is kept while somebody holds it (a learner computing on it, a gradient not applied yet)
or while it is the newest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gruppetto.protocols.messages import ApplyUpdate, Contribution

__all__ = ["ComputesGradients", "Gradients", "HoldsWeights", "PushedGradient"]


class PushedGradient(Protocol):
    """What a learner pushes, as far as engines look into it."""

    @property
    def loss(self) -> float:
        """Mean over the samples."""
        ...

    @property
    def num_samples(self) -> int:
        """Samples behind it."""
        ...


class ComputesGradients(Protocol):
    """A learner: weights + mini-batch -> gradient."""

    def compute(self, mini_batch: int, weights: Any) -> PushedGradient:
        """May raise anything the user's code raises."""
        ...


class HoldsWeights(Protocol):
    """A server: contributions -> one update."""

    def snapshot(self) -> Any:
        """The newest weights, copied."""
        ...

    @property
    def needs_past(self) -> bool:
        """Whether an update needs the weights each gradient was computed on."""
        ...

    def apply(
        self,
        contributions: Sequence[Contribution],
        gradients: Sequence[Any],
        past: Sequence[Any] = (),
    ) -> None:
        """Take one update; ``past`` are flat weights, one for each gradient, where needed."""
        ...


class Gradients:
    """Versions in use, and gradients that arrived and are not applied yet.

    Args:
        server: makes versions.
        learner: makes gradients.
    """

    def __init__(self, server: HoldsWeights, learner: ComputesGradients) -> None:
        self._server = server
        self._learner = learner
        self._versions: dict[int, Any] = {}
        self._holders: dict[int, int] = {}
        self._arrived: dict[int, tuple[int, PushedGradient]] = {}
        self.newest = 0

    def publish(self, version: int) -> None:
        """The server's current weights are this version."""
        self._versions[version] = self._server.snapshot()
        before, self.newest = self.newest, version
        self._free(before)

    def hold(self, version: int) -> None:
        """One more holder of a version."""
        self._holders[version] = self._holders.get(version, 0) + 1

    def release(self, version: int) -> None:
        """One holder less; the last one frees the version."""
        self._holders[version] -= 1
        self._free(version)

    def has(self, version: int) -> bool:
        """Whether a version is still there."""
        return version in self._versions

    def compute(self, mini_batch: int, version: int) -> PushedGradient:
        """The gradient of a mini-batch on a version that is held."""
        return self._learner.compute(mini_batch, self._versions[version])

    def keep(self, lease: int, version: int, gradient: PushedGradient) -> None:
        """A gradient arrived; it holds its version until it is applied or dropped."""
        self.hold(version)
        self._arrived[lease] = (version, gradient)

    def drop(self, lease: int) -> None:
        """A gradient that arrived will not be applied."""
        version, _ = self._arrived.pop(lease)
        self.release(version)

    def drop_all(self) -> None:
        """Nothing that arrived will be applied."""
        for lease in list(self._arrived):
            self.drop(lease)

    def apply(self, update: ApplyUpdate) -> None:
        """Have the server take an update and publish it."""
        arrived = [self._arrived.pop(c.lease) for c in update.contributions]
        past: Sequence[Any] = ()
        if self._server.needs_past:
            past = [self._versions[version].flat for version, _ in arrived]
        self._server.apply(update.contributions, [gradient for _, gradient in arrived], past)
        self.publish(update.version)
        for version, _ in arrived:
            self.release(version)

    def in_use(self) -> dict[int, Any]:
        """Every version that is alive, by number."""
        return dict(self._versions)

    def restore(self, versions: dict[int, Any], newest: int) -> None:
        """Take back what :meth:`in_use` gave; holders are added one by one."""
        self._versions = dict(versions)
        self.newest = newest

    def _free(self, version: int) -> None:
        if self._holders.get(version, 0) <= 0:
            self._holders.pop(version, None)
            if version != self.newest:
                self._versions.pop(version, None)
