"""Parallelism inside a stage: FSDP2 and tensor parallelism that the user's function applies to the layers of a rank."""

from .parallelize import Parallelize, check_parallelize, parallelize_layers
from .recorded import HooksBefore, check_functions
from .shards import StageShards

__all__ = [
    "HooksBefore",
    "Parallelize",
    "StageShards",
    "check_functions",
    "check_parallelize",
    "parallelize_layers",
]
