"""One process, many devices: runs a schedule, each device on a thread of its own."""

from .bridge import differentiable, gradients_kept
from .build import build_stages
from .compiled import CompileOptions
from .deferred_batch_norm import DeferredBatchNorm
from .ends import LossEnd, OutputEnd
from .engine import Engine
from .grouped_end import step_end
from .nan_guard import guard_stages
from .order import Orders
from .out_of_memory import frees_memory
from .run import Run
from .stage import Stage
from .stage_optimizers import OptimizerFactory, StageOptimizers, check_optimizer, refuse_asynchronous
from .streams import Streams, has_streams, on_streams
from .strict import MemoryUse
from .tracing import Recorder
from .virtual import conditions_of, memory_of
from .watchdog import check_timeout

__all__ = [
    "CompileOptions",
    "DeferredBatchNorm",
    "Engine",
    "LossEnd",
    "MemoryUse",
    "OptimizerFactory",
    "Orders",
    "OutputEnd",
    "Recorder",
    "Run",
    "Stage",
    "StageOptimizers",
    "Streams",
    "build_stages",
    "check_optimizer",
    "check_timeout",
    "conditions_of",
    "differentiable",
    "frees_memory",
    "gradients_kept",
    "guard_stages",
    "has_streams",
    "memory_of",
    "on_streams",
    "refuse_asynchronous",
    "step_end",
]
