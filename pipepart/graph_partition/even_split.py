"""A cut without a search: the execution order in even shares of the work, for when there is no time for more."""

from __future__ import annotations

import numpy as np

from .problem import Problem, Split


def even_split(problem: Problem) -> Split | None:
    """Return the execution order cut where each device has its share of the work, or None if that does not fit.

    The devices are taken in the order of their types. A node goes to the next device that may run it, has memory for it
    and has work left to do.
    """
    weights = problem.device_weights
    devices = [kind for kind, device_type in enumerate(problem.types) for _ in device_type.devices]
    share = float(problem.work.sum()) / sum(float(weights[kind]) for kind in devices)
    stage_of: list[int] = []
    device, work, size = 0, 0.0, 0
    for node in range(len(problem)):
        while device < len(devices):
            kind = problem.types[devices[device]]
            fits = np.isfinite(kind.seconds[node]) and size + int(problem.bytes[node]) <= kind.memory
            # Where the last device has more than its share, it was rounding that left it some.
            has_time = work < share * float(weights[devices[device]]) or device + 1 == len(devices)
            if fits and has_time:
                break
            device, work, size = device + 1, 0.0, 0
        else:
            return None
        stage_of.append(device)
        work += float(problem.work[node])
        size += int(problem.bytes[node])
    used = sorted(set(stage_of))
    return Split(tuple(used.index(stage) for stage in stage_of), tuple(devices[stage] for stage in used))
