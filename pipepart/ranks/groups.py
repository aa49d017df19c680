"""Makes the process groups of a pipeline, groups of ranks and one for each pair that sends messages, and ends them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .watch import break_connections

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
    """Make a group for each edge, and send a first message along it; return those that ``rank`` is in.

    All ranks call this. In each round a rank is in one edge at most, so that all connect in the same order.
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


class Groups:
    """The process groups in which a pipeline waits. A failure of a rank ends all of these waits."""

    def __init__(self) -> None:
        self._own: list[dist.ProcessGroup] = []
        self._lasting: list[dist.ProcessGroup] = []  # not ended with the pipeline
        self._before: set[dist.ProcessGroup] | None = None  # those that were there when adopting began

    def add(self, groups: Iterable[dist.ProcessGroup], lasting: bool = False) -> None:
        """Add groups; ``lasting`` ones can be used after the pipeline is closed."""
        (self._lasting if lasting else self._own).extend(groups)

    @contextmanager
    def adopting(self) -> Iterator[None]:
        """Add groups that anybody makes within the block, as lasting ones."""
        self._before = set(_all_groups())
        try:
            yield
        finally:
            self.add(self._adopted(), lasting=True)
            self._before = None

    def break_connections(self) -> None:
        """End all waits in the groups."""
        for group in (*self._own, *self._lasting, *self._adopted()):
            break_connections(group)

    def destroy(self) -> None:
        """End the gloo threads and connections of each group that does not last."""
        for group in self._own:
            with suppress(ValueError):  # the script has destroyed all groups
                dist.destroy_process_group(group)

    def _adopted(self) -> list[dist.ProcessGroup]:
        before = self._before
        return [] if before is None else [group for group in _all_groups() if group not in before]


def _all_groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)
