"""What a run of virtual devices may be put under; on real ones, and by default, nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from schedules import Action, Schedule

from .loss_sink import End
from .transport.base import Transport

Do = Callable[[Action], None]
Compute = Callable[..., Any]  # of actions, a stage, a micro-batch and what was taken


class Condition:
    """Leaves a run as it is. Chosen when a pipeline is built; its methods wrap the parts of every run."""

    def arriving(self, parts: Sequence[Any]) -> Sequence[Any]:
        """The inputs or the targets of the micro-batches, which the caller has made and a worker takes."""
        return parts

    def end(self, end: End) -> End:
        """The far end."""
        return end

    def transport(self, inner: Transport, schedule: Schedule) -> Transport:
        """Return the transport of a step: ``inner``, or one that wraps it."""
        return inner

    def doing(self, do: Do, schedule: Schedule) -> Do:
        """What does one action, on the worker of its device."""
        return do

    def computing(self, compute: Compute) -> Compute:
        """What an action does between what it takes and what it sends."""
        return compute

    def begin(self, optimizers: Sequence[Optimizer | None]) -> None:
        """On the caller's thread, before the workers start."""
