"""Starts of the joint search: balanced cuts on looped and wave placements, and the stages of given plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from ..costs.stage_memory import Mode
from ..plans.plan import Plan
from .layout import Layout
from .pricing import Pricing
from .request import JointRequest

_MOST_CHUNKS = 8


def layout_of(plan: Plan, request: JointRequest) -> Layout:
    """Return the stages of a plan where they are, with backwards in two parts."""
    position = {device.name: index for index, device in enumerate(request.groups.cluster.devices)}
    borders = np.cumsum([len(stage.layers) for stage in plan.stages])[:-1].tolist()
    return Layout(
        tuple(borders),
        tuple(position[stage.device] for stage in plan.stages),
        (False,) * len(plan.stages),
        tuple(stage.mode for stage in plan.stages),
    )


def balanced_layouts(request: JointRequest, pricing: Pricing) -> Iterator[Layout]:
    """Yield cuts into stages of nearly equal seconds: for several numbers a device, on a loop and on a wave.

    A stage on a slow device is smaller. Devices whose speeds differ are taken the fastest first.
    """
    borders = request.costs.allowed_borders
    devices = sorted(range(pricing.devices), key=lambda device: -pricing.speeds[device])
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
            homes = [devices[_position(stage, pricing.devices, wave)] for stage in range(stages)]
            for mode in _modes(request, pricing):
                yield _layout(pricing, _balanced_borders(request, pricing, borders, homes), homes, mode)


def every_placement(request: JointRequest, pricing: Pricing, most: int) -> list[Layout] | None:
    """Return every placement of single layers, neighbours on a device joined; None if there are more than ``most``.

    The layout with the smallest bound comes first. Of placements that differ by an exchange of equal devices there is
    one.
    """
    borders = request.costs.allowed_borders.tolist()
    layers = len(borders) + 1
    if request.fixed_stages not in (None, layers):
        return None
    placements = _placements(layers, pricing.device_kinds(), most)
    if placements is None:
        return None
    layouts = []
    for homes in placements:
        ends = [
            at for at in range(layers - 1) if request.fixed_stages or homes[at] != homes[at + 1]
        ]  # layers before a border
        cut, devices = [borders[at] for at in ends], [homes[at] for at in (*ends, layers - 1)]
        layouts += [_layout(pricing, cut, devices, mode) for mode in _modes(request, pricing)]
    return layouts


def _modes(request: JointRequest, pricing: Pricing) -> list[Mode]:
    """Return the modes of starts, each for all stages: the fastest alone if memory is plenty."""
    if not pricing.limited:
        return [request.modes[0]]
    return [mode for mode in request.modes if mode != "except-last"] or [*request.modes]


def _layout(pricing: Pricing, borders: Sequence[int], devices: Sequence[int], mode: Mode) -> Layout:
    ends = (*borders, pricing.layers)
    modes: tuple[Mode, ...] = tuple(mode if pricing.trains(end) else "never" for end in ends)
    return Layout(tuple(borders), tuple(devices), (False,) * len(devices), modes)


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
    before, last = [], {}
    for device, kind in enumerate(kinds):
        before.append(last.get(kind, -1))
        last[kind] = device
    placed: list[tuple[int, ...]] = [()]
    for _ in range(stages):
        longer = (
            (*homes, device)
            for homes in placed
            for device in range(len(kinds))
            if before[device] < 0 or before[device] in homes
        )
        placed = list(islice(longer, most + 1))
        if len(placed) > most:
            return None
    return placed


def _position(stage: int, devices: int, wave: bool) -> int:
    turn, at = divmod(stage, devices)
    return devices - 1 - at if wave and turn % 2 else at


def _balanced_borders(
    request: JointRequest, pricing: Pricing, allowed: np.ndarray, devices: Sequence[int]
) -> list[int]:
    """Return borders whose stages have seconds in proportion to the speeds of their devices, as nearly as allowed."""
    sums = request.costs.compute_sums
    shares = np.cumsum([pricing.speeds[device] for device in devices])
    targets = sums[-1] * shares[:-1] / shares[-1]
    at = np.searchsorted(sums[allowed], targets)
    before = np.clip(at - 1, 0, len(allowed) - 1)
    at = np.clip(at, 0, len(allowed) - 1)
    nearer = np.abs(sums[allowed[before]] - targets) < np.abs(sums[allowed[at]] - targets)
    chosen = np.where(nearer, before, at)
    # Borders differ: push those that coincide apart, from both ends.
    index = np.arange(len(devices) - 1)
    chosen = np.maximum.accumulate(chosen - index) + index
    chosen = np.minimum(chosen, len(allowed) - 1 - index[::-1])
    return allowed[np.maximum(chosen, index)].tolist()
