"""Runs a schedule in one process, with one worker thread per device."""

from .build import build_stages, guard_stages
from .compiled import CompileOptions
from .differentiable import differentiable, gradients_kept
from .emulation import MemoryUse, emulation_of, memory_of
from .engine import Engine
from .failure.out_of_memory import frees_memory
from .failure.stalled import check_timeout
from .loss_sink import MicroBatchLossSink, OutputSink, make_loss_sink
from .observe.recorder import Recorder
from .order import Orders
from .stage import Stage
from .state.batch_norm import DeferredBatchNorm
from .state.optimizers import OptimizerFactory, StageOptimizers
from .step import Step
from .step_gradients import StepGradients, scaled
from .transport.cuda import Streams

__all__ = [
    "CompileOptions",
    "DeferredBatchNorm",
    "Engine",
    "MemoryUse",
    "MicroBatchLossSink",
    "OptimizerFactory",
    "Orders",
    "OutputSink",
    "Recorder",
    "Stage",
    "StageOptimizers",
    "Step",
    "StepGradients",
    "Streams",
    "build_stages",
    "check_timeout",
    "differentiable",
    "emulation_of",
    "frees_memory",
    "gradients_kept",
    "guard_stages",
    "make_loss_sink",
    "memory_of",
    "scaled",
]
