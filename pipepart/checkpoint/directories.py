"""The directories of a folder of checkpoints: one for each step, made current by a rename.

::

    step-12.tmp-3f09ab12/   is being written; or was when its process ended: a later save removes it
    step-12/                complete: every file and the directory were flushed before the rename
    step-13.broken-9b0d/    was found damaged when the training came to its step again; never read, never removed
    latest -> step-12       a symbolic link, for people and other programs
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_TEMPORARY = re.compile(r"(step-[0-9]+|latest)\.tmp-[0-9a-f]+")
LATEST = "latest"


def step_of(directory: Path) -> int | None:
    """Return the step in the name of a checkpoint directory; None for any other name."""
    match = _STEP.fullmatch(directory.name)
    return int(match[1]) if match else None


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """Return the steps and directories of complete checkpoints, the newest first."""
    if not folder.is_dir():
        return []
    steps = [(step_of(path), path) for path in folder.iterdir() if path.is_dir()]
    return sorted(((step, path) for step, path in steps if step is not None), reverse=True)


def begin(folder: Path, step: int) -> Path:
    """Make a temporary directory for a checkpoint, and its folder if needed.

    Those of earlier saves are removed: the processes that began them have ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            remove(path)
    directory = folder / f"step-{step}.tmp-{secrets.token_hex(4)}"
    directory.mkdir()
    return directory


def publish(directory: Path, keep: int | None) -> Path:
    """Rename a temporary directory to its final name, point ``latest`` to it, and keep only the newest ``keep``."""
    folder = directory.parent
    final = folder / directory.name.partition(".")[0]
    _flush(directory)
    directory.rename(final)
    link = folder / f"{LATEST}.tmp-{secrets.token_hex(4)}"
    link.symlink_to(final.name, target_is_directory=True)
    link.replace(folder / LATEST)
    _flush(folder)
    _flush(folder.parent)
    for _, old in steps_in(folder)[keep:] if keep else []:
        remove(_renamed(old, "tmp"))
    return final


def put_aside(broken: Path) -> Path:
    """Rename the directory of a damaged checkpoint, so that its step can be saved again."""
    return _renamed(broken, "broken")


def remove(path: Path) -> None:
    """Remove a temporary directory or link."""
    if path.is_symlink():
        os.unlink(path)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _renamed(path: Path, why: str) -> Path:
    return path.rename(path.with_name(f"{path.name}.{why}-{secrets.token_hex(4)}"))


def _flush(directory: Path) -> None:
    """Flush the entries of a directory to the disk. Without that, a power failure can lose its files."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
