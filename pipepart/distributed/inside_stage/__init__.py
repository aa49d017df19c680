"""Parallelism inside a stage: FSDP2 and tensor parallelism that the user's function applies to the layers of a rank."""

from .parallelize import Parallelize, check_parallelize, parallelize_layers
from .shards import StageShards

__all__ = ["Parallelize", "StageShards", "check_parallelize", "parallelize_layers"]
