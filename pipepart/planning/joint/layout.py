"""Layout: where the stages begin, their devices and modes, and the rule that orders their operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from schedules.searching.dispatching import Rule
from schedules.searching.problem import Problem, Row

from ..costs.stage_memory import Mode


@dataclass(frozen=True, slots=True)
class Layout:
    """A cut with a placement, and a rule for the order.

    Attributes:
        borders: the first layer of each stage but the first.
        devices: of each stage, the index of its device in the cluster.
        whole: of each stage, whether its backward runs as a whole, not in two parts.
        modes: of each stage, what it does with its stash.
        rule: of the order.
    """

    borders: tuple[int, ...]
    devices: tuple[int, ...]
    whole: tuple[bool, ...]
    modes: tuple[Mode, ...]
    rule: Rule = field(default_factory=Rule)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.devices)

    def joined(self, at: int, gone: int) -> Layout:
        """Return the layout with stages ``at`` and ``at + 1`` as one, without device and modes of stage ``gone``."""
        return Layout(
            (*self.borders[:at], *self.borders[at + 1 :]),
            (*self.devices[:gone], *self.devices[gone + 1 :]),
            (*self.whole[:gone], *self.whole[gone + 1 :]),
            (*self.modes[:gone], *self.modes[gone + 1 :]),
            self.rule,
        )


@dataclass(frozen=True, slots=True)
class OrderedLayout:
    """A layout with the order of its operations.

    Attributes:
        layout: the cut and the placement.
        problem: its operations.
        rows: the operations of each device of the cluster, in order.
        seconds: of the step.
        score: what annealing minimises; see :attr:`schedules.searching.dispatching.Dispatched.score`.
        ends: of each device, when it is done.
    """

    layout: Layout
    problem: Problem
    rows: Sequence[Row]
    seconds: float
    score: float
    ends: Sequence[float]
