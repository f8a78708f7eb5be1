"""Settings -> the parts of a run: task, server, learner, coordinator, delays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from gruppetto.delays import Constant, KeyedDelays
from gruppetto.engines.faults import FAULT_PLANS, FaultPlan
from gruppetto.engines.local.memory import MemoryPlan
from gruppetto.errors import InvalidSetting
from gruppetto.protocols import GUARDS, PROTOCOLS, WARMUPS, Coordinator, Hardsync, Protocol
from gruppetto.protocols.messages import Contribution
from gruppetto.runs.seconds import load_delay
from gruppetto.runs.settings import CommonSettings, Settings, Target
from gruppetto.staleness import COMPENSATIONS, MODULATIONS
from gruppetto.training.clipping import CLIPS
from gruppetto.training.gamma import GammaMeter, GammaServer
from gruppetto.training.learner import Learner
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.optimizers import OptimizerFactory, Schedule
from gruppetto.training.randomness import Stream, keep_global_randomness
from gruppetto.training.sample import FixedSample
from gruppetto.training.server import Server, Updating
from gruppetto.training.task import Task

__all__ = [
    "Ingredients",
    "Parts",
    "build_coordinator",
    "build_parts",
    "check_need",
    "count_mini_batches",
    "crosses",
    "predict_local_memory",
    "predict_memory",
    "prepared_torch",
    "read_device",
]

_GIB = 2**30
#: Weights and gradient of the replica that γ is measured with, and the two that are compared.
_GAMMA_VECTORS = 4


@dataclass(frozen=True)
class Ingredients:
    """What settings cannot write down: objects of the caller."""

    task: Task
    optimizer: OptimizerFactory
    schedule: Schedule | None = None
    #: Weights to start from, as a ``state_dict``.
    initial: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Parts:
    """Everything an engine and a journal need."""

    settings: Settings
    coordinator: Coordinator
    server: Server
    learner: Learner
    mini_batches: MiniBatches
    delays: KeyedDelays
    faults: FaultPlan | None
    target: Target | None
    #: Measures γ, where that is asked for.
    gamma: GammaServer | None = None

    @property
    def updated(self) -> Server | GammaServer:
        """What engines hand updates to: the server, behind what measures γ if that is asked for."""
        return self.server if self.gamma is None else self.gamma

    @property
    def has_delays(self) -> bool:
        """Whether somebody asked for delays, for all learners or for one."""
        return self.settings.delay is not None or bool(self.settings.delays)

    @property
    def max_held(self) -> int:
        """Gradients that may wait for one update, at most."""
        protocols: list[Protocol] = [PROTOCOLS.parse(self.settings.protocol)]
        if self.settings.warmup is not None:
            protocols.append(Hardsync())
        return max(protocol.most_held(self.settings.learners) for protocol in protocols)


@contextmanager
def prepared_torch(settings: CommonSettings) -> Iterator[None]:
    """This run's number of threads, and the caller's random numbers untouched.

    Raises:
        InvalidSetting: torch does not take that number of threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        if torch.get_num_threads() != settings.threads:
            raise InvalidSetting(
                f"threads: expected {settings.threads}, torch uses {torch.get_num_threads()}"
            )
        with keep_global_randomness():
            yield
    finally:
        torch.set_num_threads(before)


def build_parts(settings: Settings, ingredients: Ingredients, *, is_checked: bool = False) -> Parts:
    """Build and check everything; nothing is written.

    Args:
        settings: the run's.
        ingredients: what they cannot write down.
        is_checked: another process has done what takes long and only checks.

    Raises:
        UsageError: whatever cannot work, in one sentence.
    """
    device = read_device(settings.device)
    protocol = PROTOCOLS.parse(settings.protocol)
    protocol.check(settings.learners)
    modulation = MODULATIONS.parse(settings.modulation)
    # Real processes take their own time; virtual ones need some.
    nothing = None if settings.engine == "virtual" else Constant(value=0.0)
    delays = KeyedDelays(
        settings.seed,
        nothing if settings.delay is None else load_delay(settings.delay),
        {learner: load_delay(text) for learner, text in settings.delays.items()},
        settings.learners,
    )
    task = ingredients.task
    mini_batches = MiniBatches(task, settings.batch_size, settings.seed)
    updating = Updating(
        optimizer=ingredients.optimizer,
        schedule=ingredients.schedule,
        clip=None if settings.clip is None else CLIPS.parse(settings.clip),
        modulation=modulation,
        compensation=COMPENSATIONS.parse(settings.compensation),
        rate_scale=settings.rate_scale,
    )
    server = Server(
        task,
        updating,
        settings.seed,
        mini_batches.samples_per_epoch,
        device,
        ingredients.initial,
    )
    # A warm-up's hardsync may hold more than the protocol after it.
    protocols = [protocol] if settings.warmup is None else [Hardsync(), protocol]
    gamma = _build_gamma(settings, server, mini_batches, device)
    _check_memory(settings, protocols, server)
    target = None if settings.target is None else Target(settings.target)
    # A metric that does not exist is better known before the first epoch.
    if target is not None and not is_checked:
        target.is_reached(server.evaluate(0, settings.seed))
    learner = Learner(task, server.replica(), server.layout, mini_batches, settings.seed, device)
    per_epoch = mini_batches.per_epoch
    total = None if settings.epochs is None else count_mini_batches(settings.epochs, per_epoch)
    coordinator = build_coordinator(settings, total, per_epoch)
    if gamma is not None:
        every = settings.evaluate_every * mini_batches.samples_per_epoch
        gamma.is_due = lambda update: crosses(coordinator.num_samples_applied, update, every)
    return Parts(
        settings=settings,
        coordinator=coordinator,
        server=server,
        learner=learner,
        mini_batches=mini_batches,
        delays=delays,
        faults=None if settings.faults is None else FAULT_PLANS.parse(settings.faults),
        target=target,
        gamma=gamma,
    )


