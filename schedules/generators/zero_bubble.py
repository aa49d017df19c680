"""ZB-H1 and ZB-H2: split the backward into I and W, and run W where a device would be idle."""

from __future__ import annotations

from dataclasses import replace

from ..core.action import Action, backward_input, backward_weight, forward
from ..core.placement import linear
from ..core.schedule import Schedule
from .interleaved import interleaved_zb


def zb_h1(devices: int, micro_batches: int) -> Schedule:
    """ZB-H1: the warm-up and memory of 1F1B, with W in the cool-down.

    Device r of p warms up with p - 1 - r forwards and lets W lag I by r, so that each keeps the stash of p
    micro-batches. With equal stages and W <= I the fill and drain cost (p - 1) (F + I - W). Any number of
    micro-batches; fewer than devices shorten the warm-up.

    Source: Qi et al. 2024, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, §2.1, Figure 2.
    """
    return replace(interleaved_zb(devices, micro_batches, chunks=1), name="zb-h1")


def zb_h2(devices: int, micro_batches: int) -> Schedule:
    """ZB-H2: a warm-up that fills the pipe, for twice the memory.

    Device r of p warms up with 2 (p - 1 - r) + 1 forwards and keeps the stash of up to 2p - 1 micro-batches:
    it runs a W only where the next forward would exceed that. If steps may overlap (see
    `Timeline.zero_bubble`) the bubble is (p - 1) (F + I - 2W), nothing for F = I = W. The paper assumes
    micro_batches >= 2p - 1; fewer shorten the warm-up.

    Source: Qi et al. 2024, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, §2.2, Figure 3.
    """
    rows = tuple(_h2_row(devices, device, micro_batches) for device in range(devices))
    return Schedule("zb-h2", rows, linear(devices), micro_batches)


def _h2_row(devices: int, stage: int, micro_batches: int) -> tuple[Action, ...]:
    most_live = 2 * devices - 1
    forwards = min(2 * (devices - 1 - stage) + 1, micro_batches)
    weights = 0
    row = [forward(stage, k) for k in range(forwards)]
    for k in range(micro_batches):
        row.append(backward_input(stage, k))
        if forwards == micro_batches or forwards - weights == most_live:
            row.append(backward_weight(stage, weights))
            weights += 1
        if forwards < micro_batches:
            row.append(forward(stage, forwards))
            forwards += 1
    row += (backward_weight(stage, k) for k in range(weights, micro_batches))
    return tuple(row)
