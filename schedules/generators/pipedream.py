"""PipeDream: 1F1B without a flush; forward and backward of a micro-batch use the same weights."""

from __future__ import annotations

from dataclasses import replace

from ..core.action import Action, Kind, ScheduleError
from ..core.schedule import Schedule
from .one_f_one_b import one_f_one_b


def pipedream(devices: int, micro_batches: int) -> Schedule:
    """Asynchronous 1F1B: an optimizer step after every backward, and weight stashing.

    The backward of a micro-batch uses the weights of its forward, so device r of p keeps up to p - r versions.
    `versions` says which; they differ from stage to stage, as in the paper without vertical sync.

    Source: Narayanan et al. 2019, PipeDream, SOSP '19, §3.2 and §3.3.
    """
    return _asynchronous("pipedream", devices, micro_batches, accumulate=1)


def pipedream_2bw(devices: int, micro_batches: int, accumulate: int | None = None) -> Schedule:
    """Asynchronous 1F1B with two weight versions: a step for every `accumulate` micro-batches.

    Counting from 0, micro-batch k uses version max(k // accumulate - 1, 0) on every stage: the weights are
    one step behind and two versions are kept. `accumulate` is the number of devices unless given.

    Raises:
        ScheduleError: accumulate is smaller than devices, or does not divide micro_batches.

    Source: Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN Training, arXiv 2006.09503, §3.1.
    """
    accumulate = devices if accumulate is None else accumulate
    if accumulate < devices:
        raise ScheduleError(
            f"pipedream-2bw needs accumulate >= devices, got accumulate={accumulate} for {devices} devices"
        )
    if micro_batches % accumulate:
        below = micro_batches - micro_batches % accumulate
        nearest = f"{below} or {below + accumulate}" if below else f"{accumulate}"
        raise ScheduleError(
            f"pipedream-2bw steps after every {accumulate} micro-batches, "
            f"{micro_batches} is no multiple of that; {nearest} is"
        )
    schedule = _asynchronous("pipedream-2bw", devices, micro_batches, accumulate)
    row = tuple(max(k // accumulate - 1, 0) for k in range(micro_batches))
    return replace(schedule, versions=(row,) * devices)


def _asynchronous(name: str, devices: int, micro_batches: int, accumulate: int) -> Schedule:
    """1F1B with an optimizer step after every `accumulate` backwards; forwards use their device's newest weights."""
    rows: list[tuple[Action, ...]] = []
    versions: list[tuple[int, ...]] = []
    for row in one_f_one_b(devices, micro_batches).actions:
        actions: list[Action] = []
        used: list[int] = []
        steps = 0
        for action in row:
            actions.append(action)
            if action.kind is Kind.F:
                used.append(steps)
            elif action.micro_batch is not None and (action.micro_batch + 1) % accumulate == 0:
                actions.append(Action(Kind.OPT_STEP, action.stage, action.micro_batch))
                steps += 1
        rows.append(tuple(actions))
        versions.append(tuple(used))
    return Schedule(name, tuple(rows), tuple(range(devices)), micro_batches, versions=tuple(versions))
