"""Parallelism inside a stage: FSDP2 and tensor parallelism that the user's function applies to the layers of a rank."""

from .parallelize import parallelize_layers
from .refusals import check_function, check_parallelize
from .shards import StageShards

__all__ = ["StageShards", "check_function", "check_parallelize", "parallelize_layers"]
