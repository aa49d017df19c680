"""Saves simulated steps in files, in the format of each file's suffix."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UsageError
from .output import write_bytes, write_text

if TYPE_CHECKING:
    from .played import Played

_WIDTH = 900  # pixels of a picture
_CONTENTS = {
    ".svg": "a picture",
    ".png": "a picture",
    ".csv": "the schedule",
    ".json": "the figures that --json prints",
}


def check_suffixes(files: Sequence[Path], schedules: int) -> None:
    """Check that each file can be written, before anything is simulated.

    Args:
        files: of ``-o``.
        schedules: how many are simulated.

    Raises:
        UsageError: a suffix is unknown, a CSV would hold several schedules, or Pillow is missing.
    """
    for file in files:
        if file.suffix not in _CONTENTS:
            known = ", ".join(f"{suffix} ({what})" for suffix, what in _CONTENTS.items())
            raise UsageError(f"-o {file}: the suffix says what to save, give one of {known}")
        if file.suffix == ".csv" and schedules > 1:
            raise UsageError(f"-o {file} holds one schedule, and {schedules} are given: save each by itself")
        if file.suffix == ".png" and find_spec("PIL") is None:
            raise UsageError(f"-o {file} needs Pillow: pip install 'pipepart[png]', or save a .svg")


def write_simulated(files: Sequence[Path], played: Sequence[Played], result: str) -> None:
    """Write each file.

    Args:
        files: of ``-o``.
        played: the simulated steps; several share a picture.
        result: the figures as JSON.

    Raises:
        UsageError: a file cannot be written, or the steps are too large for a picture.
    """
    from schedules.pictures.layout import PictureError
    from schedules.pictures.svg import to_svg

    for file in files:
        if file.suffix in (".svg", ".png"):
            panels = [each.panel for each in played]
            try:
                if file.suffix == ".svg":
                    write_text(file, to_svg(panels, _WIDTH, None))
                else:
                    from schedules.pictures.png import to_png

                    write_bytes(file, to_png(panels, _WIDTH, None))
            except PictureError as error:
                raise UsageError(f"-o {file}: {error}") from None
        elif file.suffix == ".csv":
            write_text(file, played[0].timeline.schedule.to_csv())
        elif file.suffix == ".json":
            write_text(file, result + "\n")
