"""V-Half and V-Min: repeat the actions of one micro-batch at a fixed interval, which determines the memory."""

from __future__ import annotations

from itertools import accumulate, chain

from ..core.action import Action, backward_input, backward_weight, forward
from ..core.placement import wave
from ..core.schedule import Schedule

# A device's part of the schedule in the making: for each of F0, F1, I1, I0, and then W, the slot of each of its
# actions. A slot has the length of one forward; a device has stages r (chunk 0) and 2p - 1 - r (chunk 1).
_Row = list[list[int]]
_F0, _F1, _I1, _I0, _W = range(5)
_PERIOD = 6  # F, I and W of two chunks


def v_half(devices: int, micro_batches: int) -> Schedule:
    """V-Half: half the memory of 1F1B, the stash of p // 2 + 1 micro-batches, for half its bubble.

    Bubble-free in the steady state if W + 2I >= 2F and W + 2F >= 2I. Any number of micro-batches.

    Source: Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, §4.2.
    """
    delay = 3 if devices % 2 == 0 else 0
    block = [
        [2 * r, 3 * devices - r - 2, 3 * devices + delay + 2 * r - 1, 6 * devices + delay - r - 2]
        for r in range(devices)
    ]
    return _repeated("v-half", block, micro_batches)


def v_min(devices: int, micro_batches: int) -> Schedule:
    """V-Min: a third of the memory of 1F1B, the stash of about (p + 4) / 3 micro-batches.

    Its bubble grows with every micro-batch where F, I and W differ. Any number of micro-batches.

    Source: Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, §4.2.
    """
    delay = 2 if devices % 3 == 0 else 0
    block = [
        [r, 2 * devices - r - 1, 2 * devices + delay + r, 4 * devices + delay - r - 1] for r in range(devices)
    ]
    return _repeated("v-min", block, micro_batches)


def _repeated(name: str, block: list[list[int]], micro_batches: int) -> Schedule:
    """Repeat the block uniformly, squeeze and reorder the ramps, and put W where a device is free (§3.3)."""
    rows = [[list(range(start, start + _PERIOD * micro_batches, _PERIOD)) for start in row] for row in block]
    rows = [[*row, _weight_slots(row)] for row in rows]
    rows = _squeezed(_reordered(rows))
    rows = _reordered([row[:_W] for row in rows])
    rows = _squeezed([[*row, _weight_slots(row)] for row in rows])
    actions = tuple(_actions(len(block), device, row[:_W]) for device, row in enumerate(rows))
    return Schedule(name, actions, wave(len(block), 2), micro_batches)


def _actions(devices: int, device: int, row: _Row) -> tuple[Action, ...]:
    """The actions in the order of their slots; W's of chunk 1 go before those of chunk 0."""
    down, up = device, 2 * devices - 1 - device
    actions = [(slot, forward(down, k)) for k, slot in enumerate(row[_F0])]
    actions += [(slot, forward(up, k)) for k, slot in enumerate(row[_F1])]
    actions += [(slot, backward_input(up, k)) for k, slot in enumerate(row[_I1])]
    actions += [(slot, backward_input(down, k)) for k, slot in enumerate(row[_I0])]
    actions += _weights(row, down, up)
    return tuple(action for _, action in sorted(actions))


def _weights(row: _Row, down: int, up: int) -> list[tuple[int, Action]]:
    taken = dict.fromkeys(chain(row[_F0], row[_F1]))
    taken |= dict.fromkeys(row[_I1], up) | dict.fromkeys(row[_I0], down)
    pending = {up: 0, down: 0}
    placed = {up: 0, down: 0}
    weights = []
    slot = 0
    while len(weights) < len(row[_I1]) + len(row[_I0]):
        if slot in taken:
            stage = taken[slot]
            if stage is not None:
                pending[stage] += 1
        elif any(pending.values()):
            stage = up if pending[up] else down
            weights.append((slot, backward_weight(stage, placed[stage])))
            pending[stage] -= 1
            placed[stage] += 1
        slot += 1
    return weights


def _weight_slots(row: _Row) -> list[int]:
    """The slots for W: each free one, as long as an I has run whose W has not."""
    return [slot for slot, _ in _weights(row, 0, 1)]


def _reordered(rows: list[_Row]) -> list[_Row]:
    """Move the actions of the ramps into earlier free slots, as far as inputs and memory allow (§3.3).

    With W among the rows, the warm-up (before the first I0 of device 0) and the cool-down (after the first
    device has its last F0) are reordered. Without, only the cool-down, and W takes every free slot.
    """
    with_weights = len(rows[0]) > _W
    most = max(max(_levels(row)) for row in rows)
    rows = [[list(slots) for slots in row] for row in rows]
    taken: list[set[int]] = [set() for _ in rows]
    last = len(rows[0][_F0]) - 1
    warm_up, steady = True, False
    for slot, device, kind, k in _in_order(rows):
        if warm_up and kind == _I0 and device == 0:
            warm_up, steady = False, True
        fixed = steady or (warm_up and not with_weights)
        if steady and kind == _F0 and k == last:
            steady = False
        if not fixed:
            earliest = _ready(rows, device, kind, k) + 1
            slot = _earlier_slot(rows[device], taken[device], kind, k, range(earliest, slot + 1), most)
        rows[device][kind][k] = slot
        taken[device].add(slot)
    return rows


def _earlier_slot(row: _Row, taken: set[int], kind: int, k: int, slots: range, most: int) -> int:
    """The first free one of the slots from which the device's stash stays within `most`; else the last."""
    *before, now = slots
    for slot in before:
        if slot in taken:
            continue
        row[kind][k] = slot
        needs_room = kind in (_F0, _F1) or len(row) == _W
        if not needs_room or max(_levels(row)) <= most:
            return slot
    return now


def _squeezed(rows: list[_Row]) -> list[_Row]:
    """Start every action as early as its inputs and its turn on the device let it, one slot each."""
    squeezed = [[list(slots) for slots in row] for row in rows]
    free = [0] * len(rows)
    for _, device, kind, k in _in_order(rows):
        ready = -1 if kind == _W else _ready(squeezed, device, kind, k)
        squeezed[device][kind][k] = slot = max(ready + 1, free[device])
        free[device] = slot + 1
    return squeezed


def _ready(rows: list[_Row], device: int, kind: int, k: int) -> int:
    """The last slot of what an action waits for."""
    row = rows[device]
    waits = [-1]
    if kind in (_F0, _I1) and device > 0:
        waits.append(rows[device - 1][kind][k])
    if kind in (_F1, _I0) and device + 1 < len(rows):
        waits.append(rows[device + 1][kind][k])
    if kind in (_F1, _I1, _I0):
        waits.append(row[kind - 1][k])
    if kind == _W:
        waits.append(sorted(row[_I1] + row[_I0])[k])
    if k > 0:
        waits.append(row[kind][k - 1])
    return max(waits)


def _levels(row: _Row) -> list[int]:
    """Chunks that the device keeps after each slot."""
    weights = row[_W] if len(row) > _W else _weight_slots(row)
    change = [0] * (max(map(max, [*row, weights])) + 1)
    for slot in chain(row[_F0], row[_F1]):
        change[slot] += 1
    for slot in weights:
        change[slot] -= 1
    return list(accumulate(change))


def _in_order(rows: list[_Row]) -> list[tuple[int, int, int, int]]:
    """Slot, device, kind and number of every action, by slot."""
    return sorted(
        (slot, device, kind, k)
        for device, row in enumerate(rows)
        for kind, slots in enumerate(row)
        for k, slot in enumerate(slots)
    )
