"""What a late gradient is worth. Pure: numbers in, numbers out."""

from gruppetto.staleness.modulation import (
    MODULATIONS,
    Inverse,
    InverseMean,
    Modulation,
    NoModulation,
)
from gruppetto.staleness.statistics import StalenessStatistics

__all__ = [
    "MODULATIONS",
    "Inverse",
    "InverseMean",
    "Modulation",
    "NoModulation",
    "StalenessStatistics",
]
