"""Checkpoints that are written atomically, and can be loaded with any cut and any number of processes."""

from .background import Saving, finish
from .loading import Loaded, load
from .manifest import CheckpointError
from .saving import save

__all__ = ["CheckpointError", "Loaded", "Saving", "finish", "load", "save"]
