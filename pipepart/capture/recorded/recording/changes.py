"""Finds what a recorded forward changes beside the tensors that it computes: attributes, lists, globals, generators.

A replay runs functions of torch and whole modules. What the Python code between them changes would happen while
recording only. What a whole module changes in itself is its own: the replay calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from types import TracebackType
from typing import NamedTuple

from torch import Tensor, nn

from ..python_state.contents import MISSING, Difference, Snapshot, differences
from ..python_state.places import STATE, Place
from ..python_state.surroundings import Surroundings
from ..refusal import SkeletonError
from .opening import Opening, is_called

_ADVICE = {
    "draws from": "Draw with torch and without a generator of its own, or in a module of its own",
    "leaves a value for others in": "Return it with the output, or give a loss that a module adds to pipepart.add_loss",
    "registers": "Register it in __init__, or call the model once before, on the longest sample",
}
_ELSE = (
    "Set it before the step, register a buffer and write it in place, or move that code into a module of its own, "
    "which is called as it is"
)


class Change(NamedTuple):
    """What the code between whole modules has done to one value.

    Attributes:
        path: of the open module that did it, as far as that can be told; empty for the model.
        kind: class of that module.
        what: the value, as in ``"self.count"`` or ``"scale of module 'blocks.0'"``.
        line: where its code names it; empty if it does not.
        found: the value before and after.
        tensor: what was set, if a tensor took the place of another or of None in an attribute of an open module.
    """

    path: str
    kind: str
    what: str
    line: str
    found: Difference
    tensor: Tensor | None = None

    def refused(self, does: str = "") -> SkeletonError:
        """Return the error that names it, with what the forward ``does`` to it."""
        does = does or ("draws from" if self.found.key == STATE else "sets" if self._is_bound else "changes")
        at = f" at {self.line}" if self.line else ""
        who = f"the forward of {self.path or 'the model'} ({self.kind})"
        error = SkeletonError(
            f"{who} {does} {self.what}{at}, which a replay would not repeat. {_ADVICE.get(does, _ELSE)}"
        )
        error.culprit = self.path
        return error

    @property
    def _is_bound(self) -> bool:
        return self.found.place.is_module or self.found.place.root is None

    @property
    def is_state(self) -> bool:
        """Whether it is a parameter or buffer of a module."""
        root = self.found.place.root
        return root is not None and self._is_bound and self.found.key in {**root._parameters, **root._buffers}


class Holders:
    """Which modules hold what a forward may change.

    Args:
        model: the user's.
        opening: which modules are whole.
        surroundings: the code of the open ones.
    """

    def __init__(self, model: nn.Module, opening: Opening, surroundings: Surroundings) -> None:
        self._model, self._surroundings = model, surroundings
        self._opened = {path: module for path, module in opening.opened() if is_called(module)}
        self._paths = {module: path for path, module in model.named_modules()}
        self._whole = {part for module in opening.whole for part in module.modules()}
        self._roots = opening.whole

    def is_open(self, place: Place) -> bool:
        """Return True if an open module or recorded code holds a place."""
        return place.recorded if place.root is None else place.root not in self._whole

    @cached_property
    def _reached(self) -> dict[int, set[str]]:
        """From which whole modules each holder of values can be reached, by its id."""
        found: dict[int, set[str]] = {}
        for module, path in self._roots.items():
            for place in Snapshot(module, self._surroundings.places((), module)).places:
                found.setdefault(id(place.owner), set()).add(path)
        return found

    def of(self, place: Place) -> set[str]:
        """Return the whole modules that hold a place."""
        return self._reached.get(id(place.owner), set())

    def change(self, found: Difference) -> Change:
        """Describe what the code between whole modules has changed."""
        place, key = found.place, found.key
        root = place.root
        path = "" if root is None else self._paths.get(root, "")
        whole = root in self._whole
        by = self._of_code(path, key) if whole or root is None else path
        module = self._opened.get(by, self._model)
        line = self._surroundings.code_of(module).line_of(key if place.is_module else _last(place.label, key))
        aside = isinstance(found.now, Tensor) and (
            found.was is MISSING or isinstance(found.was, Tensor | None)
        )
        what = _name(place, key, path, whole)
        change = Change(by, type(module).__name__, what, line, found)
        if aside and place.is_module and not whole and not change.is_state:
            assert isinstance(found.now, Tensor)
            return change._replace(tensor=found.now)
        return change

    def is_for_others(self, change: Change) -> bool:
        """Return True if the code between whole modules sets an attribute and never reads it."""
        place, key = change.found.place, change.found.key
        codes = (self._surroundings.code_of(module) for module in self._opened.values())
        return place.is_module and not change.is_state and not any(key in code.reads for code in codes)

    def common(self, paths: Iterable[str]) -> str:
        """Return the path of the smallest open module that holds all of these."""
        return next(
            path
            for path in self._outwards(next(iter(paths)))
            if all(f"{one}.".startswith(f"{path}." if path else "") for one in paths)
        )

    def _of_code(self, path: str, key: object) -> str:
        """Return the smallest open module around a path whose code names a key."""
        ways = (
            way for way in self._outwards(path) if key in self._surroundings.code_of(self._opened[way]).names
        )
        return next(ways, "")

    def _outwards(self, path: str) -> Iterator[str]:
        """Return the open modules around a path, the smallest first."""
        while path:
            path = path.rpartition(".")[0]
            if path in self._opened:
                yield path
        yield ""


class ChangeWatch:
    """Finds out whether whole modules themselves change what they hold, or others do.

    Args:
        places: what is changed in a forward.
        holders: the modules that hold it.
        again: whether this is the second forward in a row. What is only changed in the first one is set up once, so
            several modules may share it.
    """

    def __init__(self, places: Iterable[Place], holders: Holders, again: bool) -> None:
        self._last = [(place, place.read()) for place in places]
        self._holders, self._again = holders, again
        self._holding = {place: holders.of(place) for place, _ in self._last}

    def check_between(self) -> None:
        """Check that nothing has changed since the last call of a whole module.

        Raises:
            SkeletonError: the code between has changed it.
        """
        for place, was in self._last:
            for found in differences(place, was):
                change = self._holders.change(found)
                if change.tensor is None:
                    raise change.refused()

    def check_inside(self, path: str) -> None:
        """Check that a whole module has changed nothing but what it holds itself.

        Raises:
            SkeletonError: it has changed what another one holds.
        """
        for place, was in self._last:
            for found in differences(place, was):
                self._check_own(found, path)
        self._last = [(place, place.read()) for place, _ in self._last]

    def _check_own(self, found: Difference, path: str) -> None:
        if self._holders.is_open(found.place):
            if self._holders.change(found).tensor is not None:
                return
            others = {""}
        else:
            holders = self._holding[found.place]
            others = holders - {path} if self._again or path not in holders else set()
        if others:
            other = min(others)
            holder = f"module {other!r}" if other else "the model"
            also = "" if path not in self._holding[found.place] else f", which {holder} holds as well"
            error = SkeletonError(
                f"module {path!r} changes {self._holders.change(found).what}{also}: there may be another micro-batch "
                "between the two. Pass it as an argument and return it, or keep both in one module, which is called "
                "as it is"
            )
            error.culprit = self._holders.common([path, other])
            raise error


def innermost(error: BaseException, modules: Mapping[str, nn.Module]) -> str:
    """Return the path of the innermost of these modules whose forward raised an error; empty for the model."""
    paths = {id(module): path for path, module in modules.items()}
    found = ""
    at: TracebackType | None = error.__traceback__
    while at is not None:
        owner = at.tb_frame.f_locals.get("self")
        found = paths.get(id(owner), found)
        at = at.tb_next
    return found


def _name(place: Place, key: object, path: str, whole: bool) -> str:
    """Return how the user would write it."""
    inner = place.label.removeprefix(path).removeprefix(".")
    if place.is_module:
        return f"{key} of module {path!r}" if whole else f"self.{key}"
    if place.root is None:
        return f"{place.label}.{key}".removeprefix(".")
    return f"{inner} of module {path!r}" if whole else f"self.{inner}"


def _last(label: str, key: object) -> str:
    """Return the last name on the way to a value."""
    names = [key] if isinstance(key, str) and key.isidentifier() else []
    return str([*label.partition("[")[0].split("."), *names][-1])
