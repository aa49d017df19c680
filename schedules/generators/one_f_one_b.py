"""1F1B: forwards and backwards alternate, so that few micro-batches are in flight."""

from ..core.action import Action, backward, forward
from ..core.placement import linear
from ..core.schedule import Schedule


def one_f_one_b(devices: int, micro_batches: int, eager: bool = False) -> Schedule:
    """A warm-up of forwards, then one forward and one backward in turn, then the backwards that are left.

    Device r of p warms up with p - 1 - r forwards and keeps p - r micro-batches in flight. `eager` doubles
    the warm-up to 2 (p - 1 - r), which hides the latency of the links for 2 (p - 1 - r) + 1 micro-batches
    in flight. Fewer micro-batches than devices shorten the warm-up to what there is.

    Source: Narayanan et al. 2021, PipeDream-Flush, arXiv 2006.09503, §3.2; the eager warm-up is policy B of
    Fan et al. 2021, DAPPLE, arXiv 2007.01045, §3.2.
    """
    actions = tuple(
        _device_actions(stage, (2 if eager else 1) * (devices - 1 - stage), micro_batches)
        for stage in range(devices)
    )
    return Schedule("eager-1f1b" if eager else "1f1b", actions, linear(devices), micro_batches)


def _device_actions(stage: int, warm_up: int, micro_batches: int) -> tuple[Action, ...]:
    warm_up = min(warm_up, micro_batches)
    steady = micro_batches - warm_up
    actions = [forward(stage, k) for k in range(warm_up)]
    for k in range(steady):
        actions += forward(stage, warm_up + k), backward(stage, k)
    actions += (backward(stage, k) for k in range(steady, micro_batches))
    return tuple(actions)
