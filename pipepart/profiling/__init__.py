"""Measures or estimates what each layer of a model costs in time and memory; the result is a Profile."""

from .analytic.calibration import calibrate
from .analytic.roofline import Roofline
from .costs import Costs, LayerCost, SavedTensor, SkippingValue, Timing
from .profile_document import Profile
from .profiler import profile

__all__ = [
    "Costs",
    "LayerCost",
    "Profile",
    "Roofline",
    "SavedTensor",
    "SkippingValue",
    "Timing",
    "calibrate",
    "profile",
]
