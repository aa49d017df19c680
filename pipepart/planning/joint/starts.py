"""Start layouts of the joint search: balanced cuts, the layouts of plans, and every layout of a small model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from ...graph_partition.device_orders import device_types
from ..costs.stage_memory import Mode
from ..partition.local_search import proportional_borders
from ..plans.plan import Plan
from ..search.parts import Part
from .layout import Layout, first_devices
from .pricing import Pricing

_MOST_CHUNKS = 8


def layout_of(plan: Plan, part: Part) -> Layout:
    """Return the layout of a plan, with separate I and W."""
    position = {device.name: index for index, device in enumerate(part.groups.cluster.devices)}
    borders = np.cumsum([len(stage.layers) for stage in plan.stages])[:-1].tolist()
    return Layout(
        tuple(borders),
        tuple(position[stage.device] for stage in plan.stages),
        (False,) * len(plan.stages),
        tuple(stage.mode for stage in plan.stages),
    )


def balanced_layouts(part: Part, pricing: Pricing) -> Iterator[Layout]:
    """Yield balanced layouts with different numbers of stages per device, on looped and wave placements.

    The compute of a stage is proportional to the speed of its device. Faster devices have earlier stages.
    """
    borders = part.costs.allowed_borders
    devices = sorted(range(pricing.devices), key=lambda device: -pricing.speeds[device])
    fixed = part.fixed_stages
    most = min(part.request.chunks or _MOST_CHUNKS, len(borders) + 1)
    numbers = (
        [fixed] if fixed else sorted({pricing.devices * v for v in range(1, most + 1)} | {len(borders) + 1})
    )
    for stages in numbers:
        if stages > len(borders) + 1 or stages > pricing.devices * most:
            continue
        for wave in (False, True):
            if wave and stages <= pricing.devices:
                continue
            homes = [devices[_position(stage, pricing.devices, wave)] for stage in range(stages)]
            speeds = [pricing.speeds[device] for device in homes]
            cut = proportional_borders(part.costs.compute_sums, borders, speeds).tolist()
            for mode in _modes(part, pricing):
                yield _layout(pricing, cut, homes, mode)


def every_layout(part: Part, pricing: Pricing, most: float) -> list[Layout]:
    """Return every cut on every placement; no layouts if there are more than ``most``.

    Layouts that differ only by a permutation of interchangeable devices are listed once.
    """
    borders, modes = part.costs.allowed_borders.tolist(), _modes(part, pricing)
    if pricing.devices ** (len(borders) + 1) * len(modes) > most:
        return []
    types, layouts = device_types(part.groups.cluster), []
    for homes in product(range(pricing.devices), repeat=len(borders) + 1):
        names = first_devices(homes, types)
        if all(names[home] == home for home in homes):
            ends = [at for at in range(len(borders)) if homes[at] != homes[at + 1]]
            cut, devices = [borders[at] for at in ends], [homes[at] for at in (*ends, -1)]
            layouts += [_layout(pricing, cut, devices, mode) for mode in modes]
    return layouts


def _modes(part: Part, pricing: Pricing) -> list[Mode]:
    """Return the modes to start with, each for all stages: only the fastest mode if memory is not limited."""
    if not pricing.limited:
        return [part.modes[0]]
    return [mode for mode in part.modes if mode != "except-last"] or [*part.modes]


def _layout(pricing: Pricing, borders: Sequence[int], devices: Sequence[int], mode: Mode) -> Layout:
    ends = (*borders, pricing.layers)
    modes: tuple[Mode, ...] = tuple(mode if pricing.trains(end) else "never" for end in ends)
    return Layout(tuple(borders), tuple(devices), (False,) * len(devices), modes)


def _position(stage: int, devices: int, wave: bool) -> int:
    turn, at = divmod(stage, devices)
    return devices - 1 - at if wave and turn % 2 else at
