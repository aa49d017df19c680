"""Finds the side effects of a recorded forward: changed attributes, lists, globals and generators.

A replay runs functions of torch and whole modules. What the Python code between them changes would happen while
recording only. What a whole module changes in itself is its own: the replay calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..python_state.access import MISSING, STATE
from ..python_state.snapshot import Difference, Snapshot
from ..python_state.surroundings import Surroundings
from ..python_state.values import Holder
from ..refusal import SkeletonError
from .opening import Opening, is_called

_DRAW = "Draw with torch and without a generator of its own, or in a module of its own"
RETURN = "Return it with the output, or give a loss that a module adds to pipepart.add_loss"
REGISTER = "Register it in __init__, or call the model once before, on the longest sample"
_SET = (
    "Set it before the step, register a buffer and write it in place, or move that code into a module of its own, "
    "which is called as it is"
)
_BETWEEN = (
    "another micro-batch may be between the two. Pass it as an argument and return it, or keep all that use it in one "
    "module, which is called as it is"
)


class Change(NamedTuple):
    """A value changed by a forward, outside of the calls of the module that holds it.

    Attributes:
        path: of the open module that did it, or is around those that may have.
        kind: class of that module.
        what: the value, as in ``"self.count"`` or ``"scale of module 'blocks.0'"``.
        difference: the value before and after.
        of_whole: whether a whole module holds it.
        by_whole: whether another whole module that holds it as well has changed it.
    """

    path: str
    kind: str
    what: str
    difference: Difference
    of_whole: bool
    by_whole: bool

    def refused(self, does: str = "", instead: str = "") -> SkeletonError:
        """Return the error that names the changed value.

        Args:
            does: what the forward does to it; found out if empty.
            instead: what to write; found out if empty.
        """
        holder, draws = self.difference.holder, self.difference.key == STATE
        if self.of_whole:
            text = (
                f"{self.what} changes outside of the calls of that module, in another one or in the code around it: "
                f"{_BETWEEN}"
            )
        else:
            binds = holder.is_module or holder.root is None
            does = does or ("draws from" if draws else "sets" if binds else "changes")
            instead = instead or (_DRAW if draws else _SET)
            text = (
                f"the forward of {self.path or 'the model'} ({self.kind}) {does} {self.what}, which a replay would not "
                f"repeat. {instead}"
            )
        return self._error(text)

    def refused_outside(self) -> SkeletonError:
        """Return the error for a value that a whole module changes and the code between whole modules reads."""
        return self._error(
            f"{self.what} changes in the calls of that module and is read outside of them: {_BETWEEN}"
        )

    @property
    def is_attribute(self) -> bool:
        """True for an attribute of an open module that is neither a parameter nor a buffer."""
        return self.difference.holder.is_module and not self.of_whole and not self.is_state

    @property
    def is_state(self) -> bool:
        """True for a parameter or buffer of a module."""
        holder, root = self.difference.holder, self.difference.holder.root
        if root is None or not holder.is_module:
            return False
        return self.difference.key in {**root._parameters, **root._buffers}

    def _error(self, text: str) -> SkeletonError:
        error = SkeletonError(text)
        error.culprit = self.path
        return error

    @property
    def tensor(self) -> Tensor | None:
        """The tensor that replaced a tensor or None in an attribute of an open module; None for other changes."""
        was, now = self.difference.was, self.difference.now
        fits = isinstance(now, Tensor) and (was is MISSING or isinstance(was, Tensor | None))
        return now if fits and self.is_attribute else None


class Changes:
    """Finds the values of a model that change during one forward.

    Args:
        model: the user's.
        opening: which modules are whole.
        surroundings: the code of the open ones.
        before: the values before the forward.

    Attributes:
        changing: paths of whole modules that change what they hold in their own calls.
        codes: of the open modules, the code between whole modules.
        names: all that it names.
    """

    def __init__(
        self, model: nn.Module, opening: Opening, surroundings: Surroundings, before: Snapshot
    ) -> None:
        self._model, self._surroundings, self._before = model, surroundings, before
        self._opening = opening
        self._opened = {path: module for path, module in opening.opened() if is_called(module)}
        self.codes = [surroundings.code_of(module) for module in self._opened.values()]
        self.names = set[str]().union(*(code.names for code in self.codes))
        self._paths = {module: path for path, module in model.named_modules()}
        self._whole = {part for module in opening.whole for part in module.modules()}
        self._own = {path: self._snapshot(module) for module, path in opening.whole.items()}
        self.changing: set[str] = set()
        self._found: dict[tuple[str, str], Change] = {}
        self._by_whole: set[tuple[int, Any]] = set()  # ids of owners, and keys
        self._open = {id(holder.owner) for holder, _ in before.found if self._is_open(holder)}

    def check_before(self, module: nn.Module, path: str) -> None:
        """Note the values of a module that have changed since its last call."""
        if differences := self._own[path].differences():
            self._note_of(module, differences)
            self._own[path] = self._snapshot(module)

    def accept_after(self, module: nn.Module, path: str) -> None:
        """Accept the changes that a module makes to its values within its own call."""
        if differences := self._own[path].differences():
            self._by_whole.update(
                _place(difference)
                for difference in differences
                if not difference.is_of_another or id(difference.holder.owner) in self._open
            )
            self.changing.add(path)
            self._own[path] = self._snapshot(module)

    def all(self) -> list[Change]:
        """Return the values that have changed in the forward, outside of the calls of the modules that hold them."""
        for module, path in self._opening.whole.items():
            self._note_of(module, self._own[path].differences())
        for difference in self._before.differences():
            if self._is_open(difference.holder):
                self._note(self._change(difference, of_whole=False))
        return [*self._found.values()]

    def inside(self) -> list[Change]:
        """Return the values that whole modules have changed, in their own calls if :meth:`all` has not found them."""
        differences = [
            difference for difference in self._before.differences() if not self._is_open(difference.holder)
        ]
        return [self._change(difference, of_whole=True) for difference in differences]

    def is_for_others(self, change: Change) -> bool:
        """Return True if the code between whole modules sets an attribute and never reads it."""
        return change.is_attribute and not any(change.difference.key in code.reads for code in self.codes)

    def _note_of(self, module: nn.Module, differences: Sequence[Difference]) -> None:
        """Note the changes of what a whole module holds, outside of its calls.

        What open code holds as well and alone has changed counts if the module names it.
        """
        names = self._surroundings.names_of(module) if differences else set[str]()
        for difference in differences:
            change = self._change(difference, of_whole=True)
            owner = difference.holder.owner
            reads = not names.isdisjoint(difference.names)
            if change.by_whole or reads or id(owner) not in self._open:
                self._note(change)

    def _note(self, change: Change) -> None:
        self._found.setdefault((change.path, change.what), change)

    def _snapshot(self, module: nn.Module) -> Snapshot:
        return self._surroundings.snapshot_of(module)

    def _is_open(self, holder: Holder) -> bool:
        return holder.recorded if holder.root is None else holder.root not in self._whole

    def _change(self, difference: Difference, of_whole: bool) -> Change:
        holder, key = difference.holder, difference.key
        path = "" if holder.root is None else self._paths.get(holder.root, "")
        by = path
        while by and (by not in self._opened or (by == path and of_whole)):
            by = by.rpartition(".")[0]
        name = _name(holder, key, path, of_whole)
        kind = type(self._opened.get(by, self._model)).__name__
        return Change(by, kind, name, difference, of_whole, _place(difference) in self._by_whole)


def innermost(error: BaseException, modules: Mapping[str, nn.Module]) -> str:
    """Return the path of the innermost module whose forward raised an error; empty for the model."""
    paths = {id(module): path for path, module in modules.items()}
    deepest = ""
    at: TracebackType | None = error.__traceback__
    while at is not None:
        owner = at.tb_frame.f_locals.get("self")
        deepest = paths.get(id(owner), deepest)
        at = at.tb_next
    return deepest


def _place(difference: Difference) -> tuple[int, Any]:
    return id(difference.holder.owner), difference.key


def _name(holder: Holder, key: object, path: str, of_whole: bool) -> str:
    """Return how the user would write it. Of an object the object is named."""
    if holder.root is None:
        return holder.label_of(key)
    inner = str(key) if holder.is_module else holder.label.removeprefix(path).removeprefix(".")
    return f"{inner} of module {path!r}" if of_whole else f"self.{inner}"
