"""Notes on a user's exception: the layer, the place in the pipeline, and what else there is to say."""

from __future__ import annotations

LAYER = "pipepart: "
PLACE = "pipepart: on "


def add_note(error: BaseException, note: str) -> None:
    """Adds the layer or the place; notes of an earlier step go first, for an exception object that is raised again."""
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list) and any(text.startswith(PLACE) for text in notes):
        notes[:] = [text for text in notes if not text.startswith(LAYER)]
    add_further(error, note)


def add_further(error: BaseException, note: str) -> None:
    """Adds a note behind the place. An exception whose class takes none must arrive as what it is."""
    try:
        error.add_note(note)
    except Exception:  # whatever a user's class does there
        return
