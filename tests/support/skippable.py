"""The decorator ``skippable`` of torchgpipe, as far as models use it, for machines without torchgpipe."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from types import GeneratorType
from typing import Any, NamedTuple

from torch import Tensor, nn

_local = threading.local()


class Namespace:
    """Keeps values of the same name apart."""


class stash(NamedTuple):
    name: str
    tensor: Tensor | None


class pop(NamedTuple):
    name: str


class Skippable(nn.Module):
    """Runs the module that it wraps, and does what this yields. Values wait in a dict of the calling thread."""

    module_cls: type[nn.Module]
    stashable_names: frozenset[str]
    poppable_names: frozenset[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Skippable:
        for name in self.stashable_names | self.poppable_names if only is None else only:
            self.namespaces[name] = ns
        return self

    def stashable(self) -> Iterator[tuple[Namespace | None, str]]:
        return ((self.namespaces.get(name), name) for name in self.stashable_names)

    def poppable(self) -> Iterator[tuple[Namespace | None, str]]:
        return ((self.namespaces.get(name), name) for name in self.poppable_names)

    def forward(self, x: Any) -> Any:
        waiting = _local.__dict__.setdefault("waiting", {})
        missing = [name for key in self.poppable() if key not in waiting for name in key[1:]]
        if missing:
            raise RuntimeError(f"{missing[0]!r} has not been stashed")
        running = self.module(x)
        if not isinstance(running, GeneratorType):
            return running
        answer = None
        while True:
            try:
                wish = running.send(answer)
            except StopIteration as end:
                return end.value
            key = self.namespaces.get(wish.name), wish.name
            answer = waiting.pop(key) if isinstance(wish, pop) else waiting.__setitem__(key, wish.tensor)


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], Callable[..., Skippable]]:
    """Return a decorator that makes a skippable class of a module's."""

    def decorated(kind: type[nn.Module]) -> type[Skippable]:
        names = {"module_cls": kind, "stashable_names": frozenset(stash), "poppable_names": frozenset(pop)}
        return type(kind.__name__, (Skippable,), names)

    return decorated
