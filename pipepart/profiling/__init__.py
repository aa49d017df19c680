"""Measures what each layer of a model costs in time and memory; the result is a Profile."""

from .costs import Costs, LayerCost, SavedTensor, Timing
from .profile_document import Profile
from .profiler import profile

__all__ = ["Costs", "LayerCost", "Profile", "SavedTensor", "Timing", "profile"]
