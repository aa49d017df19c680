"""RankStatus: what one rank is doing now, and the TimeoutError built from the statuses of all ranks."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple


class RankStatus(NamedTuple):
    """The activity of a rank.

    Attributes:
        idle: seconds since it last began or ended anything.
        lines: in words, one a device.
        notes: stacks of what runs there.
    """

    idle: float
    lines: list[str]
    notes: list[str]


def timeout_error(
    timeout: float, size: int, statuses: Mapping[int, RankStatus], left: Container[int]
) -> TimeoutError:
    """Return the TimeoutError that lists which rank waits for which.

    Args:
        timeout: seconds in which nothing has happened.
        size: the number of ranks.
        statuses: of the ranks that answer.
        left: ranks that have closed the pipeline.
    """
    lines = [f"nothing has happened on any rank for {timeout:g} s, the timeout:"]
    for rank in range(size):
        if rank in statuses:
            lines += [f"  rank {rank}: {line}" for line in statuses[rank].lines]
        elif rank in left:
            lines.append(f"  rank {rank} has closed the pipeline")
        else:
            lines.append(
                f"  rank {rank} does not answer: its process is stopped, code in it keeps Python's lock (GIL), or "
                "it has not made this pipeline"
            )
    error = TimeoutError("\n".join(lines))
    for rank, status in sorted(statuses.items()):
        for note in status.notes:
            error.add_note(f"pipepart: on rank {rank}, {note}")
    return error
