"""What a late gradient is worth. Pure: numbers in, numbers out."""

from gruppetto.staleness.compensation import (
    COMPENSATIONS,
    AdaptiveDelayCompensation,
    Compensation,
    DelayCompensation,
    GapAware,
    NoCompensation,
)
from gruppetto.staleness.modulation import (
    MODULATIONS,
    Factors,
    Inverse,
    InverseMean,
    Modulation,
    NoModulation,
    Situation,
)
from gruppetto.staleness.rules import (
    AnnealedPower,
    DelayAdaptive,
    Distance,
    Exponential,
    InverseSqrt,
    Polynomial,
    Threshold,
)
from gruppetto.staleness.scaling import (
    BATCH_SCALINGS,
    RATE_SCALINGS,
    BatchScaling,
    ProductBatch,
    RateScaling,
    SqrtBatch,
)
from gruppetto.staleness.statistics import StalenessStatistics

__all__ = [
    "BATCH_SCALINGS",
    "COMPENSATIONS",
    "MODULATIONS",
    "RATE_SCALINGS",
    "AdaptiveDelayCompensation",
    "AnnealedPower",
    "BatchScaling",
    "Compensation",
    "DelayAdaptive",
    "DelayCompensation",
    "Distance",
    "Exponential",
    "Factors",
    "GapAware",
    "Inverse",
    "InverseMean",
    "InverseSqrt",
    "Modulation",
    "NoCompensation",
    "NoModulation",
    "Polynomial",
    "ProductBatch",
    "RateScaling",
    "Situation",
    "SqrtBatch",
    "StalenessStatistics",
    "Threshold",
]
