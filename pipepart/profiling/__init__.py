"""From a model and a sample to a profile: what each layer costs in time and memory."""

from .profile_document import Costs, LayerCost, Profile, SavedTensor, Timing
from .profiler import profile

__all__ = ["Costs", "LayerCost", "Profile", "SavedTensor", "Timing", "profile"]
