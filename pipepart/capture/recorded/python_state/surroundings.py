"""Finds the values that Python code between recorded calls can read. If one changes, the model is recorded again.

::

    def forward(self, x):
        for block in self.blocks:               the modules of the model, in their order
            x = block(x) * block.gain           attributes of whole modules that this code names
            x = self.act(x) * self.scales[0]    attributes of open modules, and what is in them
            x = x * SCALE + offset              globals and closures that this code names
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import contains, is_
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from ...hooks import CALL_HOOKS, hooks_of
from .access import CONSTANT, MISSING, PLAIN, TABLES, Access, Contents, leave
from .code import Code, is_of_torch
from .snapshot import Snapshot
from .values import Found, Holder, Same, differing, key_of, unchanged, walk

_OF_ALL = frozenset(vars(nn.Module()))  # attributes of every module


class _Last(NamedTuple):
    """What was found last.

    Attributes:
        opened: the open modules.
        resting: holders whose parts stay the same objects while they do not change, with their contents.
        parts: those of all of them.
        moving: the other holders.
        key: the answer.
    """

    opened: Sequence[nn.Module]
    resting: Found
    parts: list[Any]
    moving: Found
    key: Hashable

    @classmethod
    def of(cls, opened: Sequence[nn.Module], entries: Found, key: Hashable) -> _Last:
        """Sort the holders by whether their parts are the same objects when they are asked twice."""
        sorted_: tuple[Found, Found] = [], []
        for entry in entries:
            sorted_[_same(_parts([entry]), _parts([entry]))].append(entry)
        moving, resting = sorted_
        return cls(opened, resting, _parts(resting), moving, key)


class Surroundings:
    """Finds the values that the forwards of a model's open modules can read. Their code is inspected once.

    Args:
        model: the user's.

    Attributes:
        changed: the value whose change has changed the key last, as an expression in the code; empty for other code.
    """

    def __init__(self, model: nn.Module) -> None:
        self.changed = ""
        self._model = model
        self._codes: dict[Any, Code] = {}
        self._called_by_name: dict[Any, None] = {}
        self._last = _NOTHING

    def state(self, opened: Sequence[nn.Module]) -> Hashable:
        """Return a key of these values, which changes if one of them changes."""
        last = self._last
        if last.opened == opened and all(unchanged(*entry) for entry in last.moving):
            if _same(_parts(last.resting), last.parts):
                return last.key
            if all(unchanged(*entry) for entry in last.resting):
                self._last = _Last.of(opened, [*last.resting, *last.moving], last.key)
                return last.key
        self.changed = next(_changes([*last.resting, *last.moving]), "")
        state = {id(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}
        entries = walk(self._read_by(opened), state)
        changing = [entry for entry in entries if not isinstance(entry[0].owner, CONSTANT)]
        self._last = _Last.of(opened, changing, key_of(entries))
        return self._last.key

    def holders(self, opened: Iterable[nn.Module], within: nn.Module | None = None) -> Iterator[Holder]:
        """Return the holders of globals, classes and closures that the code of open modules uses, then of all others.

        Args:
            opened: the open modules.
            within: a module whose parts are all the others; that of the model if None.
        """
        is_open = dict.fromkeys(opened)
        for module in is_open:
            yield from self.code_of(module).holders(recorded=True)
        for module in (self._model if within is None else within).modules():
            if module not in is_open and not is_of_torch(type(module)):
                yield from self.code_of(module).holders(recorded=False)

    def snapshot_of(self, part: nn.Module) -> Snapshot:
        """Return a snapshot of a part of the model, with what its code and its hooks name of modules it refers to."""
        return Snapshot(part, self.holders((), part), _of_other(frozenset(self.names_of(part) - TABLES)))

    def names_of(self, part: nn.Module) -> set[str]:
        """Return what the code and the hooks of a part of the model name."""
        names: set[str] = set()
        for module in part.modules():
            codes = [self._code(module, [hook]) for hook in hooks_of(module)]
            codes += [] if is_of_torch(type(module)) else [self.code_of(module)]
            names = names.union(*(code.names for code in codes))
        return names

    def code_of(self, module: nn.Module) -> Code:
        """Return the code of the forward of a module."""
        forward = getattr(module.forward, "__func__", module.forward)
        more = self._called_by_name if module is self._model else ()
        return self._code(module, [forward, type(module).__call__, *more])

    def follow(self, function: Any) -> None:
        """Count a function as part of the model's code, which has found it by a name that it computes."""
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType) and function not in self._called_by_name:
            self._called_by_name[function] = None
            self._last = _NOTHING

    def _code(self, module: nn.Module, functions: Sequence[Any]) -> Code:
        kinds = tuple(dict.fromkeys(type(part) for part in module.modules() if not is_of_torch(type(part))))
        held = {name: value for name, value in vars(module).items() if name not in TABLES}
        held = {name: value for name, value in held.items() if not isinstance(value, PLAIN)}
        called = [Same(value) if callable(value) else type(value) for value in held.values()]
        key = type(module), kinds, *map(Same, functions), *held, *called
        if key not in self._codes:
            self._codes[key] = Code([type(module), *kinds], functions, held)
        return self._codes[key]

    def _read_by(self, opened: Sequence[nn.Module]) -> Iterator[Holder]:
        """Return the holders of what the code of open modules can read."""
        names: set[str] = set()
        codes = {self.code_of(module): None for module in opened}
        for code in codes:
            names |= code.names
        for module in opened:
            yield Holder("", None, module, _of_open(self.code_of(module).names), module)
        for code in codes:
            yield from code.holders(recorded=True)
        functions = [function for code in codes for function in code.functions]
        defaults = Access(lambda _: {function: function.__defaults__ for function in functions}, leave)
        yield Holder("", None, self._model, defaults)
        is_open = set(opened)
        others = [vars(module) for module in self._model.modules() if module not in is_open]
        yield Holder("", None, self._model, _of_whole(others, frozenset(names - TABLES)))
        if "requires_grad" in names:
            yield Holder("", None, self._model, Access(_trained, leave))


