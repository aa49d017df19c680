"""Measures or estimates what each layer of a model costs in time and memory; the result is a Profile."""

from .calibration import calibrate
from .costs import Costs, LayerCost, SavedTensor, SkippingValue, Timing
from .profile_document import Profile
from .profiler import profile
from .roofline import Roofline

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
