"""What a late gradient is worth. Pure: numbers in, numbers out."""

from gruppetto.staleness.modulation import (
    MODULATIONS,
    Inverse,
    InverseMean,
    Modulation,
    NoModulation,
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
    "MODULATIONS",
    "RATE_SCALINGS",
    "BatchScaling",
    "Inverse",
    "InverseMean",
    "Modulation",
    "NoModulation",
    "ProductBatch",
    "RateScaling",
    "SqrtBatch",
    "StalenessStatistics",
]
