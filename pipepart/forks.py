"""Notifies objects that own threads after a fork, because a forked process has none of these threads."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

FORKED = (
    "this pipeline was made before the process was forked, and threads do not survive a fork: make the pipeline in "
    "this process, or start it by 'spawn'"
)


class Forked(Protocol):
    """An object that is notified of a fork."""

    def forked(self) -> None:
        """Called in the child before anything else runs there. Must not take locks: their holders do not exist."""
        ...


_LISTENERS: weakref.WeakSet[Forked] = weakref.WeakSet()


def listen_for_forks(listener: Forked) -> None:
    """Notify ``listener`` of forks, as long as it is alive."""
    _LISTENERS.add(listener)


def _tell() -> None:
    for listener in list(_LISTENERS):
        listener.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tell)
