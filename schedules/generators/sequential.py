"""Sequential: naive model parallelism, in which one device computes at a time."""

from ..core.action import backward, forward
from ..core.placement import linear
from ..core.schedule import Schedule


def sequential(devices: int, micro_batches: int) -> Schedule:
    """Run forward and backward of one micro-batch through all stages, then those of the next.

    One micro-batch is in flight; with equal stages 1 / devices of the time is used.

    Source: the baseline of Huang et al. 2019, GPipe, arXiv 1811.06965, Figure 2b.
    """
    actions = tuple(
        tuple(make(stage, k) for k in range(micro_batches) for make in (forward, backward))
        for stage in range(devices)
    )
    return Schedule("sequential", actions, linear(devices), micro_batches)
