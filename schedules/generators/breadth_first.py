"""GPipe and looped BFS: each device runs all micro-batches through one stage before it starts the next."""

from dataclasses import replace

from ..core.action import ScheduleError, backward, forward
from ..core.placement import looped
from ..core.schedule import Schedule


def gpipe(devices: int, micro_batches: int) -> Schedule:
    """GPipe: all forwards, then all backwards, both in the order of the micro-batches.

    Every stage keeps all `micro_batches` in flight. With equal stages the step takes
    (micro_batches + devices - 1) times one forward and backward.

    Source: Huang et al. 2019, GPipe, arXiv 1811.06965, §2.3.
    """
    return replace(looped_bfs(devices, micro_batches, chunks=1), name="gpipe")


def looped_bfs(devices: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """GPipe with `chunks` stages per device, breadth first: chunk after chunk, backwards in reverse order.

    Every stage keeps all micro-batches in flight; the fill and drain cost 1 / chunks of those of GPipe. The backwards
    of a chunk run in the order of the micro-batches, so gradients add up as in training without stages. Torch takes
    the reverse order, with the same times and memory.

    Source: Lamy-Poirier 2023, Breadth-First Pipeline Parallelism, arXiv 2211.05953, §4.
    """
    if chunks < 1:
        raise ScheduleError(f"looped-bfs has at least 1 chunk per device, got chunks={chunks}")
    actions = []
    for device in range(devices):
        stages = range(device, devices * chunks, devices)
        forwards = [forward(stage, k) for stage in stages for k in range(micro_batches)]
        backwards = [backward(stage, k) for stage in reversed(stages) for k in range(micro_batches)]
        actions.append((*forwards, *backwards))
    return Schedule("looped-bfs", tuple(actions), looped(devices, chunks), micro_batches)
