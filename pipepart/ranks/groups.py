"""Makes the process groups of a pipeline: groups of ranks, and one for each pair that sends messages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_LONGEST = timedelta(days=30)  # PeerWatch finds lost ranks, not the timeout of a group

Edge = tuple[int, int]  # the rank that sends, and the one that receives


def own_group(rank: int, rows: Sequence[Sequence[int]], backend: str = "gloo") -> dist.ProcessGroup:
    """Make a group for each row of ranks, and return the group of ``rank``. All ranks call this."""
    groups = [dist.new_group(list(row), backend=backend, timeout=_LONGEST) for row in rows]
    group_here: Any = next(group for group, row in zip(groups, rows, strict=True) if rank in row)
    return group_here


def groups_of_pairs(
    rank: int, rounds: Sequence[Sequence[Edge]], backend: str, device: torch.device
) -> dict[Edge, dist.ProcessGroup]:
    """Make a group for each edge, and send a first message along it. All ranks call this.

    Args:
        rank: of this process.
        rounds: edges; in each round a rank is in one at most, so that all ranks connect in the same order.
        backend: of the groups.
        device: of this rank's messages.

    Returns:
        The groups of the edges that ``rank`` is in.
    """
    edges = [edge for edges in rounds for edge in edges]
    groups: dict[Edge, Any] = {}
    for edge in edges:
        group = dist.new_group(list(edge), backend=backend, timeout=_LONGEST)
        if rank in edge:
            groups[edge] = group
    first = torch.zeros(1, dtype=torch.uint8, device=device)
    for (sender, _), group in groups.items():
        move = group.send if sender == rank else group.recv
        move([first], 1 - group.rank(), 0).wait()
    first.cpu()  # waits for the device
    return groups


def destroy(groups: Sequence[dist.ProcessGroup]) -> None:
    """End the gloo threads and connections of each group."""
    for group in groups:
        with suppress(ValueError):  # the script has destroyed all groups
            dist.destroy_process_group(group)
