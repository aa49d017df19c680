"""Walks over the Python values that a model and its code hold: for keys, to find changes, and to put them back.

::

    model.blocks[0].count = 3              an attribute          holder "blocks.0", key "count"
    model.blocks[0].seen = [x]             what is in a list     holder "blocks.0.seen", key 0
    model.settings = Settings(scale=1.0)   an object             holder "settings", key "scale"
    self.noise = random.Random(0)          a generator           holder "noise", key "<state>"
"""

from __future__ import annotations

import logging
import random
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from enum import Enum
from functools import partial
from operator import is_
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from ....autograd.in_place import version
from ...hooks import CALL_HOOKS

PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, np.generic)
"""Values that nothing changes."""

CLOSED = (nn.Module, nn.Parameter, ModuleType, BuiltinFunctionType, logging.Logger)
"""Objects that are not looked into."""

COLLECTIONS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
"""Collections of Python itself; subclasses may do anything when they are used."""

DEPTH = 8
"""How many objects within each other are looked into."""

ITEMS = 4096
"""The size of the largest collection, array or tensor that is looked into."""

CONSTANT = (tuple, frozenset, MethodType)
"""Objects that are looked into, and always hold the same objects."""

UNCHANGED = (*CONSTANT, partial, FunctionType, ref)
"""Objects that are looked into, and that only what they hold can change."""

TABLES = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl", "dynamo_ctx"}
"""Attributes of a module that are torch's own; the last two hold compiled code."""

STATE = "<state>"
"""The key of the state of a generator of random numbers."""

_VALUES = "<values>"
_ATOMS = frozenset(kind for kind in PLAIN if kind not in (Enum, np.generic))
_STRUCTURAL = (dict, list, set, deque, tuple, frozenset, partial, MethodType, ref)
_COMPILER = ("torch._dynamo", "torch._functorch", "torch._inductor")

Contents = dict[Any, Any]


class Access(NamedTuple):
    """How the contents of an object are read, and put back."""

    read: Callable[[Any], Contents]
    write: Callable[[Any, Contents], None]


class Holder:
    """An object that holds values: a module, a list, a generator, the globals of a file.

    Args:
        above: the holder that has it, or the path of a module or name of a file.
        key: where that has it.
        owner: the object.
        access: to its contents.
        root: the module that holds it; None for globals, classes and closures.
        recorded: whether code that is recorded uses it.
        is_module: whether these are the attributes of the root.
    """

    __slots__ = ("above", "access", "is_module", "key", "owner", "recorded", "root")

    def __init__(
        self,
        above: Holder | str,
        key: Any,
        owner: Any,
        access: Access,
        root: nn.Module | None = None,
        recorded: bool = True,
        is_module: bool = False,
    ) -> None:
        self.above, self.key, self.owner, self.access = above, key, owner, access
        self.root, self.recorded, self.is_module = root, recorded, is_module

    @property
    def label(self) -> str:
        """How code writes it, from the model on."""
        return self.above if isinstance(self.above, str) else self.above.label_of(self.key)

    def label_of(self, key: Any) -> str:
        """Return how code writes one of its values."""
        label = self.label
        if isinstance(key, str) and key.isidentifier():
            return f"{label}.{key}" if label else key
        return f"{label}[{key!r:.20}]"

    def read(self) -> Contents:
        """Return what it holds."""
        return self.access.read(self.owner)


Found = list[tuple[Holder, Contents]]


def walk(roots: Iterable[Holder], closed: Iterable[int] = (), contexts: bool = True) -> Found:
    """Return the roots and all objects that they hold and that can be looked into, each once, with their contents.

    Args:
        roots: where to begin.
        closed: ids of objects that are not looked into.
        contexts: look into context variables.
    """
    seen = set(closed)
    found: Found = []
    level = list(roots)
    for depth in range(DEPTH + 1):
        below: list[Holder] = []
        for holder in level:
            contents = holder.read()
            found.append((holder, contents))
            for key, value in contents.items() if depth < DEPTH else ():
                if type(value) in _ATOMS or id(value) in seen or (access := access_to(value)) is None:
                    continue
                if not contexts and isinstance(value, ContextVar):
                    continue
                seen.add(id(value))
                below.append(Holder(holder, key, value, access, holder.root, holder.recorded))
        level = below
    return found


def unchanged(holder: Holder, was: Contents) -> bool:
    """Return True if a holder holds the same values in the same order."""
    now = holder.read()
    if [*now] != [*was]:
        return False
    return all(map(is_, now.values(), was.values())) or all(map(_equal, now.values(), was.values()))


