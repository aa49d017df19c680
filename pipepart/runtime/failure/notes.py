"""Adds notes to a user's exception: the layer, and the stage, device and micro-batch."""

from __future__ import annotations

LAYER = "pipepart: "
PLACE = "pipepart: on "


def add_note(error: BaseException, note: str) -> None:
    """Add a note on the layer or the place. Notes of an earlier step are removed, as an object may be raised again."""
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list) and any(text.startswith(PLACE) for text in notes):
        notes[:] = [text for text in notes if not text.startswith(LAYER)]
    add_further(error, note)


def add_further(error: BaseException, note: str) -> None:
    """Add a note after the others. An exception whose class accepts no notes must arrive unchanged."""
    try:
        error.add_note(note)
    except Exception:  # whatever a user's class does there
        return
