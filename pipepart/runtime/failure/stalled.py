"""Ends a step in which no action has finished for the timeout, and reports what each worker runs or waits for.

Each worker records its current action and when it began. The caller's thread, which waits for the workers, gives the
step up when the newest of these actions is older than the timeout.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from types import FrameType

from schedules import Action

from ...ranks import Ranks
from ...ranks.status import RankStatus
from ...workers.worker import Worker
from ..step import Step


class StepTimeoutError(TimeoutError):
    """No action of a step has ended for as long as the pipeline's timeout."""


def wait_for(
    step: Step,
    done: SimpleQueue[BaseException | None],
    timeout: float | None,
    workers: Sequence[Worker],
    rows: Sequence[int],
    names: Sequence[str],
    ranks: Ranks | None = None,
) -> None:
    """Wait until each worker of a step has reported to ``done``.

    Args:
        done: gets one entry from each worker, or a failure elsewhere.
        timeout: seconds in which no action ends; None for no limit.
        workers, rows: of this process, and their rows of the schedule.
        names: of all devices.

    Raises:
        StepTimeoutError: no worker of any process has ended an action for too long.
        BaseException: the failure elsewhere.
    """
    missing = len(workers)
    ends = None if timeout is None else max(step.current[row][1] for row in rows) + timeout
    while missing:
        try:
            failure = done.get(timeout=None if ends is None else max(0.0, ends - time.monotonic()))
        except Empty:
            assert timeout is not None
            if ranks is None:
                idle = (status := doing(step, workers, rows, names)).idle
                if idle >= timeout:
                    raise _error(status, timeout) from None
            else:
                idle, error = ranks.survey(timeout)
                if idle >= timeout and done.empty():  # else another rank's error has come meanwhile
                    raise error from None
            ends = time.monotonic() + timeout - idle
        else:
            missing -= 1
            if failure is not None:
                raise failure


def doing(step: Step, workers: Sequence[Worker], rows: Sequence[int], names: Sequence[str]) -> RankStatus:
    """Return what the workers of a step run or wait for. Arguments are those of :func:`wait_for`."""
    lines = []
    notes = []
    now = time.monotonic()
    for worker, row in zip(workers, rows, strict=True):
        name, (action, since), key = names[row], step.current[row], step.awaiting[row]
        for_seconds = f", for {now - since:.3g} s"
        if action is None:
            lines.append(f"{name} has nothing left to do")
        elif key is not None:
            maker = step.sender_of(key)
            of = f"stage {_stage(step, maker)} on {names[step.schedule.device_of[maker]]}"
            lines.append(f"{name} waits for a message of {of} (action {action}){for_seconds}")
        else:
            frame = sys._current_frames().get(worker.ident or 0)
            stack = [] if frame is None else [frame_below for frame_below, _ in traceback.walk_stack(frame)]
            layer = _layer(step, action, stack)
            which = "" if action.micro_batch is None else f", micro-batch {action.micro_batch}"
            place = f"stage {_stage(step, action.stage)}{which} (action {action})"
            lines.append(f"{name} is in {layer + ', ' if layer else ''}{place}{for_seconds}")
            text = "".join(traceback.format_stack(frame)) if frame else ""
            notes.append(f"the stack of {name}:\n{text.rstrip()}")
    return RankStatus(now - max(step.current[row][1] for row in rows), lines, notes)


def _error(status: RankStatus, timeout: float) -> StepTimeoutError:
    lines = [
        f"no action has ended on any device for {timeout:g} s, the pipeline's timeout:",
        *(f"  {line}" for line in status.lines),
    ]
    error = StepTimeoutError("\n".join(lines))
    for note in status.notes:
        error.add_note(f"pipepart: {note}")
    return error


def _stage(step: Step, stage: int) -> str:
    replica, in_model = divmod(stage, step.schedule.model_stages)
    return f"{in_model} of copy {replica}" if step.schedule.replicas > 1 else str(in_model)


def _layer(step: Step, action: Action, stack: Sequence[FrameType]) -> str:
    """Name the layer whose forward a worker's stack shows, the innermost frame first; "" if it shows none."""
    stage = step.runs[action.stage].stage
    running = {id(frame.f_locals.get("self")) for frame in stack}
    return stage.name([index for index, (_, layer) in enumerate(stage.layers) if id(layer) in running][:1])
