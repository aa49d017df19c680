"""Lists the trainings that must have the same bits on several ranks as in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pytest

Function = Callable[..., Mapping[str, Any]]


class Case(NamedTuple):
    """A training, called on so many ranks with these arguments."""

    processes: int
    function: Function
    args: tuple[Any, ...]
    slow: bool = False

    def __str__(self) -> str:
        said = "-".join(map(str, (self.function.__name__, *self.args)))
        return f"{said} on {self.processes}".replace("torch.", "")


CASES: dict[str, Case] = {}


def on(processes: int, *args: Any, slow: bool = False) -> Callable[[Function], Function]:
    """Decorate a function of a module to list it, called with these arguments on so many ranks."""

    def listed(function: Function) -> Function:
        case = Case(processes, function, args, slow)
        CASES[str(case)] = case
        return function

    return listed


def params(cases: Iterable[Case]) -> list[Any]:
    """Return the cases as parameters of a test, of which the slow ones are marked."""
    return [pytest.param(one, id=str(one), marks=pytest.mark.slow if one.slow else ()) for one in cases]
