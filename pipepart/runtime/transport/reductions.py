"""Sums the gradients of a stage over replicas of the model on other ranks.

::

    replica 0   .grad ── bucket ──▶ part 0 of all replicas ── added in their order ──┐
    replica 1   .grad ── bucket ──▶ part 1 of all replicas ── added in their order ──┤ all parts ──▶ .grad of all
                                    each rank adds one part                          ┘

The sums are those of replicas in one process: those of the first replica with what was in ``grad`` before the step,
then those of each further one, which begin from nothing. Each rank sends and receives as much as in a ring all-reduce,
whose order of additions is another one for each part.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...input_error import InputTypeError
from ...ranks import Ranks, waits_in_torch

_BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel
_AHEAD = 2  # buckets that are on their way at a time

Wait = Callable[[int], Any]  # for the bucket of a number


class Reductions:
    """The connections between the replicas of the stages of one rank.

    Args:
        ranks: the processes.
        replica: of this rank.
        groups: by worker, the ranks that have its stages, one in each replica.
    """

    def __init__(self, ranks: Ranks, replica: int, groups: Mapping[int, dist.ProcessGroup]) -> None:
        self._ranks = ranks
        self._is_first = replica == 0
        self._groups = groups
        self._jobs: dict[int, SimpleQueue[Callable[[], None] | None]] = {
            worker: SimpleQueue() for worker in groups
        }
        for worker, jobs in self._jobs.items():
            Thread(target=_run, args=(jobs,), name=f"pipepart-reductions-{worker}", daemon=True).start()
        weakref.finalize(self, _end, list(self._jobs.values())).atexit = False

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Before a step: further replicas begin from no gradients, as those of earlier steps count once."""
        if not self._is_first:
            for parameter in parameters:
                parameter.grad = None

    def add_up(
        self,
        worker: int,
        parameters: Sequence[nn.Parameter],
        arrived: Callable[[int], None],
        wait: Wait,
        fail: Callable[[BaseException], None],
    ) -> None:
        """Give the parameters of a stage the sum of their gradients over all replicas; called on its worker.

        Args:
            worker: of the stage.
            parameters: those of the stage that are trained, the same in each replica.
            arrived: called on another thread, with the number of a bucket that is added up.
            wait: waits for that.
            fail: ends the step.

        Raises:
            TypeError: a gradient is sparse.
        """
        group, replicas = self._groups[worker], dist.get_world_size(self._groups[worker])

        def submit(number: int, collective: Callable[[], Any]) -> None:
            def run() -> None:
                try:
                    collective()
                except BaseException as error:
                    fail(self._ranks.lost(error))
                else:
                    arrived(number)

            self._jobs[worker].put(run)

        has = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        anywhere = torch.zeros(replicas, len(has), dtype=torch.uint8)
        submit(0, lambda: dist.all_gather(list(anywhere.unbind()), has, group=group))
        given: Tensor | None = None
        on_their_way: deque[tuple[int, Sequence[int], Tensor]] = deque()
        buckets = enumerate(_buckets(parameters), 1)
        while True:
            for number, places in buckets:
                flat = _packed([parameters[place] for place in places], replicas)
                submit(number, lambda flat=flat: _add_up(flat, replicas, group))
                on_their_way.append((number, places, flat))
                if len(on_their_way) == _AHEAD:
                    break
            if given is None:
                wait(0)
                given = anywhere.amax(0)
            if not on_their_way:
                return
            number, places, flat = on_their_way.popleft()
            wait(number)
            _unpack(flat, [parameters[place] for place in places], [bool(given[place]) for place in places])


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[int]]:
    """Yield the places of parameters of one type, of so many that they fill a bucket."""
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        found, size = [], 0
        for place, parameter in enumerate(parameters):
            if parameter.dtype is dtype:
                found.append(place)
                size += parameter.nbytes
                if size >= _BUCKET_BYTES:
                    yield found
                    found, size = [], 0
        if found:
            yield found


@torch.no_grad()
def _packed(parameters: Sequence[nn.Parameter], replicas: int) -> Tensor:
    """Return the gradients in one row on the host, of as many equal parts as there are replicas."""
    size = sum(parameter.numel() for parameter in parameters)
    # Minus zero changes nothing that it is added to, not even another minus zero.
    flat = torch.full((-(-size // replicas) * replicas,), -0.0, dtype=parameters[0].dtype)
    start = 0
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            if gradient.layout is not torch.strided:
                raise InputTypeError(
                    f"the gradient of a parameter {list(parameter.shape)} is sparse, and those of several ranks are "
                    "added up dense: use sparse=False, or plan with replicas=1"
                )
            flat[start : start + parameter.numel()].view(parameter.shape).copy_(gradient)
        start += parameter.numel()
    return flat


@torch.no_grad()
def _unpack(flat: Tensor, parameters: Sequence[nn.Parameter], given: Sequence[bool]) -> None:
    """Write the sums into the gradients of the parameters that have one on any replica."""
    start = 0
    for parameter, has in zip(parameters, given, strict=True):
        if has:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(flat[start : start + parameter.numel()].view(parameter.shape))
        start += parameter.numel()


def _add_up(flat: Tensor, replicas: int, group: dist.ProcessGroup) -> None:
    """Replace a row by its sum over the ranks of the group, in their order."""
    parts = torch.empty_like(flat)
    dist.all_to_all_single(parts.view(torch.uint8), flat.view(torch.uint8), group=group)
    first, *others = parts.view(replicas, -1).unbind()
    for other in others:
        first.add_(other)
    sums = list(flat.view(torch.uint8).view(replicas, -1).unbind())
    dist.all_gather(sums, first.view(torch.uint8), group=group)


def _run(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        with waits_in_torch():
            job()
        del job


def _end(queues: Sequence[SimpleQueue[Any]]) -> None:
    for queue in queues:
        queue.put(None)
