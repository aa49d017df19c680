"""Notes on a user's exception: first the layer, then the place in the pipeline."""

from __future__ import annotations

LAYER = "pipepart: "
PLACE = "pipepart: on "


def add_note(error: BaseException, note: str) -> None:
    """Adds a note; those of an earlier step go first, for an exception object that is raised again."""
    notes = getattr(error, "__notes__", [])
    if notes and notes[-1].startswith(PLACE):
        error.__notes__ = [text for text in notes if not text.startswith(LAYER)]
    error.add_note(note)
