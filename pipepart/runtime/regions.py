"""Which layers of a stage run together, as one function that is compiled or captured.

::

    first step      a   b   c   d   e        each by itself: which of them draw is seen
    from then on    [a   b]  c  [d   e]      c draws random numbers, has a hook or adds a loss

Draws are told apart by layer, and an added loss or a hook, be it on a parameter, is Python that must run each time and
once, so such a layer runs by itself, as ever. Where regions begin and end is settled at the first micro-batch of a run,
and holds for all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from torch import nn

from .replay.randomness import Draws, draws_now


class Together(Protocol):
    """Runs some layers as one function."""

    def begin(self) -> None:
        """Before the first micro-batch of a run."""
        ...

    def __call__(self, value: Any) -> Any:
        """The output of the last layer."""
        ...


class InOrder:
    """Some layers one behind the other, and no more."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules

    def begin(self) -> None:
        """Nothing has to be made ready."""

    def __call__(self, value: Any) -> Any:
        for module in self._modules:
            value = module(value)
        return value


MakeTogether = Callable[[Sequence[nn.Module]], Together]


class Region:
    """Consecutive layers of a stage that run together.

    Attributes:
        places: of the layers in the stage.
    """

    def __init__(self, places: Sequence[int], run: Together) -> None:
        self.places = places
        self.run = run


class Regions:
    """The regions of one stage. Used by its worker alone.

    Args:
        modules: the stage's layers.
        make: makes what runs some of them together.
    """

    def __init__(self, modules: Sequence[nn.Module], make: MakeTogether) -> None:
        self._modules = modules
        self._parts = [tuple(module.modules()) for module in modules]
        self._make = make
        self._made: dict[tuple[int, ...], Region] = {}
        self._plain: dict[tuple[int, bool], bool] = {}
        self._run: Callable[[], Draws | None] = lambda: None
        self._of_run: Mapping[int, Region] = {}

    def of_run(self, draws: Draws) -> Mapping[int, Region]:
        """The regions by the places of their first layers, in the run that has these draws."""
        if self._run() is not draws:
            self._begin()
            self._run = weakref.ref(draws)
        return self._of_run

    def note(self, place: int, plain: bool) -> None:
        """A layer has run by itself, and has neither drawn random numbers nor added a loss if it was ``plain``."""
        self._plain[place, self._modules[place].training] = plain

    def _begin(self) -> None:
        groups = groupby(range(len(self._modules)), self._may_share)
        together = [self._region(tuple(places)) for may_share, places in groups if may_share]
        self._of_run = {region.places[0]: region for region in together}
        for region in together:
            region.run.begin()

    def _may_share(self, place: int) -> bool:
        module = self._modules[place]
        plain = self._plain.get((place, module.training), False)
        return plain and not draws_now(module) and not any(map(_hooked, self._parts[place]))

    def _region(self, places: tuple[int, ...]) -> Region:
        if places not in self._made:
            self._made[places] = Region(places, self._make([self._modules[place] for place in places]))
        return self._made[places]


def _hooked(part: nn.Module) -> bool:
    on_module = part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks
    return any(on_module) or any(p._backward_hooks for p in part._parameters.values() if p is not None)
