"""Sums the gradients of a stage over replicas of the model on other ranks.

The gradients go through host memory in buckets, by torch.distributed's all-reduce. The sum includes what was in the
``grad`` of the first replica before the step. With three replicas or more it is rounded in another order than that of
replicas in one process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedules import Kind

from ...dtensors import local
from ...input_error import InputTypeError
from ...ranks import Ranks
from ..state.shared_parameters import SharedParameters

_BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel
_AHEAD = 2  # buckets that are on their way at a time


class Reductions:
    """The connections between the replicas of the stages of one rank.

    Args:
        groups: by worker, the ranks that have its stages, one in each replica.
    """

    def __init__(self, ranks: Ranks, replica: int, groups: Mapping[int, dist.ProcessGroup]) -> None:
        self._ranks = ranks
        self._is_first = replica == 0
        self._groups = groups

    def entered(self) -> AbstractContextManager[object]:
        """Return the context manager that a worker enters around its actions of a step."""
        return nullcontext()

    def around(self, kind: Kind, run: Any, compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return the computation of a kind of action of a stage, as a stage runs it whose layers send by themselves."""
        return compute

    def begin(self, shared: SharedParameters) -> None:
        """Before a step: further replicas begin from no gradients, as those of earlier steps count once."""
        self._clear(shared.own_parameters())

    def add_up(self, worker: int, shared: SharedParameters) -> None:
        """Give the parameters of a stage the sum of their gradients over all replicas; called on its worker."""
        self._sum(worker, shared.own_parameters())

    def _clear(self, parameters: Sequence[nn.Parameter]) -> None:
        if not self._is_first:
            for parameter in parameters:
                parameter.grad = None

    def _sum(self, worker: int, parameters: Sequence[nn.Parameter]) -> None:
        group = self._groups[worker]
        has_gradient = torch.tensor(
            [parameter.grad is not None for parameter in parameters], dtype=torch.uint8
        )
        on_their_way: deque[tuple[dist.Work, Tensor, Sequence[nn.Parameter]]] = deque()
        try:
            dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=group)
            trained = [each for each, has in zip(parameters, has_gradient.tolist(), strict=True) if has]
            for bucket in _buckets(trained):
                flat = _packed(bucket)
                work = dist.all_reduce(flat, group=group, async_op=True)
                assert work is not None
                on_their_way.append((work, flat, bucket))
                if len(on_their_way) == _AHEAD:
                    _finish(*on_their_way.popleft())
            while on_their_way:
                _finish(*on_their_way.popleft())
        except RuntimeError as error:
            raise self._ranks.lost(error) from None


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one type, so many that they fill a bucket."""
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        bucket: list[nn.Parameter] = []
        for parameter in parameters:
            if parameter.dtype is dtype:
                bucket.append(parameter)
                if sum(local(each).nbytes for each in bucket) >= _BUCKET_BYTES:
                    yield bucket
                    bucket = []
        if bucket:
            yield bucket


@torch.no_grad()
def _packed(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the gradients in one row on the host."""
    # Minus zero changes nothing that it is added to, not even another minus zero.
    flat = torch.full((sum(local(each).numel() for each in parameters),), -0.0, dtype=parameters[0].dtype)
    for parameter, row in zip(parameters, _rows(flat, parameters), strict=True):
        if (gradient := parameter.grad) is not None:
            if gradient.layout is not torch.strided:
                raise InputTypeError(
                    f"the gradient of a parameter {list(parameter.shape)} is sparse, and those of several ranks are "
                    "added up dense: use sparse=False, or plan with replicas=1"
                )
            row.view(local(parameter).shape).copy_(local(gradient))
    return flat


@torch.no_grad()
def _finish(work: dist.Work, flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Wait for the sums of a bucket, and write them into the gradients of its parameters."""
    work.wait()
    for parameter, row in zip(parameters, _rows(flat, parameters), strict=True):
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        local(parameter.grad).copy_(row.view(local(parameter).shape))


def _rows(flat: Tensor, parameters: Sequence[nn.Parameter]) -> Sequence[Tensor]:
    return flat.split([local(parameter).numel() for parameter in parameters])
