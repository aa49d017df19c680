"""Measures or estimates what each layer of a model costs in time and memory; the result is a Profile."""

from .analytic.roofline import Roofline
from .costs import Costs, LayerCost, LiveValue, Overhead, SavedTensor, Timing
from .profile_document import Profile
from .profiler import profile

__all__ = [
    "Costs",
    "LayerCost",
    "LiveValue",
    "Overhead",
    "Profile",
    "Roofline",
    "SavedTensor",
    "Timing",
    "profile",
]
