"""Start layouts of the joint search: balanced cuts, the layouts of plans, and every layout of a small model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

import schedules
from schedules import Kind
from schedules.searching.playing import fits, last_ends, play
from schedules.searching.problem import Row

from ...graph_partition.device_orders import device_types
from ..costs.stage_memory import Mode
from ..partition.local_search import proportional_borders
from ..plans.plan import Plan
from ..search.parts import Part
from .layout import Layout, OrderedLayout, first_devices
from .pricing import Pricing

_MOST_CHUNKS = 8


def ordered_layout_of(plan: Plan, part: Part, pricing: Pricing) -> OrderedLayout | None:
    """Return the layout of a plan, with the plan's order; None if that does not fit with copies as they are priced."""
    position = {device.name: index for index, device in enumerate(part.groups.cluster.devices)}
    homes = [position[stage.device] for stage in plan.stages]
    order = schedules.split_overlaps(plan.first_replica.build_schedule())
    parted = {action.stage for row in order.actions for action in row if action.kind is Kind.I}
    layout = Layout(
        tuple(np.cumsum([len(stage.layers) for stage in plan.stages])[:-1].tolist()),
        tuple(homes),
        tuple(stage not in parted for stage in range(len(homes))),
        tuple(stage.mode for stage in plan.stages),
    )
    problem = pricing.problem(layout)
    rows: list[Row] = [[] for _ in position]
    for row, operations in enumerate(problem.rows_of(order)):
        rows[homes[order.stages_of(row)[0]]] = operations
    ends = play(problem, rows)
    if ends is None or not fits(problem, rows, ends):
        return None
    return OrderedLayout(layout, problem, rows, last_ends(rows, ends))


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
