"""Chimera: two pipelines in opposite directions through the same devices."""

from ..core.action import Action, ScheduleError, backward, forward
from ..core.placement import wave
from ..core.schedule import Schedule, without_micro_batches


def chimera(devices: int, micro_batches: int) -> Schedule:
    """Chimera: two copies of the model in opposite directions; each micro-batch runs through one of them.

    Even micro-batches go down (stages 0 to D - 1), odd ones up (stages D to 2D - 1, with stage D + s a copy of
    stage s). A unit is D micro-batches; units follow each other without a gap. With F = B the bubble is
    D - 2 slots of one forward. The paper wants micro_batches to be a multiple of the devices; for others, the
    surplus of the last unit is left out.

    Raises:
        ScheduleError: an odd number of devices: half of them run either way.

    Source: Li & Hoefler 2021, Chimera, arXiv 2107.06925, §3.1 to §3.5 (direct concatenation).
    """
    if devices % 2:
        nearest = f"{devices - 1} or {devices + 1}" if devices > 1 else "2"
        raise ScheduleError(f"chimera needs an even number of devices, got {devices}; {nearest} would do")
    units = -(-micro_batches // devices)
    slots: list[dict[int, Action]] = [{} for _ in range(devices)]
    for unit in range(units):
        for direction in range(2):
            for b in range(devices // 2):
                _place_micro_batch(slots, devices, unit, direction, b)
    rows = tuple(tuple(row[slot] for slot in sorted(row)) for row in slots)
    whole = Schedule("chimera", rows, wave(devices, 2), units * devices, replicas=2)
    return without_micro_batches(whole, micro_batches)


def _place_micro_batch(
    slots: list[dict[int, Action]], devices: int, unit: int, direction: int, b: int
) -> None:
    """Put the b-th micro-batch of a unit's direction into slots: F of stage s at 2b + s, B at 2D + 2b - 1 - s."""
    k = unit * devices + 2 * b + direction
    begin = 2 * devices * unit + 2 * b
    for s in range(devices):
        device = devices - 1 - s if direction else s
        stage = direction * devices + s
        slots[device][begin + s] = forward(stage, k)
        slots[device][begin + 2 * devices - 1 - s] = backward(stage, k)
