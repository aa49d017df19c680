"""Prints reports on a terminal, in a file or in a pipe."""

from __future__ import annotations

import os
from typing import TextIO

from rich.console import Console, RenderableType

# Room for every column: a file is not read at the width of the terminal that made it.
_FILE_WIDTH = 240


def show(*reports: RenderableType, file: TextIO | None = None) -> None:
    """Print reports to ``file`` or standard output, with an empty line between them."""
    console = report_console(file)
    with console.capture() as captured:
        for index, report in enumerate(reports):
            if index:
                console.print()
            console.print(report)
    # Cells are filled up with spaces, which a terminal hides and a file keeps.
    text = "\n".join(line.rstrip() for line in captured.get().splitlines())
    print(text.encode(console.encoding, "replace").decode(console.encoding), file=console.file, flush=True)


def report_console(file: TextIO | None = None) -> Console:
    """Make a console for ``file``, by default standard output.

    A terminal gets colours and tables that fit it; a file or a pipe gets plain text with every column, unless the
    environment sets ``COLUMNS``.
    """
    console = Console(file=file, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_WIDTH
    return console
