"""Copies a mini-batch from pinned memory to accelerators, on a separate stream per device.

The copies for a step run while the devices still compute the step before::

    copy stream        copy ──▶ event
    caller's stream               └─▶ waits, as do the workers' streams, which wait for the caller's
    caller's thread    queue the copies ──▶ queue the step ──▶ wait for the copies, and return
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from schedules import Kind, Schedule

from ...autograd import graph_cut
from ...autograd.own_copy import tensors
from ...data.split import MicroBatches
from ...workers.streams import Wait, has_streams, on_streams, recorded, sleeping_event, waits


class PinnedCopies:
    """The copies from the caller's pinned memory to the devices of the workers of this process, ``local``.

    Used by the caller's thread.
    """

    def __init__(self, homes: Sequence[torch.device], local: Sequence[int]) -> None:
        self._homes = {row: homes[row] for row in local if has_streams(homes[row])}
        self._streams = {home: torch.Stream(home) for home in dict.fromkeys(self._homes.values())}
        self._events: list[torch.Event | torch.cuda.Event] = []

    def inputs(self, schedule: Schedule, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return the inputs of the micro-batches, with copies in place of pinned tensors."""
        return self._copied(schedule, inputs, lambda stage: schedule.previous_stage(stage) is None)

    def with_targets(self, schedule: Schedule, batch: MicroBatches, at_once: bool) -> MicroBatches:
        """Return a mini-batch with its targets on the devices of the loss, if they are in pinned memory.

        ``at_once`` says whether the loss is computed for the whole mini-batch at once, after the last micro-batch.
        """
        targets = [batch.target] if at_once else batch.targets
        copied = list(self._copied(schedule, targets, lambda stage: schedule.next_stage(stage) is None))
        return batch._replace(target=copied[0]) if at_once else batch._replace(targets=copied)

    def wait(self) -> None:
        """Wait until the caller may write its pinned memory again."""
        events, self._events = self._events, []
        for event in events:
            waits.host_wait(Wait.HOST_BEHIND_PINNED, event)

    def _copied(
        self, schedule: Schedule, nests: Sequence[Any], reads: Callable[[int], bool]
    ) -> Sequence[Any]:
        """Copy the pinned tensors of each nest to the device of the stage that reads it, if that is in this process."""
        if not self._homes or not any(tensor.is_pinned() for nest in nests for tensor in tensors(nest)):
            return nests
        readers = {
            (action.micro_batch or 0) % len(nests): home
            for row, home in self._homes.items()
            for action in schedule.actions[row]
            if action.kind is Kind.F and reads(action.stage)
        }
        copied = list(nests)
        for place, home in readers.items():
            pinned = [tensor for tensor in tensors(nests[place]) if tensor.is_pinned()]
            with on_streams([self._streams[home]]):
                moved = graph_cut.move(pinned, home, wait=False)
            by_id = {id(old): new for old, new in zip(pinned, moved, strict=True)}
            copied[place] = pytree.tree_map_only(
                Tensor, lambda tensor, by_id=by_id: by_id.get(id(tensor), tensor), nests[place]
            )
            for tensor in moved:  # it is allocated on the copy stream, and freed behind the step
                waits.hold(Wait.HELD_FOR_STEP, tensor, torch.accelerator.current_stream(home))
        for home in dict.fromkeys(readers.values()):
            stream = self._streams[home]
            self._events.append(sleeping_event(stream))
            waits.wait(Wait.CALLER_BEHIND_PINNED, torch.accelerator.current_stream(home), recorded(stream))
        return copied