def differing(now: Contents, was: Contents) -> Iterator[Any]:
    """Return the keys of the values that are different."""
    for key in {**was, **now}:
        one, other = was.get(key, MISSING), now.get(key, MISSING)
        if not _equal(one, other):
            yield key


MISSING = object()


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, (*PLAIN, Exactly, MethodType)):
        return bool(one == other or one != one)
    return False


class Same:
    """An object that equals itself only, and is kept, so that its id is not given to another."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Exactly:
    """A state that is compared by its bytes."""

    def __init__(self, value: Any) -> None:
        self.value = value
        held = value.numpy() if isinstance(value, Tensor) else value
        self.key = held.tobytes() if isinstance(held, np.ndarray | array) else repr(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exactly) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def key_of(found: Found) -> Hashable:
    """Return a key that is equal if all that was found is: numbers and collections are equal, objects are the same."""
    order: dict[int, int] = {}
    return tuple(
        [
            tuple([(_entry(key, order), _entry(value, order)) for key, value in contents.items()])
            for _, contents in found
        ]
    )


def value_key(value: Any) -> Hashable:
    """Return a key of a value and of all that it holds; tensors, modules and functions count as themselves."""
    if type(value) in _ATOMS:
        return type(value), value
    whole = Holder("", None, value, Access(lambda owner: {None: owner}, _leave))
    return key_of(walk([whole]))


def _entry(value: Any, order: dict[int, int]) -> Hashable:
    kind = type(value)  # isinstance() would ask objects with a __getattribute__ of their own
    if kind in _ATOMS or issubclass(kind, (*PLAIN, Exactly)):
        return kind, value
    if issubclass(kind, _STRUCTURAL):
        # Its contents are in the key, at a place of their own, unless it is too large.
        too_large = issubclass(kind, dict | list | set | deque) and len(value) > ITEMS
        return kind, order.setdefault(id(value), len(order)), Same(value) if too_large else None
    return Same(value)


def access_to(value: Any) -> Access | None:
    """Return the access to what an object holds; None if it is not looked into, is too large or holds nothing."""
    kind = type(value)
    if kind in _ATOMS or issubclass(kind, (*PLAIN, *CLOSED, Exactly)):
        return None
    if kind.__module__.startswith(_COMPILER):
        return None  # changes with every call
    if issubclass(kind, dict | list | set | deque):
        return _COLLECTION if len(value) <= ITEMS else None
    if issubclass(kind, type):
        return _CLASS if value.__module__ not in ("builtins", "torch") else None
    if issubclass(kind, FunctionType):
        holds = value.__closure__ or value.__defaults__ or value.__kwdefaults__
        return _FUNCTION if holds and not (value.__module__ or "").startswith(_COMPILER) else None
    for kinds, access in _KNOWN:
        if issubclass(kind, kinds):
            return access(value) if isinstance(access, FunctionType) else access
    return _OBJECT if attributes(value) else None


def attributes(value: Any) -> dict[str, Any]:
    """Return what an object has in slots and in its dict."""
    found = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
    return {**found, **vars(value)} if hasattr(value, "__dict__") else found


def is_filled(cell: CellType) -> bool:
    """Return True if the variable of a closure has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def module_holders(path: str, module: nn.Module) -> Iterator[Holder]:
    """Return the holders of a module's attributes, parameters, buffers and modules, and of what its hooks hold."""
    own = Holder(path, None, module, _MODULE, module, is_module=True)
    yield own
    for hook in (hook for table in CALL_HOOKS for hook in getattr(module, table).values()):
        if (access := access_to(hook)) is not None:
            yield Holder(own, getattr(hook, "__name__", "hook"), hook, access, module)


def names_holder(label: str, table: Any, names: Iterable[str], recorded: bool) -> Holder:
    """Return the holder of some of the globals of a file, or of the attributes of a class or module of Python."""
    names = tuple(names)
    is_table = isinstance(table, dict)

    def read(owner: Any) -> Contents:
        held = owner if is_table else vars(owner)
        return {name: held[name] for name in names if name in held}

    def write(owner: Any, was: Contents) -> None:
        if is_table:
            _rebind(owner, names, was)
        else:
            _rebind_class(owner, read(owner), was)

    return Holder(label, None, table, Access(read, write), recorded=recorded)


def closure_holder(name: str, cell: CellType, recorded: bool) -> Holder:
    """Return the holder of one variable of a closure."""

    def write(owner: Any, was: Contents) -> None:
        if was:
            owner.cell_contents = was[name]

    access = Access(lambda owner: {name: owner.cell_contents} if is_filled(owner) else {}, write)
    return Holder("", None, cell, access, recorded=recorded)


def _leave(owner: Any, was: Contents) -> None:
    """Leave it: nothing changes it, or ``bindings_restored`` writes it back."""


