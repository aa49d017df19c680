# pyright: basic, reportCallIssue=false, reportIncompatibleMethodOverride=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
"""Sequentials of a kind of their own, and Sequentials whose layers reach each other through Python state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.awkward import D, refused, right


class _Twice(nn.Sequential):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) * 2


class _Backwards(nn.Sequential):
    def __iter__(self):
        return iter([*self._modules.values()][::-1])


@right
def SequentialWithItsOwnCall():
    return _Twice(nn.Linear(D, D), _Twice(nn.Linear(D, D), nn.Linear(D, D)), nn.Linear(D, D))


@right
def SequentialInItsOwnOrder():
    return _Backwards(nn.Linear(D, D), nn.Sequential(_Backwards(nn.Tanh(), nn.Linear(D, D))), nn.Linear(D, D))


class _Fills(nn.Linear):
    def __init__(self, memo: Any) -> None:
        super().__init__(D, D)
        self.memo = memo

    def forward(self, x):
        if isinstance(self.memo, Tensor):
            self.memo.copy_(x.detach().mean())
        else:
            self.memo["mean"] = x.detach().mean()
        return super().forward(x)


class _Takes(_Fills):
    def forward(self, x):
        return nn.Linear.forward(self, x) * (
            self.memo if isinstance(self.memo, Tensor) else self.memo["mean"]
        )


@refused("memo of module '2' changes outside of the calls of that module")
def SequentialOverADict():
    memo: dict[str, Tensor] = {}
    return nn.Sequential(_Fills(memo), nn.Linear(D, D), _Takes(memo))


@refused("memo of module '2' changes outside of the calls of that module")
def SequentialOverATensor():
    memo = torch.zeros(())
    return nn.Sequential(_Fills(memo), nn.Linear(D, D), _Takes(memo))


class _ReadsAnother(_Fills):
    def forward(self, x):
        return nn.Linear.forward(self, x) * self.memo[0].memo["mean"]


class _Counted(nn.Linear):
    """Layers that count their calls together, each kind in another place."""

    def __init__(self) -> None:
        super().__init__(D, D)

    def forward(self, x):
        return super().forward(x) * self.count()


class _InAClass(_Counted):
    calls = 0

    def count(self):
        _InAClass.calls += 1
        return _InAClass.calls


_calls = 0


class _InAGlobal(_Counted):
    def count(self):
        global _calls
        _calls += 1
        return _calls


class _InADefault(_Counted):
    def count(self, seen=[]):  # noqa: B006
        seen.append(1)
        return len(seen)


def _in_a_closure():
    calls = 0

    class InAClosure(_Counted):
        def count(self):
            nonlocal calls
            calls += 1
            return calls

    return InAClosure


def _counting_in(place: str, make: Callable[[], type[_Counted]]) -> None:
    def sequential():
        kind = make()
        return nn.Sequential(kind(), nn.Tanh(), kind())

    sequential.__name__ = f"SequentialThatCountsIn{make().__name__}"
    refused(f"{place} changes outside of the calls of that module")(sequential)


_counting_in(r"_InAClass\.calls", lambda: _InAClass)
_counting_in(r"awkward_sequentials\._calls", lambda: _InAGlobal)
_counting_in(r"count\[0\]\[\d\]", lambda: _InADefault)
_counting_in("calls", _in_a_closure)


@refused("memo\\[0\\]\\.memo of module '2' changes outside of the calls of that module")
def SequentialOverAnotherLayer():
    first = _Fills({})
    return nn.Sequential(first, nn.Linear(D, D), _ReadsAnother([first]))


def SequentialCallsALayerThatCountsTwice():
    """Both calls are in one stage. Right without recompute."""

    class Counts(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    counts = Counts(D, D)
    return nn.Sequential(nn.Linear(D, D), counts, nn.Tanh(), counts)


def SequentialCallsALayerTwiceThatKeepsAList():
    """Both calls are in one stage. Right without recompute."""

    class Keeps(nn.Linear):
        def __init__(self) -> None:
            super().__init__(D, D)
            self.seen: list[Tensor] = []

        def forward(self, x):
            self.seen.append(x.detach().mean())
            return super().forward(x) * (1 + self.seen[-2:][0])

    keeps = Keeps()
    return nn.Sequential(nn.Linear(D, D), keeps, nn.Tanh(), keeps)


@right
def SequentialOverATable():
    class Block(nn.Linear):
        def __init__(self) -> None:
            super().__init__(D, D)
            self.table = table

        def forward(self, x):
            return super().forward(x) * self.table

    table = torch.rand(D)
    return nn.Sequential(Block(), nn.Tanh(), Block())
