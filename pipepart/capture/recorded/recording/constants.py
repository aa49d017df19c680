"""Computes what a model on the meta device reads from tensors, which have no values there.

Known are the values of inputs of which the caller has passed real tensors, and what is computed from them alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..refusal import CaptureError, line_of_user
from ..replay.calls import Call
from ..replay.numbers import Ref


def computed_on_cpu(func: Any, given: Any, calls: Sequence[Call], values: Mapping[int, Tensor]) -> Any:
    """Return the result of a call on meta tensors that reads their values, by computing these on the CPU.

    Args:
        func, given: the call.
        calls: those before it.
        values: the known inputs, by their numbers.

    Raises:
        CaptureError: the values depend on an unknown input, a module, a parameter, a draw or a write in place.
    """
    made = {number: call for call in calls for number in call.new}
    written = {number for call in calls for number in call.writes}
    known = {number: value for number, value in values.items() if number not in written}

    def compute(numbers: Any) -> None:
        for number in numbers:
            if number in known:
                continue
            call = made.get(number)
            if call is None or call.module or call.draws or call.writes or number in written:
                raise CaptureError(
                    f"the model reads a value at {line_of_user()}, which tensors on the meta device do not have. If it "
                    "is that of an argument, pass the sample on the CPU, or leave that argument out. Otherwise record "
                    "the model on a real device"
                )
            own = call.given.settled()
            compute(own.numbers())
            args, kwargs = own.filled(known, _on_cpu)
            for out, leaf in zip(call.outs, pytree.tree_leaves(call.func(*args, **kwargs)), strict=True):
                if type(out) is Ref:
                    known[out.number] = leaf

    given = given.settled()
    compute(given.numbers())
    args, kwargs = given.filled(known, _on_cpu)
    return func(*args, **kwargs)


def _on_cpu(leaf: Any) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
