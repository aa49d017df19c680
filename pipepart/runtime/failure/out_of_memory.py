"""Reports out-of-memory failures as one type of error with the prediction of the plan, and frees the memory.

A traceback keeps the local variables of every frame that the error passed, and so the activations of a layer. A caller
who catches the error and tries a smaller mini-batch needs that memory, so the frames are cleared.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from ...planning import Plan
from ...ranks.failure import RankError, is_out_of_memory
from ...units import format_bytes
from ..step import Step
from .notes import add_note

P = ParamSpec("P")
R = TypeVar("R")

_WHAT_TO_DO = (
    "pipepart: a smaller mini-batch works as it is; to hold less, plan with more micro-batches, with "
    "recompute='always', with another schedule, or for devices of less memory, for which pipepart.plan makes it fit"
)


def explained(step: Step, plan: Plan) -> BaseException:
    """Return the failure of a step; out of memory becomes ``torch.OutOfMemoryError`` with notes.

    The local variables of the frames in its traceback are cleared in that case.
    """
    failure = step.failure
    assert failure is not None
    if isinstance(failure, RankError) or not is_out_of_memory(failure):
        return failure  # of another rank's memory there is nothing to tell here
    if not isinstance(failure, torch.OutOfMemoryError | MemoryError):
        failure = _as_torch_error(failure)
    for note in _planned(step.failed_on, plan):
        add_note(failure, note)
    _clear_frames(failure)
    return failure


def public_call(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a method that users call: what it raises leaves nothing behind.

    An out-of-memory error keeps no local variables alive. Gradients are enabled as before: an interrupt that arrives
    while ``torch.no_grad`` is entered or left is raised inside of torch, which does not put them back.
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        enabled = torch.is_grad_enabled()
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            torch._C._set_grad_enabled(enabled)
            if isinstance(error, torch.OutOfMemoryError | MemoryError):
                _clear_frames(error)
            raise

    return called


def _as_torch_error(error: BaseException) -> torch.OutOfMemoryError:
    """The same error as torch.OutOfMemoryError: on the CPU torch raises a plain RuntimeError."""
    as_torch = torch.OutOfMemoryError(*error.args).with_traceback(error.__traceback__)
    for note in getattr(error, "__notes__", ()):
        as_torch.add_note(note)
    as_torch.__cause__ = error
    return as_torch


def _planned(worker: int | None, plan: Plan) -> Iterator[str]:
    """Yield what the plan predicts for the device that failed, and what a user can do."""
    peaks = plan.prediction.memory_bytes if plan.prediction else ()
    predicted = dict(zip((each.name for each in plan.cluster.devices), peaks, strict=False))
    device = None if worker is None else plan.workers[worker]
    if device and device.name in predicted:
        limit = f", taken to have {format_bytes(device.memory_bytes)}" if device.memory_bytes else ""
        yield f"pipepart: the plan predicts at most {format_bytes(predicted[device.name])} on {device.name}{limit}"
    yield _WHAT_TO_DO


def _clear_frames(error: BaseException) -> None:
    """Clear the local variables of all frames in the tracebacks of an error and its causes."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        for frame, _ in traceback.walk_tb(current.__traceback__):
            _ = (
                frame.f_locals
            )  # Python caches a frame's locals once they were read; reading them again drops the cache
        waiting += [current.__cause__, current.__context__]
