"""Puts the tensors of a model on the devices of its stages: moved, initialized, or read from files."""

from .initial_values import InitialValues
from .initialization import Initialize
from .moving import Places, move, release

__all__ = ["InitialValues", "Initialize", "Places", "move", "release"]
