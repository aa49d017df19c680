"""A progress bar on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(show: bool | None, text: str) -> Iterator[Callable[[float], None]]:
    """Show a bar within the block, which gets a function to set the part that is done, from 0 to 1.

    Args:
        show: False to show nothing; None to show the bar only if standard error is a terminal.
        text: the words beside the bar.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=1.0)
        yield lambda done: bar.update(task, completed=done)
