"""Checkpoints that are complete or not there, and that load into any layout."""

from .background import Saving, finish
from .loading import Loaded, load
from .manifest import CheckpointError
from .saving import save

__all__ = ["CheckpointError", "Loaded", "Saving", "finish", "load", "save"]
