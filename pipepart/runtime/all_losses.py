"""Where copies of the model train side by side, the wait of one for the losses of the others.

The weight of a loss that comes as a sum and a count may hang on the counts of all micro-batches. A copy whose own are
known before its first backward waits for those of copies on other devices; it cannot hold them up, as they need nothing
of it. One whose own are not known is told so by the end.
"""

from __future__ import annotations

from collections import Counter

from schedules import Kind, Schedule

from .transport.base import Transport

_ALL = -1  # in the place of a micro-batch


class AllLosses:
    """What the last stages of all copies tell each other in one run; each is called by its own worker."""

    def __init__(self, schedule: Schedule, transport: Transport) -> None:
        self._transport = transport
        last = range(schedule.model_stages - 1, schedule.stages, schedule.model_stages)
        leaves = (leaf for row in schedule.actions for action in row for leaf in action.leaves)
        self._missing = Counter(leaf.stage for leaf in leaves if leaf.kind is Kind.F and leaf.stage in last)
        homes = {
            stage: set(schedule.device_of[stage - schedule.model_stages + 1 : stage + 1])
            for stage in self._missing
        }
        self._others = {
            stage: [other for other in homes if homes[other].isdisjoint(homes[stage])] for stage in homes
        }

    def computed(self, stage: int) -> None:
        """A last stage has one more of its losses; with the last it tells the others."""
        self._missing[stage] -= 1
        if self._missing[stage] == 0:
            for other in self._others[stage]:
                self._transport.send(stage, other, (Kind.F, stage, _ALL), None)

    def wait(self, stage: int) -> None:
        """Waits for the losses of the others, if the stage has its own.

        Raises:
            Stopped: the run has failed elsewhere.
        """
        if self._missing[stage] <= 0:
            while self._others[stage]:
                self._transport.recv(stage, (Kind.F, self._others[stage].pop(), _ALL))
