"""How long things take. Pure: seconds and probabilities, seeds are arguments."""

from gruppetto.delays.distributions import (
    DELAYS,
    Bimodal,
    Constant,
    Delay,
    Exponential,
    Gamma,
    Lognormal,
    Pareto,
    ShiftedExponential,
    Uniform,
    Weibull,
)
from gruppetto.delays.keyed import KeyedDelays, keyed_uniforms

__all__ = [
    "DELAYS",
    "Bimodal",
    "Constant",
    "Delay",
    "Exponential",
    "Gamma",
    "KeyedDelays",
    "Lognormal",
    "Pareto",
    "ShiftedExponential",
    "Uniform",
    "Weibull",
    "keyed_uniforms",
]
