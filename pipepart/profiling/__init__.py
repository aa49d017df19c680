"""Measures or estimates what each layer of a model costs in time and memory; the result is a Profile."""

from .costs import Costs, LayerCost, LiveValue, Overhead, SavedTensor, Timing
from .inside_stage import Parallelize
from .profile_document import Profile
from .profiler import profile
from .roofline import Roofline

__all__ = [
    "Costs",
    "LayerCost",
    "LiveValue",
    "Overhead",
    "Parallelize",
    "Profile",
    "Roofline",
    "SavedTensor",
    "Timing",
    "profile",
]
