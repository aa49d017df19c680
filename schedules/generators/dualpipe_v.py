"""DualPipeV: DualPipe on half the devices, with both directions of a micro-batch on a V placement."""

from __future__ import annotations

from collections import deque
from itertools import count

from ..core.action import Action, backward, backward_input, backward_weight, forward
from ..core.placement import wave
from ..core.schedule import Schedule, without_micro_batches


def dualpipe_v(devices: int, micro_batches: int) -> Schedule:
    """DualPipeV: overlaps the forward of one chunk with the backward of the other.

    Device r of p has stages r and 2p - 1 - r, and keeps the stash of 2p + 1 chunks. Run one after the other, with
    equal stages and W <= I, the bubble is (p - 1) (F + I - W) / 2. The original asks for micro_batches >= 2p; for
    fewer, the surplus ones are left out of the schedule for 2p.

    Source: DeepSeek-AI 2024, arXiv 2412.19437, §3.2.1; the eight steps are those of dualpipev.py in
    github.com/deepseek-ai/DualPipe.
    """
    enough = max(micro_batches, 2 * devices)
    rows = tuple(_row(devices, device, enough) for device in range(devices))
    return without_micro_batches(Schedule("dualpipe-v", rows, wave(devices, 2), enough), micro_batches)


def _row(devices: int, device: int, micro_batches: int) -> tuple[Action, ...]:
    row: list[Action] = []
    down, up = device, 2 * devices - 1 - device  # the first and the second stage of the device
    forwards, backwards = ({stage: count() for stage in (down, up)} for _ in range(2))
    deferred: deque[Action] = deque()  # backwards for the weights (W)

    def f(stage: int) -> Action:
        return forward(stage, next(forwards[stage]))

    def b(stage: int) -> Action:
        return backward(stage, next(backwards[stage]))

    def i(stage: int) -> Action:
        k = next(backwards[stage])
        deferred.append(backward_weight(stage, k))
        return backward_input(stage, k)

    def w() -> list[Action]:
        return [deferred.popleft()] if deferred else []

    further = devices - 1 - device  # devices between this one and the turn
    # Step 1: F0
    row += [f(down) for _ in range(2 * further)]
    # Step 2: F0 F1
    row += [f(stage) for _ in range(device + 1) for stage in (down, up)]
    # Step 3: I1 W1 F1
    for _ in range(further):
        row += [i(up), *w(), f(up)]
    # Step 4, the main step: F0 & B1, F1 & B0; the last device runs its first pair one after the other
    for k in range(micro_batches - 2 * devices + device + 1):
        pair = f(down), b(up)
        row += [Action.overlap(*pair)] if k > 0 or further > 0 else pair
        row.append(Action.overlap(f(up), b(down)))
    # Step 5: B1, F1 & B0
    for _ in range(further):
        row += [b(up), Action.overlap(f(up), b(down))]
    # Step 6: B1 B0, from half-way on I1 I0
    for k in range(2 * (device + 1)):
        stage = down if k % 2 else up
        row.append(i(stage) if k > device else b(stage))
    # Step 7: W I0
    for _ in range(further):
        row += [*w(), i(down)]
    # Step 8: W
    for _ in range(device + 1):
        row += w()
    return tuple(row)
