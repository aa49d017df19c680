"""Starts of the joint search: balanced cuts on looped and wave placements, and the stages of given plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..costs.stage_memory import MODES, Recompute
from ..plans.plan import Plan
from .layout import Layout
from .pricing import Pricing
from .request import JointRequest

_MOST_CHUNKS = 8


def layout_of(plan: Plan, request: JointRequest) -> Layout:
    """Return the stages of a plan where they are, with backwards in two parts."""
    position = {device.name: index for index, device in enumerate(request.groups.cluster.devices)}
    borders = np.cumsum([len(stage.layers) for stage in plan.stages])[:-1].tolist()
    stages = len(plan.stages)
    return Layout(
        tuple(borders),
        tuple(position[stage.device] for stage in plan.stages),
        (False,) * stages,
        tuple(stage.recompute for stage in plan.stages),
    )


def balanced_layouts(request: JointRequest, pricing: Pricing) -> Iterator[Layout]:
    """Yield cuts into stages of nearly equal seconds: for several numbers a device, on a loop and on a wave.

    A stage on a slow device is smaller. Devices whose speeds differ are taken the fastest first.
    """
    borders = request.costs.allowed_borders
    order = sorted(range(pricing.devices), key=lambda device: -pricing.speeds[device])
    order = list(range(pricing.devices)) if len(set(pricing.speeds)) == 1 else order
    fixed = request.fixed_stages
    most = min(request.chunks or _MOST_CHUNKS, len(borders) + 1)
    numbers = (
        [fixed] if fixed else sorted({pricing.devices * v for v in range(1, most + 1)} | {len(borders) + 1})
    )
    for stages in numbers:
        if stages > len(borders) + 1 or stages > pricing.devices * most:
            continue
        for wave in (False, True):
            if wave and stages <= pricing.devices:
                continue
            devices = [order[_row(stage, pricing.devices, wave)] for stage in range(stages)]
            for mode in MODES[request.asked.recompute][:: 2 if pricing.limited else 3]:
                yield _balanced(request, pricing, borders, devices, mode)


def every_placement(request: JointRequest, pricing: Pricing, most: int) -> list[Layout] | None:
    """Return the finest cut on every placement, the one with the smallest bound first; None if there are too many.

    A coarser cut is no faster if actions take no longer than their layers: its actions can follow each other in the
    finest cut, too. Otherwise each placement comes with neighbouring stages joined, as well. Of placements that differ
    by an exchange of equal devices there is one.
    """
    borders = tuple(request.costs.allowed_borders.tolist())
    fixed = request.fixed_stages
    stages = len(borders) + 1
    if fixed is not None and fixed != stages:
        return None
    placements = _placements(stages, pricing.device_kinds(), most)
    if placements is None:
        return None
    ends = (*borders, pricing.layers)
    modes = MODES[request.asked.recompute]
    found = [
        Layout(
            borders,
            homes,
            (False,) * stages,
            tuple(mode if pricing.trains(end) else "never" for end in ends),
        )
        for homes in placements
        for mode in modes[:: 2 if pricing.limited else 3]
    ]
    if pricing.actions_cost:  # then fewer stages may be faster
        found += [_with_few_stages(layout) for layout in found]
    return sorted(found, key=pricing.bound)


def _with_few_stages(layout: Layout) -> Layout:
    """Join neighbouring stages of one device."""
    at = 0
    while at + 1 < layout.stages:
        if layout.devices[at] == layout.devices[at + 1]:
            layout = layout.joined(at, at)
        else:
            at += 1
    return layout


def _placements(stages: int, kinds: Sequence[int], most: int) -> list[tuple[int, ...]] | None:
    """Return every placement of stages on devices, once for all that differ by an exchange of equal devices.

    The stages are placed one after the other, so the work grows with the number of placements, not with
    ``devices ** stages``.

    Args:
        stages: their number.
        kinds: of each device; equal numbers for devices that are alike.
        most: placements; None is returned if there are more.
    """
    # A device may be taken once the device before it of the same kind has a stage.
    before = [
        max((at for at in range(device) if kinds[at] == kind), default=-1)
        for device, kind in enumerate(kinds)
    ]
    placed: list[tuple[int, ...]] = [()]
    for _ in range(stages):
        if len(placed) > most:
            return None
        placed = [
            (*homes, device)
            for homes in placed
            for device in range(len(kinds))
            if before[device] < 0 or before[device] in homes
        ]
    return placed if len(placed) <= most else None


def _row(stage: int, devices: int, wave: bool) -> int:
    turn, at = divmod(stage, devices)
    return devices - 1 - at if wave and turn % 2 else at


def _balanced(
    request: JointRequest, pricing: Pricing, allowed: np.ndarray, devices: Sequence[int], mode: Recompute
) -> Layout:
    """The cut whose stages have seconds in proportion to the speeds of their devices, as nearly as borders allow."""
    sums, stages = request.costs.compute_sums, len(devices)
    shares = np.cumsum([pricing.speeds[device] for device in devices])
    targets = sums[-1] * shares[:-1] / shares[-1]
    at = np.searchsorted(sums[allowed], targets)
    before = np.clip(at - 1, 0, len(allowed) - 1)
    at = np.clip(at, 0, len(allowed) - 1)
    nearer = np.abs(sums[allowed[before]] - targets) < np.abs(sums[allowed[at]] - targets)
    chosen = np.where(nearer, before, at)
    # Borders differ: push those that coincide apart, from both ends.
    index = np.arange(stages - 1)
    chosen = np.maximum.accumulate(chosen - index) + index
    most = len(allowed) - 1 - index[::-1]
    chosen = np.minimum(chosen, most)
    chosen = np.maximum(chosen, index)
    borders = tuple(allowed[chosen].tolist())
    ends = (*borders, pricing.layers)
    return Layout(
        borders,
        tuple(devices),
        (False,) * stages,
        tuple(mode if pricing.trains(end) else "never" for end in ends),
    )
