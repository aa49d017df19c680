"""Puts the tensors of a model on the devices of its stages: moves them there, or computes or reads them there."""

from .initial_values import InitialValues
from .moving import move
from .places import Places
from .releasing import release

__all__ = ["InitialValues", "Places", "move", "release"]
