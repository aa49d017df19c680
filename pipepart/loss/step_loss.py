"""The loss function of a pipeline, with its declared reduction and results cached from earlier steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from ..data.split import MicroBatches
from .function_key import FunctionKey
from .reduction import Reduction, declared_reduction, is_torchs_own
from .returned import LossError, title
from .shared import Shared, form_of_batch
from .terms import Targets

_MOST_FORMS = 64  # of mini-batches whose loss is known


class StepLoss:
    """The loss function of a pipeline.

    Args:
        loss_fn: the loss, which returns a scalar tensor or ``(sum, count)``; None where the model computes it.
        reduction: how losses of micro-batches make up that of the mini-batch; None to see it.

    Raises:
        LossError: the loss states that it does not reduce, or another reduction than is declared.
    """

    def __init__(self, loss_fn: Callable[..., Any] | None, reduction: Reduction | None = None) -> None:
        stated = declared_reduction(loss_fn)
        self.function = loss_fn
        self.reduction = reduction
        self.torchs_own = is_torchs_own(loss_fn)
        self._shared: dict[Hashable, tuple[Shared, FunctionKey]] = {}
        # Such as class weights: behind each replica of the model there are copies of them.
        self.has_buffers = isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.buffers())
        if self.torchs_own and reduction not in (None, Reduction.BATCH, stated):
            raise LossError(
                f"{title(loss_fn)} has reduction={stated!s}, and reduction={reduction!s} is declared"
            )
        if loss_fn is None and reduction is Reduction.BATCH:
            raise LossError(
                "reduction='batch' needs a loss_fn: a model that computes its own loss sees one micro-batch. Compute "
                "it beside the model, from its output, and do not pass the model what makes it compute one (labels)"
            )

    def shared(self, batch: MicroBatches, targets: Targets, key: FunctionKey | None) -> Shared:
        """Return the state that micro-batches share, from earlier steps if the function and the shapes are the same."""
        form = None if key is None else form_of_batch(batch, targets)
        if key is None or form is None:
            return Shared(batch, targets)
        known = self._shared.get((key.tokens, form))
        if known is None:
            if len(self._shared) == _MOST_FORMS:
                self._shared.pop(next(iter(self._shared)))
            known = self._shared[key.tokens, form] = Shared(batch, targets), key
        return known[0]
