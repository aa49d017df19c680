"""Remembers the Python values that a model holds, to find out and to undo what a forward changes in them.

::

    model.blocks[0].count = 3              an attribute          Place "blocks.0", key "count"
    model.blocks[0].seen = [x]             what is in a list     Place "blocks.0.seen", key 0
    model.settings = Settings(scale=1.0)   an object             Place "settings", key "scale"
    self.noise = random.Random(0)          a generator           Place "noise", key "state"
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from ...hooks import CALL_HOOKS
from .places import DEPTH, PLAIN, Contents, Exactly, Place, held_by, module_place, place_of


class Difference:
    """One value that has changed.

    Attributes:
        place, key: where.
        was, now: the values; MISSING for none.
    """

    __slots__ = ("key", "now", "place", "was")

    def __init__(self, place: Place, key: Any, was: Any, now: Any) -> None:
        self.place, self.key, self.was, self.now = place, key, was, now


MISSING = object()
_NOTHING = (*PLAIN, nn.Module)  # what needs no look


class Snapshot:
    """The values that a model holds at one time.

    Args:
        model: the user's.
        around: other places that its code uses.

    Attributes:
        held: label of each object that a module holds, by its id. Tensors that globals hold count, too; parameters and
            buffers do not.
    """

    def __init__(self, model: nn.Module, around: Iterable[Place] = ()) -> None:
        self._found: list[tuple[Place, Contents]] = []
        self.held: dict[int, str] = {}
        seen = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        for path, module in model.named_modules():
            place = module_place(path, module)
            self._add(place, seen, DEPTH)
            for hook in (hook for table in CALL_HOOKS for hook in getattr(module, table).values()):
                self._look_into(f"{path}.{getattr(hook, '__name__', 'hook')}", place, hook, seen, DEPTH)
        for place in around:
            self._add(place, seen, DEPTH)

    @property
    def places(self) -> list[Place]:
        """Where values were found."""
        return [place for place, _ in self._found]

    def differences(self) -> list[Difference]:
        """Return what is different now."""
        return [found for place, was in self._found for found in differences(place, was)]

    def restore(self) -> None:
        """Put everything back that is different now."""
        for place, was in self._found:
            if next(differences(place, was), None) is not None:
                place.write(was)

    def _add(self, place: Place, seen: set[int], depth: int) -> None:
        contents = place.read()
        self._found.append((place, contents))
        if depth:
            for key, value in contents.items():
                if not issubclass(type(value), _NOTHING):
                    self._look_into(f"{place.label}{_step(place, key)}", place, value, seen, depth)

    def _look_into(self, label: str, above: Place, value: Any, seen: set[int], depth: int) -> None:
        if issubclass(type(value), _NOTHING) or not depth or id(value) in seen or _is_compiler(value):
            return
        seen.add(id(value))
        if above.root is not None or isinstance(value, Tensor):
            self.held[id(value)] = label
        if isinstance(value, tuple | partial | MethodType | FunctionType):
            for name, part in held_by(value):
                self._look_into(f"{label}{name}", above, part, seen, depth - 1)
        elif (place := place_of(label, value)) is not None:
            place.root, place.recorded = above.root, above.recorded
            self._add(place, seen, depth - 1)


def differences(place: Place, was: Contents) -> Iterator[Difference]:
    """Return what is different in one place."""
    now = place.read()
    for key in {**was, **now}:
        before, after = was.get(key, MISSING), now.get(key, MISSING)
        if before is not after and not _equal(before, after):
            yield Difference(place, key, before, after)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Exactly) and isinstance(other, Exactly):
        return one.key == other.key
    if isinstance(one, MethodType) and isinstance(other, MethodType):
        return one == other
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, PLAIN) and type(one) is type(other) and bool(one == other or one != one)


def _same(one: Any, other: Any) -> bool:
    return one is other or _equal(one, other)


def _is_compiler(value: Any) -> bool:
    """Return True for objects and functions of torch.compile, which change with every call."""
    kind = value if isinstance(value, FunctionType) else type(value)
    return kind.__module__.startswith(("torch._dynamo", "torch._functorch", "torch._inductor"))


def _step(place: Place, key: Any) -> str:
    """Return how a key is written behind the label of its place."""
    text = str(key) if isinstance(key, str) and key.isidentifier() else f"[{key!r:.20}]"
    return text if text.startswith("[") or not place.label else f".{text}"
