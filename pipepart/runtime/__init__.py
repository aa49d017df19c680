"""One process, many devices: runs a schedule, each device on a thread of its own."""

from .bridge import differentiable
from .build import build_stages
from .deferred_batch_norm import DeferredBatchNorm
from .ends import LossEnd, OutputEnd
from .engine import Engine
from .order import Orders
from .run import Run
from .stage import Stage

__all__ = [
    "DeferredBatchNorm",
    "Engine",
    "LossEnd",
    "Orders",
    "OutputEnd",
    "Run",
    "Stage",
    "build_stages",
    "differentiable",
]
