"""Rules of later papers: step sizes that follow staleness, or how far the weights have moved.

They share the contract of :mod:`gruppetto.staleness.modulation`. ``normalise=true`` is offered
where a paper's weights are relative; where a proof rests on an upper bound of the rate, dividing
by a mean would undo it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gruppetto.errors import InvalidSetting
from gruppetto.staleness.modulation import MODULATIONS, ApplyTo, Modulation, Situation

__all__ = [
    "AnnealedPower",
    "DelayAdaptive",
    "Distance",
    "Exponential",
    "InverseSqrt",
    "Polynomial",
    "Threshold",
]


@MODULATIONS.register("distance")
@dataclass(frozen=True)
class Distance(Modulation):
    """min{C / ‖w − w_past‖², α₀} per gradient: what counts is how far the weights have moved.

    The squared L2 norm is over all trained parameters, w_past are the weights the gradient was
    computed on, and at distance 0 the rate is α₀, the optimizer's (a schedule's current one, of
    the first parameter group). Source: Dutta, Joshi, Ghosh, Dube, Nagpurkar, "Slow and Stale
    Gradients Can Win the Race", AISTATS 2018, eq. 13, where α₀ is η_max and C = 0.005·η_max. C is
    in units of rate times squared weights and grows with the model.

    >>> rule = Distance(c=0.001)
    >>> [rule.factor_at_distance(d, rate=0.1) for d in (0.0, 0.01, 0.04)]
    [1.0, 1.0, 0.25]
    """

    #: C, > 0.
    c: float
    apply_to: ApplyTo = "learning-rate"

    def __post_init__(self) -> None:
        _positive("distance", "c", self.c)

    def factor(self, at: Situation) -> None:
        return None

    def factor_at_distance(self, squared_distance: float, rate: float) -> float:
        product = rate * squared_distance
        return 1.0 if product <= self.c else self.c / product

    @property
    def needs_distance(self) -> bool:
        return True


@MODULATIONS.register("delay-adaptive")
@dataclass(frozen=True)
class DelayAdaptive(Modulation):
    """α₀·P / max(P, σ) per gradient: full up to staleness P, the number of live learners.

    Source: Mishchenko, Bach, Even, Woodworth, "Asynchronous SGD Beats Minibatch SGD Under
    Arbitrary Delays", NeurIPS 2022.

    >>> [DelayAdaptive().factor(Situation(s, num_live=4)) for s in (0, 4, 8)]
    [1.0, 1.0, 0.5]
    """

    apply_to: ApplyTo = "learning-rate"

    def factor(self, at: Situation) -> float:
        return at.num_live / max(at.num_live, at.staleness)


@MODULATIONS.register("threshold")
@dataclass(frozen=True)
class Threshold(Modulation):
    """α₀ up to staleness τ_C; above it min(α₀, 1/(4Lσ)), or nothing at all (scale=0).

    τ_C is the concurrency, gradients being computed at once: P, the number of live learners,
    unless limit= says otherwise. L, the smoothness, is rarely known: scale is 1/(4L·α₀), so that
    the factor is min(1, scale/σ). Source: Koloskova, Stich, Jaggi, "Sharper Convergence
    Guarantees for Asynchronous SGD", NeurIPS 2022, which allows any rate below that bound and so
    also to drop the gradient.

    >>> [Threshold().factor(Situation(s, num_live=4)) for s in (4, 5)]
    [1.0, 0.0]
    >>> [Threshold(scale=2.0, limit=4).factor(Situation(s)) for s in (1, 4, 8)]
    [1.0, 1.0, 0.25]
    """

    #: 1/(4L·α₀), >= 0.
    scale: float = 0.0
    #: τ_C, >= 0; None for P.
    limit: int | None = None
    apply_to: ApplyTo = "learning-rate"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale >= 0):
            raise InvalidSetting(
                f"threshold: expected scale >= 0 and finite, got scale={self.scale}"
            )
        if self.limit is not None and self.limit < 0:
            raise InvalidSetting(f"threshold: expected limit >= 0, got limit={self.limit}")

    def factor(self, at: Situation) -> float:
        limit = at.num_live if self.limit is None else self.limit
        return 1.0 if at.staleness <= limit else min(1.0, self.scale / at.staleness)


@MODULATIONS.register("inverse-sqrt")
@dataclass(frozen=True)
class InverseSqrt(Modulation):
    """α₀ / √(1 + σ) per gradient, FedBuff's down-weighting.

    Source: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS
    2022.

    >>> [InverseSqrt().factor(Situation(s)) for s in (0, 3, 8)]
    [1.0, 0.5, 0.3333333333333333]
    """

    apply_to: ApplyTo = "learning-rate"
    normalise: bool = False

    def factor(self, at: Situation) -> float:
        return 1.0 / math.sqrt(1.0 + at.staleness)


@MODULATIONS.register("polynomial")
@dataclass(frozen=True)
class Polynomial(Modulation):
    """α₀·(1 + σ)^−a per gradient, FedAsync's polynomial weight.

    Source: Xie, Koyejo, Gupta, "Asynchronous Federated Optimization", 2019, arXiv:1903.03934.

    >>> [Polynomial(a=2.0).factor(Situation(s)) for s in (0, 1, 3)]
    [1.0, 0.25, 0.0625]
    """

    #: a, >= 0.
    a: float = 0.5
    apply_to: ApplyTo = "learning-rate"
    normalise: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.a) and self.a >= 0):
            raise InvalidSetting(f"polynomial: expected a >= 0 and finite, got a={self.a}")

    def factor(self, at: Situation) -> float:
        return float((1.0 + at.staleness) ** -self.a)


@MODULATIONS.register("exponential")
@dataclass(frozen=True)
class Exponential(Modulation):
    """α₀·β^σ per gradient: the fastest to forget.

    The exponential penalty of Chan and Lane, 2014, as Zhang et al. (IJCAI 2016) tell of it; with
    staleness in the hundreds it leaves nothing.

    >>> [Exponential(beta=0.5).factor(Situation(s)) for s in (0, 1, 3)]
    [1.0, 0.5, 0.125]
    """

    #: β, in (0, 1].
    beta: float
    apply_to: ApplyTo = "learning-rate"
    normalise: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.beta <= 1.0:
            raise InvalidSetting(f"exponential: expected 0 < beta <= 1, got beta={self.beta}")

    def factor(self, at: Situation) -> float:
        return float(self.beta**at.staleness)


@MODULATIONS.register("annealed-power")
@dataclass(frozen=True)
class AnnealedPower(Modulation):
    """α₀ / max(1, σ)^p with p falling from 1 to 0 over so many updates: careful only at first.

    p = 1 − min(v / updates, 1) at version v of the server, so the run starts as `inverse` and ends
    as `none`. Source: Yang, Zhang, Li, Ré, Aberger, De Sa, "PipeMare", MLSys 2021 (its technique
    1, for the fixed delays of a pipeline).

    >>> rule = AnnealedPower(updates=100)
    >>> [rule.factor(Situation(4, version=v)) for v in (0, 50, 100, 200)]
    [0.25, 0.5, 1.0, 1.0]
    """

    #: Updates until p is 0, >= 1.
    updates: int
    apply_to: ApplyTo = "learning-rate"

    def __post_init__(self) -> None:
        if self.updates < 1:
            raise InvalidSetting(
                f"annealed-power: expected updates >= 1, got updates={self.updates}"
            )

    def factor(self, at: Situation) -> float:
        power = 1.0 - min(at.version / self.updates, 1.0)
        return float(max(1, at.staleness) ** -power)


def _positive(rule: str, key: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InvalidSetting(f"{rule}: expected {key} > 0 and finite, got {key}={value}")
