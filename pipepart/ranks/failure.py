"""Serializes an exception of one rank, and builds the exception that the other ranks raise for it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_OF_THE_CPU = "can't allocate memory"  # in the RuntimeError that torch raises there
_BROKEN = ("/gloo/", "pair closure", "Connection closed by peer")  # in what gloo raises
_NOTE = "pipepart: "  # begins our notes: stage, layer, micro-batch
T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank has failed, is lost or has closed the pipeline. Its traceback, if it sent one, is in a note."""


class RankOutOfMemoryError(RankError, torch.OutOfMemoryError):
    """Another rank has run out of memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error of torch or Python that says that memory cannot be allocated, on any device."""
    if isinstance(error, RankError):
        return isinstance(error, RankOutOfMemoryError)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OF_THE_CPU in str(error)


def broke(error: BaseException) -> bool:
    """Return True for an error of torch.distributed that says that a connection to another rank broke."""
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, RankError):
        return False
    return any(text in str(error) for text in _BROKEN)


def attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None, str]:
    """Return the result of ``work``, or its error and the text for the other ranks, "" for none."""
    try:
        return work(), None, ""
    except Exception as error:
        return None, error, f"{type(error).__name__}: {error}"


def serialize_exception(error: BaseException) -> dict[str, Any]:
    """Convert an exception to JSON values: what it is, with our notes; its traceback; whether memory was missing.

    Never raises, whatever code the exception has.
    """
    what = type(error).__name__
    with suppress(Exception):  # the exception's own code may fail
        what += f": {text}" if (text := str(error)) else ""
    with suppress(Exception):
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)]
        short = [note.removeprefix(_NOTE) for note in notes if "\n" not in note]
        what += f" ({'; '.join(short)})" if short else ""
    text = what
    with suppress(Exception):
        text = "".join(traceback.format_exception(error))
    missing = False
    with suppress(Exception):
        missing = is_out_of_memory(error)
    return {"what": what, "traceback": text, "out_of_memory": missing}


def remote_exception(rank: int, report: dict[str, Any]) -> BaseException:
    """Build the exception from another rank's :func:`serialize_exception`; timeouts and out-of-memory stay such."""
    if report.get("late"):
        error: BaseException = TimeoutError(report["late"])
        for note in report["notes"]:
            error.add_note(note)
        return error
    kind = RankOutOfMemoryError if report.get("out_of_memory") else RankError
    error = kind(f"rank {rank} failed: {report['what']}")
    error.add_note(f"pipepart: on rank {rank}:\n{report['traceback'].rstrip()}")
    return error


def is_lost(rank: int) -> RankError:
    """Return the exception for a rank whose process has ended without a report."""
    return RankError(
        f"rank {rank} is lost: its process ended and left no message, as one that is killed does, or its host cannot "
        "be reached. Start the job again from the last checkpoint"
    )


def has_closed(rank: int, report: dict[str, Any]) -> RankError:
    """Return the exception for a call after another rank has closed the pipeline."""
    error = RankError(
        f"rank {rank} takes no part in this call: {report['why']}. All ranks make the same calls and close the "
        "pipeline after the same one"
    )
    if report.get("traceback"):
        error.add_note(f"pipepart: on rank {rank}:\n{report['traceback'].rstrip()}")
    return error
