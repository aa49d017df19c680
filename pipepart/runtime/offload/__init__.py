"""Offloads the tensors that a stage saves for its backward to host memory, until shortly before the backward."""

from .copy_queues import Copy, CopyQueue, CpuCopyQueue, copy_queues
from .stage_offload import SavedTensors, StageOffload, check_no_hooks

__all__ = [
    "Copy",
    "CopyQueue",
    "CpuCopyQueue",
    "SavedTensors",
    "StageOffload",
    "check_no_hooks",
    "copy_queues",
]
