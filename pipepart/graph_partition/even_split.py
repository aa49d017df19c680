"""A cut without a search: even shares of the work in execution order; used when the search ran out of time."""

from __future__ import annotations

import numpy as np

from .problem import Problem, Split


def even_split(problem: Problem) -> Split | None:
    """Return the cut of the execution order that gives each device its share of the work, or None if it does not fit.

    Devices are filled in the order of their types. A node goes to the next device that may run it, has memory for it,
    and has less work than its share.
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
            # The last device may exceed its share, by rounding.
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