def build_coordinator(
    settings: Settings, num_mini_batches: int | None, batches_per_epoch: int
) -> Coordinator:
    """The coordinator of a run of so many mini-batches, at its beginning.

    Args:
        settings: the run's.
        num_mini_batches: of the whole run; None for a run without end.
        batches_per_epoch: mini-batches of one epoch, for the warm-up.

    Raises:
        InvalidSetting: the protocol, the warm-up or the modulation cannot be read.
    """
    warmup = 0
    if settings.warmup is not None:
        warmup = count_mini_batches(WARMUPS.parse(settings.warmup).epochs, batches_per_epoch)
    return Coordinator(
        PROTOCOLS.parse(settings.protocol),
        range(settings.learners),
        num_mini_batches,
        modulation=MODULATIONS.parse(settings.modulation),
        on_late=settings.on_late,
        max_attempts=settings.max_attempts,
        max_given_up=settings.max_given_up,
        warmup_mini_batches=warmup,
        guard=GUARDS.parse(settings.guard),
    )


def crosses(samples: int, contributions: Iterable[Contribution], every: float) -> bool:
    """Whether an update's samples crossed a multiple of so many.

    Args:
        samples: applied, those of the update included.
        contributions: of the update.
        every: samples from one multiple to the next.
    """
    before = samples - sum(c.num_samples for c in contributions)
    return int(samples / every) > int(before / every)


def count_mini_batches(epochs: float, per_epoch: int) -> int:
    """Mini-batches of so many epochs, the last one begun counted whole."""
    # 10 * (0.1 + 0.2) mini-batches are 3, though floats make it a little more.
    return max(1, math.ceil(epochs * per_epoch - 1e-9))


def predict_memory(
    protocol: Protocol, num_learners: int, vector_bytes: int, num_more: int = 0
) -> int:
    """Bytes that weights and gradients of a virtual run take at most, roughly.

    One vector for each of: the server's weights, its replica and the learner's, two of optimizer
    state (Adam's), the newest version, and K held gradients with one being computed and one being
    summed. In the cells that go on, also the version of each learner and of each held gradient.
    ``num_more`` vectors are compensation's.
    """
    k = protocol.most_held(num_learners)
    vectors = 6 + k + 2 + num_more
    if not protocol.cell.cancels:
        vectors += num_learners + k
    return vectors * vector_bytes


def predict_local_memory(
    protocol: Protocol,
    num_learners: int,
    vector_bytes: int,
    num_snapshots: int,
    *,
    keeps_past: bool = False,
    num_more: int = 0,
) -> int:
    """Bytes that weights and gradients of a run with real processes take at most, roughly.

    Two vectors for each learner's own (weights and gradients), four for the server's (weights, two
    of optimizer state, one being summed), what they share, and the snapshots that wait for their
    evaluation. ``keeps_past``: held gradients keep the version they were computed on; ``num_more``
    vectors are compensation's.
    """
    plan = MemoryPlan.for_run(num_learners, protocol.most_held(num_learners), keeps_past)
    shared = plan.num_versions + plan.num_gradients
    return (2 * num_learners + 4 + shared + num_snapshots + num_more) * vector_bytes


def _build_gamma(
    settings: Settings, server: Server, mini_batches: MiniBatches, device: torch.device
) -> GammaServer | None:
    if not settings.measure_gamma:
        return None
    task, size, seed = server.task, settings.measure_gamma, settings.seed
    sample = FixedSample(task, mini_batches, size, seed, Stream.GAMMA, device)
    meter = GammaMeter(task, server.replica(), server.layout, sample, device)
    return GammaServer(server, meter)


def _num_snapshots(settings: Settings) -> int:
    if settings.evaluate != "deferred" or settings.epochs is None:
        return 1
    return math.ceil(settings.epochs / settings.evaluate_every) + 1


def _check_memory(settings: Settings, protocols: list[Protocol], server: Server) -> None:
    size, learners = server.weights.num_bytes, settings.learners
    more = COMPENSATIONS.parse(settings.compensation).num_vectors
    if settings.measure_gamma:
        more += _GAMMA_VECTORS
    if settings.engine == "virtual":
        need = max(predict_memory(protocol, learners, size, more) for protocol in protocols)
    else:
        kept, past = _num_snapshots(settings), server.needs_past or settings.measure_gamma > 0
        need = max(
            predict_local_memory(p, learners, size, kept, keeps_past=past, num_more=more)
            for p in protocols
        )
    check_need(need, settings.memory, "weights and gradients", "fewer learners, a smaller k")


def check_need(need: float, memory: float | None, what: str, instead: str) -> None:
    """Refuse a run that needs too much memory.

    Args:
        need: bytes.
        memory: GiB it may take; None for half of what is free.
        what: the bytes are for.
        instead: could be used.

    Raises:
        InvalidSetting: it needs more.
    """
    if memory is not None:
        limit, source = memory * _GIB, "memory"
    else:
        limit, source = psutil.virtual_memory().available / 2, "half of what is free"
    if need > limit:
        raise InvalidSetting(
            f"memory: this run needs about {need / _GIB:.3g} GiB for {what} and "
            f"{source} is {limit / _GIB:.3g} GiB; use {instead}, or raise memory"
        )


def read_device(text: str) -> torch.device:
    """The device of a name.

    Raises:
        InvalidSetting: it cannot be used here.
    """
    try:
        device = torch.device(text)
        torch.ones(1, device=device).item()  # also where memory could be had: meta computes nothing
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).split("\n")[0]
        raise InvalidSetting(f"device {text!r} cannot be used: {first}") from None
    return device
