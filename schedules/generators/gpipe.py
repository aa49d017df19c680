"""GPipe: all forwards, then all backwards."""

from ..core.action import backward, forward
from ..core.placement import linear
from ..core.schedule import Schedule


def gpipe(devices: int, micro_batches: int) -> Schedule:
    """GPipe: all forwards, then all backwards, both in the order of the micro-batches.

    Every stage keeps all `micro_batches` in flight. With equal stages the step takes
    (micro_batches + devices - 1) times one forward and backward.

    Source: Huang et al. 2019, GPipe, arXiv 1811.06965, §2.3.
    """
    actions = tuple(
        tuple(forward(stage, k) for k in range(micro_batches))
        + tuple(backward(stage, k) for k in range(micro_batches))
        for stage in range(devices)
    )
    return Schedule("gpipe", actions, linear(devices), micro_batches)
