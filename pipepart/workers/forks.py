"""Tells what lives by threads that it has been carried into a forked process, where its threads are not."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

FORKED = (
    "this pipeline was made before the process was forked, and threads do not survive a fork: make the pipeline in "
    "this process, or start it by 'spawn'"
)


class Forked(Protocol):
    """What wants to know."""

    def forked(self) -> None:
        """In the child, before anything else runs there; no lock may be asked for: who held it is gone."""
        ...


_LISTENERS: weakref.WeakSet[Forked] = weakref.WeakSet()


def listen_for_forks(listener: Forked) -> None:
    """Has ``listener`` be told, for as long as it lives."""
    _LISTENERS.add(listener)


def _tell() -> None:
    for listener in list(_LISTENERS):
        listener.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tell)
