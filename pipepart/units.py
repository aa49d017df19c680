"""Parses and formats sizes, bandwidths and times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeGuard

from .input_error import InputError

_BYTES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_MOST_BYTES = 2**53  # each number up to this one is exact as a float
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: int | str) -> int:
    """Parse bytes from ``"2GiB"``, ``"16 GB"``, ``"512MiB"`` or a plain number of bytes.

    Raises:
        ValueError: the text is no size, or the size is not positive, or above 8192 TiB.

    >>> parse_bytes("1.5KiB"), parse_bytes("16GB"), parse_bytes(300)
    (1536, 16000000000, 300)
    """
    if isinstance(text, str):
        match = _SIZE.fullmatch(text)
        if not match or match[2].upper() not in _BYTES:
            raise InputError(f"{text!r} is not a size: write for example '24GiB', '512MiB' or '16GB'")
        size = float(match[1]) * _BYTES[match[2].upper()]
    else:
        size = text
    if not 0 < size <= _MOST_BYTES:
        raise InputError(f"a size must be positive and at most {format_bytes(_MOST_BYTES)}, got {text!r}")
    return round(size) if isinstance(text, str) else int(text)


def parse_bandwidth(text: float | str) -> float:
    """Parse bytes per second from ``"12GB/s"``, ``"100Gbit/s"`` or a plain number of bytes per second.

    Raises:
        ValueError: the text is no bandwidth, or not positive.

    >>> parse_bandwidth("12GB/s"), parse_bandwidth("100Gbit/s")
    (12000000000.0, 12500000000.0)
    """
    if not isinstance(text, str):
        if text <= 0:
            raise InputError(f"a bandwidth must be positive, got {text!r}")
        return float(text)
    rate = text.strip().removesuffix("/s")
    try:
        if rate != text.strip():
            bits = rate.endswith("bit")
            return parse_bytes(rate.removesuffix("bit") + "B" if bits else rate) / (8 if bits else 1)
    except InputError:  # which calls it a size
        pass
    raise InputError(f"{text!r} is not a bandwidth: write for example '12GB/s' or '100Gbit/s'")


def counted(number: int, what: str, plural: str = "s") -> str:
    """Format a count with its noun, in the plural if needed.

    >>> counted(1, "stage"), counted(2, "stage"), counted(3, "micro-batch", "es")
    ('1 stage', '2 stages', '3 micro-batches')
    """
    return f"{number} {what}{'' if number == 1 else plural}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Join the first names with commas, and add the count of the others.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def format_bytes(size: float) -> str:
    """Format bytes for people.

    >>> format_bytes(0), format_bytes(1536), format_bytes(3 * 2**30)
    ('0 B', '1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """Format seconds for people.

    >>> format_seconds(0.0), format_seconds(0.00012), format_seconds(0.0345), format_seconds(2.5)
    ('0', '120 µs', '34.5 ms', '2.50 s')
    """
    if seconds == 0:
        return "0"
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.2f} s"


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Return True for a whole number from ``least`` on. True and 2.0 are no counts.

    >>> is_count(3), is_count(0), is_count(True), is_count(2.0)
    (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
