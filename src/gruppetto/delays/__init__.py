"""How long things take. Pure: seconds and probabilities, seeds are arguments."""

from gruppetto.delays.distributions import (
    Bimodal,
    Constant,
    Exponential,
    Gamma,
    Lognormal,
    Pareto,
    ShiftedExponential,
    Uniform,
    Weibull,
)
from gruppetto.delays.empirical import Empirical
from gruppetto.delays.fitting import Candidate, Fit, fit
from gruppetto.delays.keyed import KeyedDelays, keyed_uniforms
from gruppetto.delays.law import DELAYS, Aging, Delay
from gruppetto.delays.order_statistics import (
    expected_order_statistic,
    expected_order_statistics,
    order_statistic_variance,
    order_statistic_variances,
)
from gruppetto.delays.regimes import Regimes

__all__ = [
    "DELAYS",
    "Aging",
    "Bimodal",
    "Candidate",
    "Constant",
    "Delay",
    "Empirical",
    "Exponential",
    "Fit",
    "Gamma",
    "KeyedDelays",
    "Lognormal",
    "Pareto",
    "Regimes",
    "ShiftedExponential",
    "Uniform",
    "Weibull",
    "expected_order_statistic",
    "expected_order_statistics",
    "fit",
    "keyed_uniforms",
    "order_statistic_variance",
    "order_statistic_variances",
]
