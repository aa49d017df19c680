"""Layout: borders, devices and modes of the stages, and the rule that orders their operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from schedules.searching.dispatching import Rule, score
from schedules.searching.problem import Problem, Row

from ...graph_partition.device_orders import DeviceType
from ..costs.stage_memory import Mode


@dataclass(frozen=True, slots=True)
class Layout:
    """A cut with a placement, and a dispatching rule.

    Attributes:
        borders: [stages - 1]: first layer of each stage from the second on.
        devices: [stages]: index of the device in the cluster.
        whole: [stages]: True if backwards run whole, not as I and W.
        modes: [stages]: how the stage stores its stash.
        rule: priority rule of the dispatcher.
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
        """Merge stages ``at`` and ``at + 1``; drop the device and modes of stage ``gone``, which is one of the two."""
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
        done: [devices]: seconds at which each device ends its last operation; 0 for a device without operations.
    """

    layout: Layout
    problem: Problem
    rows: Sequence[Row]
    done: Sequence[float]

    @property
    def seconds(self) -> float:
        """The duration of the step."""
        return max(self.done)

    @property
    def score(self) -> float:
        """The objective of the annealing; see :func:`schedules.searching.dispatching.score`."""
        return score(self.done)


def first_devices(devices: Sequence[int], types: Sequence[DeviceType]) -> dict[int, int]:
    """Return a permutation of interchangeable devices after which earlier stages are on earlier devices.

    Args:
        devices: [stages]: the device of each stage, by its position in the cluster.
        types: of all devices.
    """
    permutation: dict[int, int] = {}
    for kind in types:
        used = [device for device in dict.fromkeys(devices) if device in kind.devices]
        unused = [device for device in kind.devices if device not in used]
        permutation |= zip([*used, *unused], kind.devices, strict=True)
    return permutation
