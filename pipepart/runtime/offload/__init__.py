"""Offloads the tensors that a stage saves for its backward to host memory, until shortly before the backward."""

from .copy_queues import Copy, CopyQueue, copy_queues
from .saved_tensors import SavedTensors, storages_of

__all__ = ["Copy", "CopyQueue", "SavedTensors", "copy_queues", "storages_of"]
