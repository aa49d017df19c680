"""Layout: where the stages begin, their devices and modes, and the rule that orders their operations."""

from __future__ import annotations

from dataclasses import dataclass

from ..costs.stage_memory import Recompute


@dataclass(frozen=True, slots=True)
class Rule:
    """How the dispatcher ranks operations; see :func:`schedules.searching.dispatching.steady_keys`."""

    spread: float = 2.0
    spread_back: float = 2.0
    weight_gap: float = 0.0


@dataclass(frozen=True, slots=True)
class Layout:
    """A cut with a placement, and a rule for the order.

    Attributes:
        borders: the first layer of each stage but the first.
        devices: of each stage, the index of its device in the cluster.
        fused: of each stage, whether its backward runs as a whole.
        modes: of each stage, its recompute mode.
        rule: of the order.
    """

    borders: tuple[int, ...]
    devices: tuple[int, ...]
    fused: tuple[bool, ...]
    modes: tuple[Recompute, ...]
    rule: Rule = Rule()

    @property
    def stages(self) -> int:
        """How many stages."""
        return len(self.devices)

    def joined(self, at: int, gone: int) -> Layout:
        """Return the layout with stages ``at`` and ``at + 1`` as one, without device and modes of stage ``gone``."""
        return Layout(
            (*self.borders[:at], *self.borders[at + 1 :]),
            (*self.devices[:gone], *self.devices[gone + 1 :]),
            (*self.fused[:gone], *self.fused[gone + 1 :]),
            (*self.modes[:gone], *self.modes[gone + 1 :]),
            self.rule,
        )
