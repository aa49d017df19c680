"""DualPipeV: DualPipe on half the devices, with both directions of a micro-batch on a V placement."""

from __future__ import annotations

from collections import deque
from itertools import count

from ..core.action import Action, backward, backward_input, backward_weight, forward
from ..core.placement import wave
from ..core.schedule import Schedule, without_micro_batches


def dualpipe_v(devices: int, micro_batches: int) -> Schedule:
    """DualPipeV: overlaps the forward of one chunk with the backward of the other.

    Device r of p has stages r and 2p - 1 - r, and keeps the stash of 2p + 1 chunks. How much an overlapped
    pair saves is up to the costs (`StageCosts.overlap`); run one after the other, with equal stages and
    W <= I, the bubble is (p - 1) (F + I - W) / 2. The original asks for micro_batches >= 2p; for fewer, the
    surplus ones are left out of the schedule for 2p.

    Source: DeepSeek-AI 2024, arXiv 2412.19437, §3.2.1; the eight steps are those of dualpipev.py in
    github.com/deepseek-ai/DualPipe.
    """
    enough = max(micro_batches, 2 * devices)
    rows = tuple(_Row(devices, device).steps(enough) for device in range(devices))
    return without_micro_batches(Schedule("dualpipe-v", rows, wave(devices, 2), enough), micro_batches)


class _Row:
    """The actions of one device in the making; `down` is its first stage, `up` its second."""

    def __init__(self, devices: int, device: int) -> None:
        self.devices, self.device = devices, device
        self.down, self.up = device, 2 * devices - 1 - device
        self.actions: list[Action] = []
        self._forward = {self.down: count(), self.up: count()}
        self._backward = {self.down: count(), self.up: count()}
        self._weights: deque[Action] = deque()

    def steps(self, micro_batches: int) -> tuple[Action, ...]:
        """Return the device's actions, step by step."""
        further = self.devices - 1 - self.device  # devices between this one and the turn
        down, up = self.down, self.up
        # Step 1: F0
        for _ in range(2 * further):
            self.forward(down)
        # Step 2: F0 F1
        for _ in range(self.device + 1):
            self.forward(down)
            self.forward(up)
        # Step 3: I1 W1 F1
        for _ in range(further):
            self.backward_input(up)
            self.weight()
            self.forward(up)
        # Step 4, the main step: F0 & B1, F1 & B0; the last device runs its first pair one after the other
        for k in range(micro_batches - 2 * self.devices + self.device + 1):
            self.forward_and_backward(down, up, overlap=k > 0 or further > 0)
            self.forward_and_backward(up, down)
        # Step 5: B1, F1 & B0
        for _ in range(further):
            self.backward(up)
            self.forward_and_backward(up, down)
        # Step 6: B1 B0, from half-way on I1 I0
        for k in range(2 * (self.device + 1)):
            stage = down if k % 2 else up
            (self.backward_input if k > self.device else self.backward)(stage)
        # Step 7: W I0
        for _ in range(further):
            self.weight()
            self.backward_input(down)
        # Step 8: W
        for _ in range(self.device + 1):
            self.weight()
        return tuple(self.actions)

    def forward(self, stage: int) -> None:
        """Append the forward of the stage's next micro-batch."""
        self.actions.append(forward(stage, next(self._forward[stage])))

    def backward(self, stage: int) -> None:
        """Append the full backward (B) of the stage's next micro-batch."""
        self.actions.append(backward(stage, next(self._backward[stage])))

    def backward_input(self, stage: int) -> None:
        """Append the backward for the inputs (I), and defer the backward for the weights (W)."""
        k = next(self._backward[stage])
        self.actions.append(backward_input(stage, k))
        self._weights.append(backward_weight(stage, k))

    def weight(self) -> None:
        """Append the oldest deferred backward for the weights (W), if there is one."""
        if self._weights:
            self.actions.append(self._weights.popleft())

    def forward_and_backward(self, ahead: int, back: int, overlap: bool = True) -> None:
        """Append the next forward of one stage and the next backward of the other."""
        self.forward(ahead)
        self.backward(back)
        if overlap:
            second, first = self.actions.pop(), self.actions.pop()
            self.actions.append(Action.overlap(first, second))
