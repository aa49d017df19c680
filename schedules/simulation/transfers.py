"""Makes the list of messages of a simulated step."""

from __future__ import annotations

from functools import partial

import numpy as np

from ..core.action import Kind
from ..core.dependencies import CODE, Dependencies
from ..core.transfer import Transfer
from .play import Played
from .ports import Journeys

_KINDS = tuple(CODE)
_make = partial(tuple.__new__, Transfer)  # what a Transfer(...) does, without its call into Python


def transfers(graph: Dependencies, played: Played, travels: Journeys) -> tuple[Transfer, ...]:
    """Return the messages of a simulated step that take time, in the order in which they leave."""
    left, arrived = np.array(played.left), np.array(played.arrived)
    slow = np.flatnonzero(arrived > left)
    if not slow.size:
        return ()
    slow = slow[np.argsort(left[slow], kind="stable")]
    source, target = graph.source_stage[slow], graph.target_stage[slow]
    kinds = np.where(target > source, CODE[Kind.F], CODE[Kind.B])
    # A copy is called after its OFFLOAD or RELOAD, which is the later or the earlier action of its edge.
    for ends, kind in ((graph.target[slow], Kind.OFFLOAD), (graph.source[slow], Kind.RELOAD)):
        kinds[graph.is_copy[slow] & (graph.code[ends] == CODE[kind])] = CODE[kind]
    pairs = zip(np.minimum(source, target).tolist(), np.maximum(source, target).tolist(), strict=True)
    columns = (
        map(_KINDS.__getitem__, kinds.tolist()),
        source.tolist(),
        target.tolist(),
        graph.micro_batch[graph.source[slow]].tolist(),
        left[slow].tolist(),
        arrived[slow].tolist(),
        map(travels.sizes.__getitem__, pairs),
    )
    return tuple(map(_make, zip(*columns, strict=True)))
