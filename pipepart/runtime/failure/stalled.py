"""Notices a step in which nothing goes on any more, and says who waits for whom.

Workers are not asked and keep no count: from time to time the caller's thread, which waits anyway, looks at which
action is on each worker's stack. No action is done twice in a run, so one that is there at every look has not ended.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, NamedTuple

from torch.autograd.graph import Node

from schedules import Action, Kind

from ...workers.worker import Worker
from ..replay.randomness import ForwardPass
from ..stage import Stage
from ..stage_run import StageRun
from ..step import Step
from .blame import layers_of

_LOOKS = 20  # in the time of a timeout


class StepTimeoutError(TimeoutError):
    """No action of a step has ended for as long as the pipeline's timeout."""


def check_timeout(timeout: float | None) -> None:
    """Refuses what is no time.

    Raises:
        ValueError: it is no positive, finite number.
    """
    if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout < float("inf")):
        raise ValueError(f"timeout is a number of seconds above 0, or None to wait for ever; got {timeout!r}")


class Watchdog:
    """Waits for the workers of one run, on the caller's thread.

    Args:
        timeout: seconds in which no action ends.
        step: that they are in.
        workers: of all devices.
        names: of the devices.
    """

    def __init__(self, timeout: float, step: Step, workers: Sequence[Worker], names: Sequence[str]) -> None:
        self._timeout = timeout
        self._step = step
        self._workers = workers
        self._names = names
        self._since = [(time.monotonic(), "")] * len(workers)

    def wait(self, done: SimpleQueue[None]) -> None:
        """Waits until each has reported to ``done``.

        Raises:
            StepTimeoutError: none has ended an action for too long.
        """
        missing = len(self._workers)
        last = time.monotonic()
        while missing:
            try:
                done.get(timeout=self._timeout / _LOOKS)
                missing -= 1
                last = time.monotonic()
            except Empty:
                now = time.monotonic()
                if self._look(now):
                    last = now
                elif now - last >= self._timeout:
                    raise self._error(now) from None

    def _look(self, now: float) -> bool:
        """Whether any worker is in another action than at the last look."""
        moved = False
        for number, current in enumerate(self._step.current):
            action = str(current)
            if action != self._since[number][1]:
                self._since[number] = now, action
                moved = True
        return moved

    def _stacks(self) -> list[list[FrameType]]:
        current = sys._current_frames()
        try:
            return [list(_outwards(current.get(worker.ident or 0))) for worker in self._workers]
        finally:
            current.clear()  # this very frame is in it, which would live on in a circle, with all that the others hold

    def _error(self, now: float) -> StepTimeoutError:
        lines = [f"no action has ended on any device for {self._timeout:g} s, the pipeline's timeout:"]
        notes = []
        for number, frames in enumerate(self._stacks()):
            sight = _Sight(self._step.current[number], self._step.awaiting[number], _where(frames))
            since = f", for {now - self._since[number][0]:.3g} s" if sight.action else ""
            lines.append(f"  {self._names[number]} {self._says(sight)}{since}")
            if sight.action and sight.key is None:
                stack = "".join(traceback.format_stack(frames[0])) if frames else ""
                notes.append(f"pipepart: the stack of {self._names[number]}:\n{stack.rstrip()}")
        error = StepTimeoutError("\n".join(lines))
        for note in notes:
            error.add_note(note)
        return error

    def _says(self, sight: _Sight) -> str:
        if sight.action is None:
            return "has nothing left to do"
        if sight.key is not None:
            return f"waits for {self._message(*sight.key)} (action {sight.action})"
        part = "" if sight.action.micro_batch is None else f", micro-batch {sight.action.micro_batch}"
        place = f"stage {self._stage(sight.action.stage)}{part} (action {sight.action})"
        return f"is in {sight.where}: {place}"

    def _message(self, kind: Kind | int, stage: int, micro_batch: int) -> str:
        """What a worker waits for, and who makes it."""
        schedule = self._step.schedule
        if kind is Kind.REDUCE_GRAD:
            return f"the gradients of stage {self._stage(stage)}{self._on(stage)}"
        if kind is Kind.F and micro_batch < 0:
            return f"the losses of stage {self._stage(stage)}{self._on(stage)}"
        if kind is Kind.F:
            maker = schedule.previous_stage(stage)
            what = "the output"
        elif kind is Kind.B:
            maker = schedule.next_stage(stage)
            what = "the gradients"
        else:
            return f"the gradient of a shared parameter for micro-batch {micro_batch}, from a later stage"
        of = "" if maker is None else f" of stage {self._stage(maker)}{self._on(maker)}"
        return f"{what}{of} for micro-batch {micro_batch}"

    def _stage(self, stage: int) -> str:
        schedule = self._step.schedule
        copy, own = divmod(stage, schedule.model_stages)
        return f"{own} of copy {copy}" if schedule.replicas > 1 else str(own)

    def _on(self, stage: int) -> str:
        return f" on {self._names[self._step.schedule.device_of[stage]]}"


class _Sight(NamedTuple):
    """What can be seen on a worker's stack.

    Attributes:
        action: that it does.
        key: of the message that it waits for.
        where: in the action it is, if it waits for none.
    """

    action: Action | None
    key: Any
    where: str


def _where(frames: Sequence[FrameType]) -> str:
    """Which part of its action a worker is in, by its stack, the innermost frame first."""
    for depth, frame in enumerate(frames):
        if frame.f_code is Stage.run_layers.__code__:
            return _forward(frame)
        if frame.f_code in _BACKWARDS:
            return _backward(frame, frames[:depth])
    return "its own part"


_BACKWARDS = (StageRun.backward.__code__, StageRun.backward_inputs.__code__)


def _forward(frame: FrameType) -> str:
    stage, running, turn = (frame.f_locals.get(name) for name in ("self", "running", "which"))
    assert isinstance(stage, Stage)
    which = "second forward" if turn is ForwardPass.SECOND else "forward"
    return f"the {which} of {stage.name(running)}" if running else f"the {which}"


def _backward(frame: FrameType, inside: Sequence[FrameType]) -> str:
    """A custom function's context, which is its node in the graph, tells the layer."""
    run, stash = frame.f_locals.get("self"), frame.f_locals.get("stash")
    assert isinstance(run, StageRun)
    nodes = [value for one in inside for value in one.f_locals.values() if isinstance(value, Node)]
    found = layers_of(stash.ends, [root.node for root in stash.roots], nodes) if stash else []
    return f"the backward of {run.stage.name(found)}" if found else "the backward"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
