# pyright: basic, reportCallIssue=false, reportIncompatibleMethodOverride=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
"""Sequentials of a kind of their own, and Sequentials whose layers reach each other through Python state."""

from __future__ import annotations

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


class _OfMemo(nn.Linear):
    def __init__(self, memo: Any) -> None:
        super().__init__(D, D)
        self.memo = memo


class _Fills(_OfMemo):
    def forward(self, x):
        if isinstance(self.memo, Tensor):
            self.memo.copy_(x.detach().mean())
        else:
            self.memo["mean"] = x.detach().mean()
        return super().forward(x)


class _Takes(_OfMemo):
    def forward(self, x):
        memo = self.memo[0].memo if isinstance(self.memo, list) else self.memo
        return super().forward(x) * (memo if isinstance(memo, Tensor) else memo["mean"])


for _place, _memo in (("memo", {}), ("memo", torch.zeros(())), (r"memo\[0\]\.memo", [])):

    def _sequential(memo=_memo):
        first = _Fills({} if isinstance(memo, list) else memo)
        return nn.Sequential(first, nn.Linear(D, D), _Takes([first] if isinstance(memo, list) else memo))

    _sequential.__name__ = f"SequentialOverA{type(_memo).__name__}"
    refused(f"{_place} of module '2' changes outside of the calls of that module")(_sequential)


@right
def SequentialOverATable():
    table = torch.rand(D)
    return nn.Sequential(_Takes(table), nn.Tanh(), _Takes(table))


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


for _place, _make in (
    (r"_InAClass\.calls", lambda: _InAClass),
    (r"awkward_sequentials\._calls", lambda: _InAGlobal),
    (r"count\[0\]\[\d\]", lambda: _InADefault),
    ("calls", _in_a_closure),
):

    def _counting(make=_make):
        kind = make()
        return nn.Sequential(kind(), nn.Tanh(), kind())

    _counting.__name__ = f"SequentialThatCountsIn{_make().__name__}"
    refused(f"{_place} changes outside of the calls of that module")(_counting)


class _Keeps(_Counted):
    """Counts in a number of its own, and keeps a list. Right without recompute, if all calls are in one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.seen.append(x.detach().mean())
        return super().forward(x) * (1 + self.seen[-2:][0])

    def count(self):
        self.calls += 1
        return self.calls


def SequentialCallsALayerThatCountsTwice():
    counts = _Keeps()
    return nn.Sequential(nn.Linear(D, D), counts, nn.Tanh(), counts)
