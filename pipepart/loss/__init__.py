"""The loss of a step: which losses are supported, and how the losses of micro-batches are combined."""

from .auxiliary import Added, AddedLosses, add_loss, added_so_far, collect_losses, collecting, losses_of_stage
from .contract import MiniBatchLoss
from .reduction import Reduction, StepLoss, declared_reduction
from .returned import LossError, check_gradient, check_scalar, sum_of, value_of
from .terms import MicroBatchLoss, without_slack

__all__ = [
    "Added",
    "AddedLosses",
    "LossError",
    "MicroBatchLoss",
    "MiniBatchLoss",
    "Reduction",
    "StepLoss",
    "add_loss",
    "added_so_far",
    "check_gradient",
    "check_scalar",
    "collect_losses",
    "collecting",
    "declared_reduction",
    "losses_of_stage",
    "sum_of",
    "value_of",
    "without_slack",
]
