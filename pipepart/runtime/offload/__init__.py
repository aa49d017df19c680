"""Offloads the tensors that a stage saves for its backward to host memory, until shortly before the backward."""

from .copy_queues import CopyQueue, copy_queues
from .stage_offload import SavedTensors, StageOffload, check_no_hooks

__all__ = ["CopyQueue", "SavedTensors", "StageOffload", "check_no_hooks", "copy_queues"]
