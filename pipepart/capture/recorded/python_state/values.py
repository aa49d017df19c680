"""Walks over the Python values that a model and its code hold, and computes keys to compare them.

::

    model.blocks[0].count = 3              an attribute          holder "blocks.0", key "count"
    model.blocks[0].seen = [x]             what is in a list     holder "blocks.0.seen", key 0
    model.settings = Settings(scale=1.0)   an object             holder "settings", key "scale"
    self.noise = random.Random(0)          a generator           holder "noise", key "<state>"
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import is_
from types import CellType, MethodType
from typing import Any
from weakref import ref

from torch import nn

from ...hooks import hooks_of
from .access import (
    ATOMS,
    MISSING,
    MODULE,
    PLAIN,
    Access,
    Contents,
    Exactly,
    access_to,
    bindings,
    is_filled,
    leave,
    rebind,
)

DEPTH = 8
"""How many objects within each other are looked into."""

_NOWHERE: Mapping[int, int] = {}
_STRUCTURAL = (dict, list, set, deque, tuple, frozenset, partial, MethodType, ref)


@dataclass(slots=True, eq=False)
class Holder:
    """An object that holds values: a module, a list, a generator, the globals of a file.

    Attributes:
        above: the holder that has it, or the path of a module or name of a file.
        key: where that has it.
        owner: the object.
        access: to its contents.
        root: the module that holds it; None for globals, classes and closures.
        recorded: whether code that is recorded uses it.
        is_module: whether these are the attributes of the root.
    """

    above: Holder | str
    key: Any
    owner: Any
    access: Access
    root: nn.Module | None = None
    recorded: bool = True
    is_module: bool = False

    @property
    def label(self) -> str:
        """The expression for the object in code, starting at the model."""
        return self.above if isinstance(self.above, str) else self.above.label_of(self.key)

    def label_of(self, key: Any) -> str:
        """Return the expression for one of its values in code."""
        label = self.label
        if isinstance(key, str) and key.isidentifier():
            return f"{label}.{key}" if label else key
        return f"{label}[{key!r:.20}]"

    def chain(self) -> Iterator[Holder]:
        """Return the holder, the one that has it, and so on up to the root of the walk."""
        holder: Holder | str = self
        while isinstance(holder, Holder):
            yield holder
            holder = holder.above

    def read(self) -> Contents:
        """Return what it holds."""
        return self.access.read(self.owner)

    def parts(self) -> Iterable[Any]:
        """Return objects that are the same ones, in the same order, only if it holds what it held before."""
        if self.access.parts is not None:
            return self.access.parts(self.owner)
        contents = self.read()
        return (*contents, *contents.values())


Found = list[tuple[Holder, Contents]]


def walk(
    roots: Iterable[Holder],
    closed: Iterable[int] = (),
    contexts: bool = True,
    others: Access | None = None,
) -> Found:
    """Return the roots and all objects reachable from them that can be inspected, each once, with their contents.

    Args:
        roots: where to begin.
        closed: ids of objects that are not looked into.
        contexts: look into the values of context variables.
        others: reads modules that are no roots; None to look into none.
    """
    level = list(roots)
    seen = {*closed, *(id(holder.owner) for holder in level if isinstance(holder.owner, nn.Module))}
    entries: Found = []
    for depth in range(DEPTH + 1):
        below: list[Holder] = []
        for holder in level:
            contents = holder.read()
            entries.append((holder, contents))
            closed_here = depth == DEPTH or (not contexts and type(holder.owner) is ContextVar)
            for key, value in () if closed_here else contents.items():
                kind = type(value)
                if kind in ATOMS or id(value) in seen:
                    continue
                access = others if issubclass(kind, nn.Module) else access_to(value)
                if access is None:
                    continue
                seen.add(id(value))
                below.append(Holder(holder, key, value, access, holder.root, holder.recorded))
        level = below
    return entries


def unchanged(holder: Holder, was: Contents) -> bool:
    """Return True if a holder holds the same values in the same order."""
    now = holder.read()
    if [*now] != [*was]:
        return False
    return all(map(is_, now.values(), was.values())) or next(differing(now, was), MISSING) is MISSING


def differing(now: Contents, was: Contents) -> Iterator[Any]:
    """Return the keys whose values differ."""
    for key in {**was, **now}:
        before, after = was.get(key, MISSING), now.get(key, MISSING)
        if before is not after and _entry(before) != _entry(after):
            yield key


class Same:
    """Wrapper that compares a value by identity, and keeps it alive so that its id stays unique."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def key_of(entries: Found) -> Hashable:
    """Return a key that compares numbers and collections by value, and other objects by identity."""
    places = {id(holder.owner): place for place, (holder, _) in enumerate(entries)}
    return tuple(
        [
            tuple([(_entry(key, places), _entry(value, places)) for key, value in contents.items()])
            for _, contents in entries
        ]
    )


def value_key(value: Any) -> Hashable:
    """Return a key of a value and its contents; tensors, modules and functions compare by identity."""
    if type(value) in ATOMS:
        return type(value), value
    whole = Holder("", None, value, Access(lambda owner: {None: owner}, leave))
    return key_of(walk([whole]))


def attribute_key(module: nn.Module, name: str) -> Hashable:
    """Return a key of an attribute of a module; None for a parameter, a buffer or a submodule."""
    if any(name in table for table in (module._parameters, module._buffers, module._modules)):
        return None
    return value_key(getattr(module, name, MISSING))


def _entry(value: Any, places: Mapping[int, int] = _NOWHERE) -> Hashable:
    """Return what stands for a value in a key. Two values are the same if their entries are equal.

    Args:
        value: the value.
        places: of the objects whose contents are in the key, by their ids.
    """
    kind = type(value)  # isinstance() would ask objects with a __getattribute__ of their own
    if kind in ATOMS or issubclass(kind, (*PLAIN, Exactly)):
        return kind, value if value == value else repr(value)  # NaN equals NaN
    if issubclass(kind, _STRUCTURAL) and id(value) in places:
        return kind, places[id(value)]
    if issubclass(kind, tuple):
        return kind, tuple([_entry(item, places) for item in value])
    return (kind, value) if kind is MethodType else Same(value)


def module_holders(path: str, module: nn.Module) -> Iterator[Holder]:
    """Return the holders of a module's attributes, parameters, buffers and submodules, and of its hooks' contents."""
    holder = Holder(path, None, module, MODULE, module, is_module=True)
    yield holder
    for hook in hooks_of(module):
        if (access := access_to(hook)) is not None:
            yield Holder(holder, getattr(hook, "__name__", "hook"), hook, access, module)


def names_holder(label: str, table: Any, names: Iterable[str], recorded: bool) -> Holder:
    """Return the holder of some globals of a file, or of some attributes of a class or Python module."""
    names = tuple(names)

    def read(owner: Any) -> Contents:
        held = bindings(owner)
        return {name: held[name] for name in names if name in held}

    def parts(owner: Any) -> Iterable[Any]:
        return map(bindings(owner).get, names, repeat(MISSING))

    access = Access(read, lambda owner, was: rebind(owner, names, was), parts)
    return Holder(label, None, table, access, recorded=recorded)


def closure_holder(name: str, cell: CellType, recorded: bool) -> Holder:
    """Return the holder of one variable of a closure."""

    def write(owner: Any, was: Contents) -> None:
        if was:
            owner.cell_contents = was[name]

    access = Access(lambda owner: {name: owner.cell_contents} if is_filled(owner) else {}, write)
    return Holder("", None, cell, access, recorded=recorded)
