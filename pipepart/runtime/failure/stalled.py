"""Gives up a step in which no action ends any more, and reports what each worker runs or waits for.

Each worker records its current action. The caller's thread, which waits for the workers, reads these records from time
to time. No action runs twice in a step, so an action that is current at every reading has not ended.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from types import FrameType

from torch.autograd.graph import Node

from schedules import Action, Kind

from ...workers.worker import Worker
from ..stage import Stage
from ..stage_run import Stash
from ..step import Step
from .blame import layers_of

_LOOKS = 20  # per timeout

_PARTS = {
    Kind.F: "the forward",
    Kind.RECOMPUTE: "the second forward",
    Kind.B: "the backward",
    Kind.I: "the backward",
    Kind.W: "the backward for the weights",
    Kind.OPT_STEP: "the optimizer's step",
    Kind.REDUCE_GRAD: "the sum of gradients",
}


class StepTimeoutError(TimeoutError):
    """No action of a step has ended for as long as the pipeline's timeout."""


def check_timeout(timeout: float | None) -> None:
    """Check that a timeout is None or positive.

    Raises:
        ValueError: it is not positive.
    """
    if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout < float("inf")):
        raise ValueError(f"timeout is a number of seconds above 0, or None to wait for ever; got {timeout!r}")


class Watchdog:
    """Waits for the workers of one step, on the caller's thread.

    Args:
        timeout: seconds in which no action ends.
        step: that the workers run.
        workers: of all devices.
        names: of the devices.
    """

    def __init__(self, timeout: float, step: Step, workers: Sequence[Worker], names: Sequence[str]) -> None:
        self._timeout = timeout
        self._step = step
        self._workers = workers
        self._names = names
        self._seen: list[Action | None] = [None] * len(workers)
        self._since = [time.monotonic()] * len(workers)

    def wait(self, done: SimpleQueue[None]) -> None:
        """Wait until each worker has reported to ``done``.

        Raises:
            StepTimeoutError: no worker has ended an action for too long.
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
                if self._has_moved(now):
                    last = now
                elif now - last >= self._timeout:
                    raise self._error(now) from None

    def _has_moved(self, now: float) -> bool:
        """Return True if a worker is at another action than at the last look."""
        moved = False
        for worker, action in enumerate(self._step.current):
            if action is not self._seen[worker]:
                self._seen[worker], self._since[worker] = action, now
                moved = True
        return moved

    def _error(self, now: float) -> StepTimeoutError:
        lines = [f"no action has ended on any device for {self._timeout:g} s, the pipeline's timeout:"]
        notes = []
        for worker, name in enumerate(self._names):
            action, key = self._seen[worker], self._step.awaiting[worker]
            for_seconds = f", for {now - self._since[worker]:.3g} s"
            if action is None:
                lines.append(f"  {name} has nothing left to do")
            elif key is not None:
                lines.append(f"  {name} waits for {self._message(*key)} (action {action}){for_seconds}")
            else:
                stack = _stack_of(self._workers[worker])
                lines.append(f"  {name} is in {self._place(action, stack)}{for_seconds}")
                text = "".join(traceback.format_stack(stack[0])) if stack else ""
                notes.append(f"pipepart: the stack of {name}:\n{text.rstrip()}")
        error = StepTimeoutError("\n".join(lines))
        for note in notes:
            error.add_note(note)
        return error

    def _place(self, action: Action, stack: Sequence[FrameType]) -> str:
        layer = _layer(self._step.runs[action.stage].stage, stack)
        part = _PARTS[action.kind] + (f" of {layer}" if layer else "")
        which = "" if action.micro_batch is None else f", micro-batch {action.micro_batch}"
        return f"{part}: stage {self._stage(action.stage)}{which} (action {action})"

    def _message(self, kind: Kind | int, stage: int, micro_batch: int) -> str:
        """Describe a message by what it holds and who sends it."""
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


def _layer(stage: Stage, stack: Sequence[FrameType]) -> str:
    """Name the layer that runs by a worker's stack, the innermost frame first; "" if the stack does not tell.

    In a forward a frame belongs to the layer. In a backward the context of a custom autograd function, which is its
    node in the graph, tells the layer that made it.
    """
    stash = next((held for frame in stack if isinstance(held := frame.f_locals.get("stash"), Stash)), None)
    if stash is not None:
        nodes = [value for frame in stack for value in frame.f_locals.values() if isinstance(value, Node)]
        return stage.name(layers_of(stash.ends, [root.node for root in stash.roots], nodes))
    modules = [layer for _, layer in stage.layers]
    for frame in reversed(stack):
        for index, module in enumerate(modules):
            if frame.f_locals.get("self") is module:
                return stage.name((index,))
    return ""


def _stack_of(worker: Worker) -> list[FrameType]:
    current = sys._current_frames()
    try:
        return list(_outwards(current.get(worker.ident or 0)))
    finally:
        current.clear()  # it has this very frame, which would keep itself and all the others alive


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
