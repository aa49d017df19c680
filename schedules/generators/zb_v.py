"""ZB-V: zero bubble with the memory of 1F1B, on a V placement with two chunks per device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from ..core.action import Action, backward_input, backward_weight, forward
from ..core.placement import wave
from ..core.schedule import Schedule, without_micro_batches


def zb_v(devices: int, micro_batches: int) -> Schedule:
    """ZB-V: device r of p runs stages r and 2p - 1 - r, and keeps the stash of p micro-batches.

    With F = I = W the bubble is nothing if steps may overlap (see `Timeline.zero_bubble`), and (p - 1) F / 2
    if they may not. The paper assumes micro_batches >= 2p - 1; for fewer, the surplus ones are left out of
    the schedule for 2p - 1.

    Source: Qi et al. 2024, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, §6, Figure 8.
    """
    enough = max(micro_batches, 2 * devices - 1)
    rows = tuple(_row(devices, device, enough) for device in range(devices))
    return without_micro_batches(Schedule("zb-v", rows, wave(devices, 2), enough), micro_batches)


def _row(devices: int, device: int, micro_batches: int) -> tuple[Action, ...]:
    row: list[Action] = []
    down, up = device, 2 * devices - 1 - device

    def each(make: Callable[[int, int], Action], stage: int) -> Callable[[], None]:
        """Return a function that appends the next micro-batch's action of one kind on one stage."""
        numbers = count()
        return lambda: row.append(make(stage, next(numbers)))

    f0, i0, w0 = (each(make, down) for make in (forward, backward_input, backward_weight))
    f1, i1, w1 = (each(make, up) for make in (forward, backward_input, backward_weight))

    def run(times: int, *steps: Callable[[], None]) -> None:
        for step in steps * times:
            step()

    # Warm-up: fill the way down, let the first micro-batches turn, and run their backwards at once.
    run(2 * (devices - device) - 1, f0)
    run(device, f1, f0)
    run(devices - device, f1, i1, w1)
    # Steady: one micro-batch on each chunk in turn; the forwards of the first chunk run out first.
    left = micro_batches - (2 * devices - 1 - device)
    run(left, f0, i0, w0, f1, i1, w1)
    run(devices - 1 - device, i0, w0, f1, i1, w1)
    # Cool-down: backwards for the inputs first, then the weights that are left.
    run(device, i0, i1)
    run(devices - device, i0, w0)
    run(device, w1)
    run(device, w0)
    return tuple(row)
