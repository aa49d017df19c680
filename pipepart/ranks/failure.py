"""What one rank tells the others of an exception, and the exception that they raise for it."""

from __future__ import annotations

import traceback
from contextlib import suppress
from typing import Any

_MOST = 1 << 16  # characters of a traceback; the middle of a longer one is left out
_NOTE = "pipepart: "  # begins our notes: stage, layer, micro-batch


class RankError(RuntimeError):
    """Another rank has failed, is lost or has closed the pipeline. Its traceback, if it sent one, is in a note."""


def told(error: BaseException) -> dict[str, str]:
    """Return an exception as text: ``what`` it is, with our notes, and its ``traceback``. Never raises."""
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
    return {"what": _cut(what, _MOST // 4), "traceback": _cut(text, _MOST)}


def raised_on(rank: int, story: dict[str, Any]) -> BaseException:
    """Return the exception for what another rank has :func:`told`: a timeout stays one."""
    if story.get("late"):
        error: BaseException = TimeoutError(story["late"])
        for note in story["notes"]:
            error.add_note(note)
        return error
    error = RankError(f"rank {rank} failed: {story['what']}")
    error.add_note(f"pipepart: on rank {rank}:\n{story['traceback'].rstrip()}")
    return error


def is_lost(rank: int) -> RankError:
    """Return the exception for a rank whose process has ended without a word."""
    return RankError(
        f"rank {rank} is lost: its process ended and left no message, as one that is killed does, or its host cannot "
        "be reached. Start the job again from the last checkpoint"
    )


def has_closed(rank: int, story: dict[str, Any]) -> RankError:
    """Return the exception for a call that a rank does not make any more."""
    error = RankError(
        f"rank {rank} takes no part in this call: {story['why']}. All ranks make the same calls and close the pipeline "
        "after the same one"
    )
    if story.get("traceback"):
        error.add_note(f"pipepart: on rank {rank}:\n{story['traceback'].rstrip()}")
    return error


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
