"""What a loss is to a pipeline: a scalar, put together from micro-batches to be that of the mini-batch."""

from .auxiliary import Added, add_loss, added_so_far, collect_losses, collecting, losses_of_stage
from .parts import LossParts, StepLoss
from .reduction import Reduction, declared_reduction
from .scalar import check_loss_is_scalar, check_scalar, scalar_of, value_of

__all__ = [
    "Added",
    "LossParts",
    "Reduction",
    "StepLoss",
    "add_loss",
    "added_so_far",
    "check_loss_is_scalar",
    "check_scalar",
    "collect_losses",
    "collecting",
    "declared_reduction",
    "losses_of_stage",
    "scalar_of",
    "value_of",
]
