"""Checkpoints that are written atomically, and can be loaded with any cut and any number of processes."""

from .loading import Loaded, load
from .manifest import CheckpointError
from .saving import save

__all__ = ["CheckpointError", "Loaded", "load", "save"]
