"""What a loss is to a pipeline: a scalar, a mean or a sum over samples, put together from micro-batches."""

from .reduction import Reduction, declared_reduction
from .scalar import check_loss_is_scalar, check_scalar
from .weights import LossWeights

__all__ = ["LossWeights", "Reduction", "check_loss_is_scalar", "check_scalar", "declared_reduction"]
