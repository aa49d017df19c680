"""Adds notes to a user's exception: the layer, and the stage, device and micro-batch."""

from __future__ import annotations

from contextlib import suppress

LAYER = "pipepart: "
PLACE = "pipepart: on "


def add_note(error: BaseException, note: str) -> None:
    """Add a note after the others. An exception whose class accepts no notes must arrive unchanged."""
    with suppress(Exception):  # whatever a user's class does there
        error.add_note(note)
