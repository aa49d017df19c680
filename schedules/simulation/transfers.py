"""The messages of a simulated step, computed on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from ..core.action import Kind
from ..core.dependencies import CODE, Dependencies
from ..core.transfer import Transfer

Messages = Callable[[], Iterable[tuple[int, int, float]]]
SentAndArrived = Callable[[], tuple[np.ndarray, np.ndarray]]  # seconds, one number per edge
_KINDS = tuple(CODE)
_make = partial(tuple.__new__, Transfer)  # what a Transfer(...) does, without its call into Python


class Transfers(Sequence[Transfer]):
    """The messages of a simulated step that take time, in the order in which they leave.

    They are made at the first access: a search simulates thousands of schedules and reads only the makespan.

    found: the edges.
    messages: gives the pairs of stages that send to each other, with the bytes of a message.
    sent_and_arrived: when the message of each edge left, and when it arrived.
    """

    def __init__(self, found: Dependencies, messages: Messages, sent_and_arrived: SentAndArrived) -> None:
        """Keep what the transfers are made of."""
        self._made_of = found, messages, sent_and_arrived

    def __getitem__(self, index: Any) -> Any:
        """Return one, or a slice of them."""
        return self._all[index]

    def __len__(self) -> int:
        """How many."""
        return len(self._all)

    def __eq__(self, other: object) -> bool:
        """Equal to any sequence of the same transfers."""
        return isinstance(other, Sequence) and self._all == tuple(other)

    def __hash__(self) -> int:
        """As of the tuple of them."""
        return hash(self._all)

    def __repr__(self) -> str:
        """As the tuple of them."""
        return repr(self._all)

    @cached_property
    def _all(self) -> tuple[Transfer, ...]:
        found, messages, sent_and_arrived = self._made_of
        return _transfers(found, messages, *sent_and_arrived())


def _transfers(
    found: Dependencies, messages: Messages, sent: np.ndarray, arrived: np.ndarray
) -> tuple[Transfer, ...]:
    slow = np.flatnonzero(arrived > sent)
    if not slow.size:
        return ()
    slow = slow[np.argsort(sent[slow], kind="stable")]
    source, target = found.source_stage[slow], found.target_stage[slow]
    forward = target > source
    # The leaf of the action that makes the message: the first, or the second of an overlapped pair.
    leaf = np.searchsorted(found.owner, found.source[slow])
    makes_output = found.is_kind(Kind.F, Kind.SEND_F)
    leaf += (found.stage[leaf] != source) | (makes_output[leaf] != forward)
    copies, copied = _host_copies(found, slow)
    leaf[copies] = copied
    size_of = {(one, other): size for one, other, size in messages()}
    ends = zip(np.minimum(source, target).tolist(), np.maximum(source, target).tolist(), strict=True)
    columns = (
        source,
        target,
        found.micro_batch[leaf],
        sent[slow],
        arrived[slow],
        np.array([size_of[pair] for pair in ends]),
    )
    kinds = np.where(forward, CODE[Kind.F], CODE[Kind.B])
    kinds[copies] = found.code[copied]
    kinds = map(_KINDS.__getitem__, kinds.tolist())
    return tuple(map(_make, zip(kinds, *(column.tolist() for column in columns), strict=True)))


def _host_copies(found: Dependencies, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which of the edges are copies between a device and its host, and the leaf of their OFFLOAD or RELOAD."""
    copies = np.flatnonzero(found.is_copy[edges])
    begins, waits = (
        np.searchsorted(found.owner, ends[edges[copies]]) for ends in (found.source, found.target)
    )
    return copies, np.where(found.is_kind(Kind.RELOAD)[begins], begins, waits)
