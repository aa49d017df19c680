"""Weight stashing for asynchronous schedules: the backward of a micro-batch uses the weights of its forward.

::

    memory 1   w0 ── F(s, 0), F(s, 1) ── B(s, 0) ─────────────────────── B(s, 1) ── free for w2
    memory 2                                └─ OPT_STEP: w1, a copy that is stepped ── F(s, 2) ──▶

A parameter stays one tensor, with its hooks and its gradient. Its ``data`` is the memory of the version that an action
uses, and between actions that of the newest version. An optimizer step writes only memory that no micro-batch in flight
needs, so the tensors that autograd has saved do not change. The version counter belongs to the tensor and not to the
memory, so these steps are not counted until the run is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as not_counted
from torch.optim import Optimizer

from schedules import Schedule, older_versions


class Versions:
    """The weights of one stage in one run, whose optimizer is None if it has no parameters. Used by its worker only."""

    def __init__(self, schedule: Schedule, stage: int, optimizer: Optimizer | None) -> None:
        self._used_by = schedule.versions[stage]
        self._needed = older_versions(schedule, stage)
        self._optimizer = optimizer
        self._parameters = _trained(optimizer) if optimizer else ()
        self._homes = [parameter.data for parameter in self._parameters]
        self._newest = 0
        self._older: dict[int, Sequence[Tensor]] = {}
        self._free: list[Sequence[Tensor]] = []

    @contextmanager
    def used(self, micro_batch: int) -> Iterator[None]:
        """Set the parameters to the version of the micro-batch within the block."""
        older = self._older.get(self._used_by[micro_batch])
        if older is None:
            yield
            return
        newest = self._swap(older)
        try:
            yield
        finally:
            self._swap(newest)

    def step(self) -> None:
        """Make the next version with the current gradients, and clear them unless it is the last version."""
        if self._optimizer is None:
            return
        needed = self._needed[self._newest]
        for version in self._older.keys() - needed:
            self._free.append(self._older.pop(version))
        if self._newest in needed:
            self._older[self._newest] = self._swap(self._copy())
        with not_counted(self._parameters):
            self._optimizer.step()
        self._newest += 1
        if self._newest < len(self._needed):
            self._optimizer.zero_grad()

    def settle(self) -> None:
        """Copy the newest weights into the memory that the parameters had before the run."""
        with torch.no_grad():
            for parameter, home in zip(self._parameters, self._homes, strict=True):
                if parameter.data_ptr() != home.data_ptr():
                    home.copy_(parameter.data)
                    parameter.data = home
        if self._newest and self._parameters:
            torch.autograd.graph.increment_version(self._parameters)
        self._older.clear()
        self._free.clear()

    def _copy(self) -> Sequence[Tensor]:
        values = [parameter.data for parameter in self._parameters]
        if not self._free:
            return [tensor.clone() for tensor in values]
        copies = self._free.pop()
        for copy, tensor in zip(copies, values, strict=True):
            copy.copy_(tensor)
        return copies

    def _swap(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Set the parameters to other memory; return the previous memory."""
        before = [parameter.data for parameter in self._parameters]
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            parameter.data = tensor
        return before


def _trained(optimizer: Optimizer) -> tuple[nn.Parameter, ...]:
    return tuple(
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    )