def _of_module(module: nn.Module) -> Contents:
    own = {name: value for name, value in vars(module).items() if name not in TABLES}
    return {**own, **module._parameters, **module._buffers, **module._modules}


def _of_collection(value: Any) -> Contents:
    if isinstance(value, dict):
        return dict(dict.items(value))  # a subclass may have an items() of its own
    return dict.fromkeys(value) if isinstance(value, set) else dict(enumerate(value))


def _fill(value: Any, was: Contents) -> None:
    value.clear()
    if isinstance(value, dict | set):
        value.update(was)
    else:
        value.extend(was.values())


def _of_function(value: FunctionType) -> Contents:
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    found: Contents = {name: cell.cell_contents for name, cell in cells if is_filled(cell)}
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    return {**found, **dict(enumerate(defaults))}


def _fill_cells(value: FunctionType, was: Contents) -> None:
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        if name in was and (not is_filled(cell) or cell.cell_contents is not was[name]):
            cell.cell_contents = was[name]


def _of_class(kind: type) -> Contents:
    return {name: item for name, item in vars(kind).items() if isinstance(item, PLAIN)}


def _fill_object(value: Any, was: Contents) -> None:
    slots = _slots(value)
    _rebind(getattr(value, "__dict__", {}), {**was, **attributes(value)}.keys() - slots, was)
    for name in slots:
        if name in was:
            object.__setattr__(value, name, was[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)


def _of_tensor(value: Tensor) -> Access | None:
    return None if value.is_meta else _TENSOR


def _of_array(value: Any) -> Access | None:
    return _ARRAY if value.size <= ITEMS and not value.dtype.hasobject else None


def _of_python_generator(value: random.Random) -> Access | None:
    return None if isinstance(value, random.SystemRandom) else _PYTHON_GENERATOR


_MODULE = Access(_of_module, _leave)
_COLLECTION = Access(_of_collection, _fill)
_FUNCTION = Access(_of_function, _fill_cells)
_CLASS = Access(_of_class, lambda kind, was: _rebind_class(kind, _of_class(kind), was))
_OBJECT = Access(attributes, _fill_object)
_TENSOR = Access(lambda tensor: {_VALUES: version(tensor)}, _leave)
_ARRAY = Access(
    lambda held: {_VALUES: Exactly(held.copy())}, lambda held, was: np.copyto(held, was[_VALUES].value)
)
_PYTHON_GENERATOR = Access(
    lambda drawn: {STATE: drawn.getstate()}, lambda drawn, was: drawn.setstate(was[STATE])
)
_KNOWN: tuple[tuple[Any, Any], ...] = (
    (Tensor, _of_tensor),
    (tuple | frozenset, Access(lambda held: dict(enumerate(held)), _leave)),
    (MethodType, Access(lambda held: {"__self__": held.__self__, "__func__": held.__func__}, _leave)),
    (partial, Access(lambda held: {"func": held.func, "args": held.args, "keywords": held.keywords}, _leave)),
    (ref, Access(lambda held: {"": held()}, _leave)),
    (ContextVar, Access(lambda held: {"": held.get(None)}, lambda held, was: held.set(was[""]) and None)),
    (array, Access(lambda held: {_VALUES: Exactly(held[:])}, lambda held, was: _fill_array(held, was))),
    (np.ndarray, _of_array),
    (random.Random, _of_python_generator),
    (
        torch.Generator | np.random.RandomState,
        Access(
            lambda drawn: {STATE: Exactly(drawn.get_state())},
            lambda drawn, was: drawn.set_state(was[STATE].value),
        ),
    ),
    (
        np.random.Generator,
        Access(
            lambda drawn: {STATE: Exactly(drawn.bit_generator.state)},
            lambda drawn, was: setattr(drawn.bit_generator, "state", was[STATE].value),
        ),
    ),
)


def _fill_array(held: array[Any], was: Contents) -> None:
    held[:] = was[_VALUES].value


def _slots(value: Any) -> set[str]:
    kinds = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = {name for slots in kinds for name in ((slots,) if isinstance(slots, str) else slots)}
    return names - {"__dict__", "__weakref__"}


def _rebind(table: dict[str, Any], names: Iterable[str], was: Contents) -> None:
    for name in names:
        if name in was:
            table[name] = was[name]
        else:
            table.pop(name, None)


def _rebind_class(kind: Any, now: Mapping[str, Any], was: Contents) -> None:
    for name in {**now, **was}:
        if name in was and now.get(name, MISSING) is not was[name]:
            setattr(kind, name, was[name])
        elif name not in was:
            delattr(kind, name)
