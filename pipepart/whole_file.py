"""Writes files atomically: neither a reader nor a crash can leave half a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a temporary file in the same folder and rename it to ``path``, which is atomic.

    A link is followed. A stream, such as ``/dev/stdout``, is written directly.

    Args:
        path: the file.
        content: bytes, or text to write as UTF-8.

    Raises:
        OSError: the file cannot be written; what was there is unchanged.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    if is_stream(path):
        with open(path, "wb") as file:
            file.write(data)
        return
    target = Path(path).resolve()
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(13, os.strerror(13), str(path))
    handle, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(beside, _mode(target))
        os.replace(beside, target)
    except BaseException:
        os.unlink(beside)
        raise


def is_stream(path: str | Path) -> bool:
    """Return True for an existing path that is no regular file, such as ``/dev/stdout`` or a named pipe."""
    # Not of the resolved path: that of /dev/stdout does not exist if it is a pipe.
    return Path(path).exists() and not Path(path).is_file()


def _mode(target: Path) -> int:
    """The permissions of the file that is there, or those that a new file gets."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
