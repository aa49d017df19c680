"""Progress of a measurement, shown when a terminal watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def watch(show: bool | None, what: str) -> Iterator[Callable[[float], None]]:
    """A bar on standard error; the block gets a function that takes the part done, from 0 to 1.

    Args:
        show: whether to; None to do so when standard error is a terminal.
        what: the words beside the bar.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda done: bar.update(task, completed=done)
