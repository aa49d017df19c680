"""Writes files that survive a power failure, and computes their hashes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from .manifest import FileRecord


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file and flush it to the disk; return its size and hash.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    digest = hashlib.sha256()
    size = 0
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(bytes=size, sha256=digest.hexdigest())


def flush_directory(path: Path) -> None:
    """Flush the entries of a directory to the disk. Without that, a power failure can lose its files."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
