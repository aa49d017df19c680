"""Parallelism inside a stage: FSDP2 and tensor parallelism that the user's function applies to the layers of a rank."""

from .parallelize import parallelize_layers
from .refusals import check_parallelize, check_parallelize_given
from .shards import StageShards

__all__ = ["StageShards", "check_parallelize", "check_parallelize_given", "parallelize_layers"]
