"""Checks of the arguments of ``pipepart.check``."""

from __future__ import annotations

from collections.abc import Sequence

from ..input_error import InputError


def require(is_so: bool, otherwise: str) -> None:
    """Raise a ValueError with this text if a condition does not hold."""
    if not is_so:
        raise InputError(otherwise)


def require_known(what: str, name: str, known: Sequence[str]) -> None:
    """Raise a ValueError if a name is not among the known ones, which it lists."""
    require(name in known, f"{what} {name!r}: choose among {', '.join(known)}")
