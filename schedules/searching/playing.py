"""Plays an order: the end time of each operation, and the peak memory of each device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .problem import SLACK, F, Floats, I, Problem, Row, W

_PENDING = -1.0  # and below: the end of an operation that has not run


def play(problem: Problem, rows: Sequence[Row]) -> list[float] | None:
    """Return [operations]: end times in seconds if every device runs its row in order; None for a deadlock.

    A link carries one message at a time in each direction. A recompute may begin before its I has its gradient.

    Args:
        problem: the operations.
        rows: the operations of each device, in order.
    """
    m, stages, home = problem.micro_batches, problem.stages, problem.device_of
    seconds, source, delay, before = (
        problem.seconds,
        problem.source,
        problem.delay,
        problem.recompute_before,
    )
    # [streams]: seconds for which a message to the next or previous stage occupies its link, and the device there.
    holds = [*problem.hold_forward[1:], 0.0, 0.0, *problem.hold_backward[:-1], *[0.0] * stages]
    targets = [*home[1:], -1, -1, *home[:-1], *[-1] * stages]
    ends = [_PENDING] * problem.operations
    sent = ends.copy() if any(holds) else ends  # when the result of an operation leaves
    links: dict[tuple[int, int], float] = {}  # when a link is free
    position, clock = [0] * problem.devices, [0.0] * problem.devices
    able = list(range(problem.devices))  # the devices that may be able to go on
    while able:
        device = able.pop()
        row, now, at = rows[device], clock[device], position[device]
        while at < len(row):
            operation = row[at]
            needed = source[operation]
            if needed >= 0:
                ready = sent[needed]
                if ready < 0:
                    sent[needed] = _PENDING - 1 - device  # this device waits for it
                    break
                if before:
                    now += before[operation]
                ready += delay[operation]
                if ready > now:
                    now = ready
            elif before and operation < len(before):
                now += before[operation]
            now += seconds[operation]
            if sent[operation] < _PENDING:
                able.append(int(_PENDING - 1 - sent[operation]))
            ends[operation] = leaves = now
            if sent is not ends:
                if hold := holds[operation // m]:
                    link = device, targets[operation // m]
                    leaves = max(now, links.get(link, 0.0))
                    links[link] = leaves + hold
                sent[operation] = leaves
            at += 1
        position[device], clock[device] = at, now
    return ends if all(at == len(row) for at, row in zip(position, rows, strict=True)) else None


def last_ends(rows: Sequence[Row], ends: Floats) -> list[float]:
    """Return [devices]: seconds at which each device ends its last operation; 0 for a device without operations."""
    return [ends[row[-1]] if row else 0.0 for row in rows]


def fits(problem: Problem, rows: Sequence[Row], ends: Floats) -> bool:
    """Return True if an order fits the memory in its own step, and in a step in which all stages take equal times.

    Real steps have other times than simulated, and messages may wait for longer. The second step covers these.

    Args:
        problem: the operations.
        rows: the operations of each device, in order.
        ends: [operations]: end time in seconds.
    """
    memory = problem.memory
    if memory is None:
        return True
    if not _is_within_limits(problem, rows, ends):
        return False
    if not any(memory.inputs) and not any(memory.gradients):
        return True  # no message waits, so the bytes do not depend on the times
    return _is_within_limits(problem.even, rows, play(problem.even, rows) or ())


def _is_within_limits(problem: Problem, rows: Sequence[Row], ends: Floats) -> bool:
    assert problem.memory is not None
    peaks = zip(peak_bytes(problem, rows, ends), problem.memory.limit, strict=True)
    return all(peak <= limit * SLACK for peak, limit in peaks)


def peak_bytes(problem: Problem, rows: Sequence[Row], ends: Floats) -> Iterator[float]:
    """Yield the peak bytes of each device: stashes, waiting messages and the workspace of running operations.

    Peaks are taken at the same moments as in :func:`schedules.memory_during`.

    Args:
        problem: the operations, with memory.
        rows: the operations of each device, in order.
        ends: [operations]: end time in seconds.
    """
    memory, m, stages, source = problem.memory, problem.micro_batches, problem.stages, problem.source
    assert memory is not None
    seconds, before, deferred = problem.seconds, problem.recompute_before, problem.deferred
    sizes = (*memory.inputs, *memory.gradients)
    for row in rows:
        sent = sorted(
            (ends[source[operation]], sizes[operation // m])
            for operation in row
            if source[operation] >= 0 and sizes[operation // m]
        )
        arrived, level, waiting, peak, end = 0, 0.0, 0.0, 0.0, 0.0
        for operation in row:
            kind, stage = divmod(operation // m, stages)
            if kind == W and problem.whole[stage]:
                continue
            again = operation % m < problem.recomputed[stage]
            stash = memory.boundary[stage] if again else memory.stash[stage]
            full = memory.stash[stage] - stash + memory.copied[stage]  # while the operation runs
            used = sizes[operation // m] if kind != W else 0.0  # the operation uses its message
            running = memory.workspace[stage][kind] - used + (full if kind != W else 0.0)
            moments = [(ends[operation] - (seconds[operation] / 2 if kind else 0.0), running)]
            if again and kind == I:  # at the end of the recompute, which needs as much as an F
                moments.insert(0, (end + before[operation], memory.workspace[stage][F] + full))
            if kind == F:
                level += stash
            for moment, more in moments:
                while arrived < len(sent) and sent[arrived][0] <= moment:
                    waiting += sent[arrived][1]
                    arrived += 1
                peak = max(peak, level + waiting + more)
            waiting -= used
            end = ends[operation]
            if kind == I:
                level += deferred[stage] - stash
            elif kind == W:
                level -= deferred[stage]
        yield peak
