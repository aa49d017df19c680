"""Puts the tensors of a model on the devices of its stages: moves them there, or computes or reads them there."""

from .initial_values import InitialValues
from .moving import move

__all__ = ["InitialValues", "move"]
