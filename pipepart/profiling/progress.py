"""A progress bar on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(show: bool | None, text: str, after: float = 0.0) -> Iterator[Callable[[float], None]]:
    """Show a progress bar within the block, and yield a function that sets the fraction done, from 0 to 1.

    Args:
        show: False to show nothing; None to show the bar only if standard error is a terminal.
        text: the words beside the bar.
        after: seconds until the bar appears, so that work shorter than this shows no bar.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task, appears = bar.add_task(text, total=1.0), time.monotonic() + after

    def update(done: float) -> None:
        if time.monotonic() >= appears:
            bar.start()
        bar.update(task, completed=done)

    update(0.0)
    try:
        yield update
    finally:
        bar.stop()
