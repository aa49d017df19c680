"""What a loss is to a pipeline: a scalar, put together from micro-batches to be that of the mini-batch."""

from .parts import LossParts, StepLoss
from .reduction import Reduction, declared_reduction
from .scalar import check_loss_is_scalar, check_scalar, scalar_of, value_of

__all__ = [
    "LossParts",
    "Reduction",
    "StepLoss",
    "check_loss_is_scalar",
    "check_scalar",
    "declared_reduction",
    "scalar_of",
    "value_of",
]
