"""Broadcasts tensors, and nests of tensors, from one rank to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..autograd import graph_cut
from ..capture import Recording
from ..ranks import RankError, Ranks, attempt
from ..runtime.transport.wire import buffers_for, pack, unpack

_PART_BYTES = 25 * 2**20


def broadcast_result(
    ranks: Ranks, source: int, make: Callable[[], Any], recording: Recording | None = None
) -> Any:
    """Return the nest that ``make`` makes on one rank, such as the output of the last stage, on every rank.

    Args:
        recording: that live values belong to, if it is them that ``make`` makes.

    Raises:
        Exception: what ``make`` raises, on that rank; a RankError on the others.
    """

    def packed() -> tuple[Any, Any]:
        value = make()
        return value, pack(graph_cut.move(value, torch.device("cpu")))

    is_source = ranks.rank == source
    result, failure, why = attempt(packed) if is_source else (None, None, "")
    content, (form, buffers) = result or (None, (None, []))
    form, why = ranks.gather((form, why))[source]
    if failure is not None:
        raise failure
    if why:
        raise RankError(f"rank {source} failed: {why}")
    if not is_source:
        buffers = buffers_for(form)
    for buffer in buffers:
        if buffer.numel():
            ranks.broadcast(buffer, source)
    return content if is_source else unpack(form, buffers, recording)


def broadcast_tensors(
    ranks: Ranks, tensors: Iterable[Tensor], source: int, group: dist.ProcessGroup | None = None
) -> None:
    """Copy tensors from one rank to the others of a group, several small ones at a time."""
    part: list[Tensor] = []
    for tensor in tensors:
        if sum(member.nbytes for member in part) + tensor.nbytes > _PART_BYTES:
            _broadcast_part(ranks, part, source, group)
            part = []
        part.append(tensor.detach())
    _broadcast_part(ranks, part, source, group)


@torch.no_grad()
def _broadcast_part(
    ranks: Ranks, tensors: Sequence[Tensor], source: int, group: dist.ProcessGroup | None
) -> None:
    if not tensors:
        return
    is_source = ranks.rank == source
    sizes = [tensor.nbytes for tensor in tensors]
    sent = (
        torch.cat([_bytes(each) for each in tensors])
        if is_source
        else torch.empty(sum(sizes), dtype=torch.uint8)
    )
    ranks.broadcast(sent, source, group)
    for tensor, row in zip(tensors, sent.split(sizes), strict=True):
        # A graph that waits for its backward may have saved the tensor: equal values are not written again.
        if not is_source and not tensor.is_meta and not row.equal(_bytes(tensor)):
            tensor.copy_(row.clone().view(tensor.dtype).view(tensor.shape))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)
