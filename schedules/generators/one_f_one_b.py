"""1F1B: alternates forwards and backwards, so that few micro-batches are in flight."""

from dataclasses import replace

from ..core.action import Action, backward, forward
from ..core.placement import linear
from ..core.schedule import Schedule
from .interleaved import interleaved_1f1b


def one_f_one_b(devices: int, micro_batches: int) -> Schedule:
    """1F1B: a warm-up of forwards, then one forward and one backward in turn, then the remaining backwards.

    Device r of p warms up with p - 1 - r forwards and keeps p - r micro-batches in flight. Fewer micro-batches than
    devices shorten the warm-up to what there is.

    Source: Narayanan et al. 2021, PipeDream-Flush, arXiv 2006.09503, §3.2.
    """
    rows: list[tuple[Action, ...]] = []
    for stage in range(devices):
        warm_up = min(devices - 1 - stage, micro_batches)
        row = [forward(stage, k) for k in range(warm_up)]
        for k in range(micro_batches - warm_up):
            row += forward(stage, warm_up + k), backward(stage, k)
        row += (backward(stage, k) for k in range(micro_batches - warm_up, micro_batches))
        rows.append(tuple(row))
    return Schedule("1f1b", tuple(rows), linear(devices), micro_batches)


def eager_1f1b(devices: int, micro_batches: int) -> Schedule:
    """1F1B with twice the warm-up, 2 (p - 1 - r) forwards on device r of p, which hides the latency of the links.

    Device r keeps 2 (p - 1 - r) + 1 micro-batches in flight.

    Source: Fan et al. 2021, DAPPLE, arXiv 2007.01045, §3.2, policy B.
    """
    return replace(interleaved_1f1b(devices, micro_batches, chunks=1), name="eager-1f1b")
