"""The methods of decoupled backpropagation, one file each behind one interface."""

from gruppetto.decoupled.methods.base import METHODS, Decoupled, Keeps, Method, Waiting
from gruppetto.decoupled.methods.bp import Backpropagation
from gruppetto.decoupled.methods.ddg import DelayedGradients
from gruppetto.decoupled.methods.fdg import FullyDecoupled
from gruppetto.decoupled.methods.fr import FeaturesReplay

__all__ = [
    "METHODS",
    "Backpropagation",
    "Decoupled",
    "DelayedGradients",
    "FeaturesReplay",
    "FullyDecoupled",
    "Keeps",
    "Method",
    "Waiting",
]
