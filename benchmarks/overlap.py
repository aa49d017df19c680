"""Computes from a torch profile how long several streams or threads were busy at the same time."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

Span = tuple[Hashable, float, float]
"""A lane, and the start and end of one piece of work on it, in microseconds."""


@dataclass(frozen=True)
class Overlap:
    """Microseconds in which any lane of compute was busy, several were, any copy ran, and one did beside compute."""

    busy: float
    together: float
    copying: float
    hidden: float
    lanes: int


def overlap(compute: Iterable[Span], copies: Iterable[Span] = ()) -> Overlap:
    """The spans of a lane may lie in each other: a lane is busy or it is not."""
    moments: list[tuple[float, int, Hashable, bool]] = []
    for spans, is_copy in ((compute, False), (copies, True)):
        for lane, start, end in spans:
            moments += [(start, 1, lane, is_copy), (end, -1, lane, is_copy)]
    depth: dict[tuple[bool, Hashable], int] = {}
    busy = together = copying = hidden = last = 0.0
    for time, step, lane, is_copy in sorted(moments, key=lambda moment: moment[:2]):
        computing = sum(count > 0 for (copies_too, _), count in depth.items() if not copies_too)
        copies_now = any(count > 0 for (copies_too, _), count in depth.items() if copies_too)
        passed, last = time - last, time
        busy += passed if computing else 0
        together += passed if computing > 1 else 0
        copying += passed if copies_now else 0
        hidden += passed if copies_now and computing else 0
        depth[is_copy, lane] = depth.get((is_copy, lane), 0) + step
    return Overlap(busy, together, copying, hidden, sum(not copies_too for copies_too, _ in depth))


def profiled(step: Callable[[], object], on_cuda: bool) -> Overlap:
    """What ran at once in one step: kernels by stream, or without CUDA the operations of each thread."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    # Else it sees only the threads that are younger than itself, and workers are older.
    workers_too = None if on_cuda else _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=workers_too) as profiler:
        step()
    compute: list[Span] = []
    copies: list[Span] = []
    for event in profiler.events() or ():
        if (event.device_type.name == "CUDA") != on_cuda or getattr(event, "is_user_annotation", False):
            continue
        lane = (event.device_index, event.device_resource_id) if on_cuda else event.thread
        found = copies if event.name.startswith("Memcpy") else compute
        found.append((lane, event.time_range.start, event.time_range.end))
    return overlap(compute, copies)


def synchronize(devices: Iterable[torch.device]) -> None:
    """Waits for all accelerators among them."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
