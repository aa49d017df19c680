"""What the ranks of a pipeline do, and the error for ranks that wait for each other in vain."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple


class Doing(NamedTuple):
    """What a rank does.

    Attributes:
        idle: seconds since it last began or ended anything.
        lines: in words, one a device.
        notes: stacks of what runs there.
    """

    idle: float
    lines: list[str]
    notes: list[str]


def waits_in_vain(
    timeout: float, size: int, found: Mapping[int, Doing], left: Container[int]
) -> TimeoutError:
    """Return the error that says who waits for whom.

    Args:
        timeout: seconds in which nothing has happened.
        size: the number of ranks.
        found: what the ranks do, of those that answer.
        left: ranks that have closed the pipeline.
    """
    lines = [f"nothing has happened on any rank for {timeout:g} s, the timeout:"]
    notes: list[str] = []
    for rank in range(size):
        if rank in found:
            lines += [f"  rank {rank}: {line}" for line in found[rank].lines]
            notes += [f"pipepart: on rank {rank}, {note}" for note in found[rank].notes]
        elif rank in left:
            lines.append(f"  rank {rank} has closed the pipeline")
        elif rank and 0 not in found:
            lines.append(f"  rank {rank} was not asked, as that needs rank 0")
        else:
            lines.append(
                f"  rank {rank} does not answer: its process is stopped, or code in it keeps Python's lock (GIL)"
            )
    error = TimeoutError("\n".join(lines))
    for note in notes:
        error.add_note(note)
    return error
