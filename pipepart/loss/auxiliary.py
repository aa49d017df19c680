"""Auxiliary losses, which layers inside a model add to its final loss."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .reduction import Reduction
from .returned import check_scalar


class Added(NamedTuple):
    """A loss added by a layer: a scalar, and the reduction over micro-batches."""

    loss: Tensor
    reduction: Reduction


class AddedLosses:
    """Context manager that collects the losses added by layers in this thread, in order."""

    def __init__(self, must_have_graph: bool = False) -> None:
        self.found: list[Added] = []
        self.must_have_graph = must_have_graph
        self._before: AddedLosses | None = None

    def __enter__(self) -> AddedLosses:
        self._before, _here.losses = _here.losses, self
        return self

    def __exit__(self, *raised: object) -> None:
        _here.losses = self._before

    def taken(self) -> Sequence[Added]:
        """Return the losses added since the last call."""
        if not self.found:
            return ()
        losses, self.found = self.found, []
        return losses

    def total(self) -> Tensor:
        """Return the differentiable sum of the added losses; zero if there are none."""
        if not self.found:
            return torch.zeros(())
        home = self.found[0].loss.device
        return torch.stack([added.loss.to(home) for added in self.found]).sum()


class _Here(threading.local):
    losses: AddedLosses | None = None


_here = _Here()


def add_loss(loss: Tensor, *, reduction: Literal["mean", "sum"] = "mean") -> None:
    """Add a loss to the loss of the step. Call it in the forward of a layer.

    A pipeline adds up what each micro-batch adds, whatever the stage: its gradient starts there. Anywhere else the
    losses are for :func:`collect_losses`, and without it nothing happens.

    Args:
        loss: a scalar.
        reduction: ``"mean"`` for a mean over the samples at hand, which weighs as much as there are;
            ``"sum"`` for what adds up as it is.

    Raises:
        ValueError: ``loss`` is no scalar tensor, or the reduction is unknown.
        RuntimeError: gradients are disabled where the layer calls it, so that the loss would count without one.
    """
    kind = Reduction(reduction)
    check_scalar(loss, "what add_loss is given")
    losses = _here.losses
    if losses is None:
        return
    if losses.must_have_graph and not torch.is_grad_enabled():
        raise RuntimeError(
            "add_loss was called with gradients disabled, so that the loss would have none: call it outside of "
            "torch.no_grad(), and outside of torch.utils.checkpoint or with use_reentrant=False"
        )
    losses.found.append(Added(loss, kind))


def collect_losses() -> AddedLosses:
    """Collect the losses added by layers within the block, in a plain model or in a pipeline called like a model.

    ::

        with pipepart.collect_losses() as extra:
            output = model(x)
            loss = loss_fn(output, y) + extra.total()
    """
    return AddedLosses()


def losses_of_stage() -> AddedLosses:
    """Collect the losses added by the layers of a stage. With gradients enabled, they must have a graph."""
    return AddedLosses(must_have_graph=torch.is_grad_enabled())


def added_so_far() -> int:
    """Return the number of losses added in the innermost `collect_losses` block of this thread."""
    return len(_here.losses.found) if _here.losses else 0


def collecting() -> bool:
    """Return True if a `collect_losses` block is active in this thread."""
    return _here.losses is not None
