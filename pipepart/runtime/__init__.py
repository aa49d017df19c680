"""One process, many devices: runs a schedule, each device on a thread of its own."""

from .bridge import differentiable
from .build import build_stages
from .ends import LossEnd, OutputEnd
from .engine import Engine
from .loss import LossWeights, Reduction, declared_reduction
from .loss_check import check_loss_is_scalar
from .run import Run
from .stage import Stage

__all__ = [
    "Engine",
    "LossEnd",
    "LossWeights",
    "OutputEnd",
    "Reduction",
    "Run",
    "Stage",
    "build_stages",
    "check_loss_is_scalar",
    "declared_reduction",
    "differentiable",
]
