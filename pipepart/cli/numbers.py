"""Numbers and words as options are given them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal, TypeVar

from .errors import Mistake

_Word = TypeVar("_Word", bound=str)


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


def parse_numbers(option: str, text: str, count: int) -> list[float]:
    """One number for all of ``count``, or one for each with commas between them.

    Raises:
        Mistake: the text is something else, or has another number of numbers.
    """
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise Mistake(
            f"{option} {text!r}: give one number for all stages, or one a stage as in 1,2,1"
        ) from None
    if not all(0 <= number < float("inf") for number in numbers):
        raise Mistake(f"{option} {text!r}: costs are finite and not negative")
    if len(numbers) not in (1, count):
        raise Mistake(f"{option} {text!r} has {len(numbers)} numbers for {count} stages: give 1 or {count}")
    return numbers * count if len(numbers) == 1 else numbers


def parse_choice(option: str, text: str, choices: Iterable[_Word]) -> _Word:
    """One of some words.

    Raises:
        Mistake: the text is none of them.
    """
    known = list(choices)
    for choice in known:
        if choice == text:
            return choice
    near = difflib.get_close_matches(text, known)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(known)}"
    raise Mistake(f"{option} {text!r}: {hint}")


def _count(option: str, part: str, whole: str, wanted: str) -> int:
    if not part.strip().isdecimal() or int(part) < 1:
        raise Mistake(f"{option} {whole!r}: give {wanted}")
    return int(part)
