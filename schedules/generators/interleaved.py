"""Interleaved 1F1B and interleaved zero bubble: several chunks per device, micro-batches in groups."""

from __future__ import annotations

from itertools import islice, pairwise

from ..core.action import ScheduleError, backward, backward_input, backward_weight, forward
from ..core.placement import looped
from ..core.schedule import Schedule


def interleaved_1f1b(devices: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1F1B over `chunks` stages per device, in groups of about `devices` micro-batches.

    A device runs a group through its first chunk, then through its second, and so on. With equal stages the
    fill and drain cost 1 / chunks of those of 1F1B, for more messages and more micro-batches in flight.
    The paper wants micro_batches to be a multiple of devices. Here they are cut into micro_batches // devices
    groups as equal as can be (one group if there are fewer), larger ones first.

    Source: Narayanan et al. 2021, Megatron-LM, arXiv 2104.04473, §2.2.2.
    """
    groups = _groups(devices, micro_batches, chunks)
    actions = []
    for device in range(devices):
        warm_up = (chunks - 1) * len(groups[0]) + 2 * (devices - 1 - device)
        forwards, backwards = _orders(devices, device, groups, chunks)
        warm_up = min(warm_up, len(forwards))
        row = [forward(*where) for where in forwards[:warm_up]]
        for coming, going in zip(forwards[warm_up:], backwards, strict=False):
            row += forward(*coming), backward(*going)
        row += (backward(*where) for where in backwards[len(forwards) - warm_up :])
        actions.append(tuple(row))
    return Schedule("interleaved-1f1b", tuple(actions), looped(devices, chunks), micro_batches)


def interleaved_zb(devices: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B with split backwards: a shorter warm-up, and W in place of idle time.

    Device r begins with its W when it has done r backwards, so that every device keeps the stash of `devices`
    whole micro-batches. With one chunk it is ZB-H1. Groups of micro-batches as for interleaved 1F1B.

    Source: ZB-H1 of Qi et al. 2024, arXiv 2401.10241, §2.1, on a looped placement, as in
    torch.distributed.pipelining; "GIS" of Wan et al. 2025, PipeOffload, arXiv 2503.01328, §3.1.
    """
    groups = _groups(devices, micro_batches, chunks)
    actions = []
    for device in range(devices):
        forwards, backwards = _orders(devices, device, groups, chunks)
        warm_up = min((chunks - 1) * len(groups[0]) + devices - 1 - device, len(forwards))
        weights = iter(backwards)
        row = [forward(*where) for where in forwards[:warm_up]]
        coming = iter(forwards[warm_up:])
        for done, where in enumerate(backwards):
            row += (forward(*next_forward) for next_forward in islice(coming, 1))
            row.append(backward_input(*where))
            if done >= device:
                row.append(backward_weight(*next(weights)))
        row += (backward_weight(*where) for where in weights)
        actions.append(tuple(row))
    return Schedule("interleaved-zb", tuple(actions), looped(devices, chunks), micro_batches)


def _groups(devices: int, micro_batches: int, chunks: int) -> list[range]:
    """Consecutive micro-batches, in groups of at least as many as there are devices if there are enough."""
    if chunks < 1:
        raise ScheduleError(f"an interleaved schedule has at least 1 chunk per device, got chunks={chunks}")
    count = max(1, micro_batches // devices)
    size, larger = divmod(micro_batches, count)
    starts = [group * size + min(group, larger) for group in range(count + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


def _orders(
    devices: int, device: int, groups: list[range], chunks: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Stage and micro-batch of the forwards, and of the backwards, in order."""
    stages = range(device, devices * chunks, devices)
    forwards = [(stage, k) for group in groups for stage in stages for k in group]
    backwards = [(stage, k) for group in groups for stage in reversed(stages) for k in group]
    return forwards, backwards