_NOTHING = _Last((), [], [], [], None)


def _changes(entries: Found) -> Iterator[str]:
    """Return the values that differ, as expressions in the code."""
    for holder, was in entries:
        for key in differing(holder.read(), was):
            yield holder.label_of(key[-1] if isinstance(key, tuple) else key)


def _parts(entries: Found) -> list[Any]:
    """Return the parts of holders, each after its holder."""
    parts: list[Any] = []
    for holder, _ in entries:
        parts.append(holder)
        parts += holder.parts()
    return parts


def _same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))


def _of_open(names: set[str]) -> Access:
    """Return the access to what the forward of an open module may read of that module."""

    def read(module: nn.Module) -> Contents:
        attributes = vars(module)
        contents = {
            name: value
            for name, value in attributes.items()
            if name not in TABLES and (name in names or name == "config" or isinstance(value, PLAIN))
        }
        for table in CALL_HOOKS:
            if attributes[table]:
                contents[table] = (*attributes[table].values(),)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            contents[f"{name} is set"] = tensor is not None
        contents |= module._modules
        return contents | {
            "<class>": type(module),
            "<forward>": getattr(module.forward, "__func__", module.forward),
        }

    return Access(read, leave)


def _of_whole(modules: Sequence[dict[str, Any]], names: frozenset[str]) -> Access:
    """Return the access to the attributes of whole modules that code names. One holder has those of all modules."""
    # Where attributes are, and their names: those that code names, and the others that not every module has.
    named: tuple[list[dict[str, Any]], list[str]] = [], []
    others: tuple[list[dict[str, Any]], list[str]] = [], []

    def read(owner: Any) -> Contents:
        contents = {
            (place, name): attributes[name]
            for place, attributes in enumerate(modules)
            for name in names.intersection(attributes)
        }
        named[0][:], named[1][:] = [modules[place] for place, _ in contents], [name for _, name in contents]
        pairs = [(table, name) for table in modules for name in table.keys() - names - _OF_ALL]
        others[0][:], others[1][:] = [table for table, _ in pairs], [name for _, name in pairs]
        return contents

    def parts(owner: Any) -> Iterable[Any]:
        # No attribute was added if there are as many as before, and all of those.
        return chain(map(len, modules), map(contains, *others), map(dict.get, *named, repeat(MISSING)))

    return Access(read, leave, parts)


def _of_other(names: frozenset[str]) -> Access:
    """Return the access to what code may read of a module that it refers to."""

    def read(module: nn.Module) -> Contents:
        is_container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        parts = {name: part for name, part in module._modules.items() if is_container or name in names}
        return _named(vars(module), names) | parts

    return Access(read, leave)


def _named(attributes: dict[str, Any], names: frozenset[str]) -> Contents:
    return {name: attributes[name] for name in names.intersection(attributes)}


def _trained(model: nn.Module) -> Contents:
    return dict(enumerate([parameter.requires_grad for parameter in model.parameters()]))
