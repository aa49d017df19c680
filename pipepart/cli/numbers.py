"""Numbers as options are given them."""

from __future__ import annotations

from typing import Literal

from .mistakes import Mistake


def parse_counts(option: str, text: str) -> list[int]:
    """One number of at least 1, or several with commas between them.

    Raises:
        Mistake: the text is something else.
    """
    return [
        _count(option, part, text, "a number of at least 1, or several as in 2,4,8")
        for part in text.split(",")
    ]


def parse_count(option: str, text: str) -> int | Literal["auto"]:
    """A number of at least 1, or ``"auto"``.

    Raises:
        Mistake: the text is something else.
    """
    return "auto" if text == "auto" else _count(option, text, text, "a number of at least 1, or auto")


def _count(option: str, part: str, whole: str, wanted: str) -> int:
    if not part.strip().isdecimal() or int(part) < 1:
        raise Mistake(f"{option} {whole!r}: give {wanted}")
    return int(part)
