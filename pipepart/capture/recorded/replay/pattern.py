"""What a layer of a recorded model replays, as a key that is equal for layers that replay the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from ..python_state.value_key import Same, value_key
from .calls import Call
from .layers import Live, RecordedLayer
from .numbers import Ref


def replay_pattern(layer: nn.Module, value: Any) -> Hashable:
    """Return a key of the calls that a layer makes for its input, and of the live values that it takes and gives.

    Tensors are numbered in the order of their first use, and modules in the order of their first call. So the key of
    one block is that of the next. It is empty for a layer that is the user's own module.
    """
    if not (isinstance(layer, RecordedLayer) and isinstance(value, Live)):
        return ()
    recording = value.recording
    part = recording.parts[layer.index]
    numbers: dict[int, int] = {}

    def rank(number: int) -> int:
        return numbers.setdefault(number, len(numbers))

    takes = tuple(map(rank, part.takes))
    owners = layer.owners
    state = tuple((rank(number), owners.index(owner), name) for number, owner, name in part.state)
    constants = tuple((rank(number), Same(recording.constants[number])) for number in part.constants)
    calls = tuple(_pattern_of(call, layer.paths, rank) for call in part.calls)
    is_last = layer.index == len(recording.parts) - 1
    return takes, state, constants, calls, tuple(map(rank, part.gives)), is_last


def _pattern_of(call: Call, paths: tuple[str, ...], rank: Callable[[int], int]) -> Hashable:
    func = call.func  # that of an attribute, such as Tensor.T.__get__, is made anew at each use
    return (
        paths.index(call.module) if call.module else (call.name, Same(getattr(func, "__self__", func))),
        call.given.pattern(rank),
        tuple(rank(out.number) if type(out) is Ref else value_key(out) for out in call.outs),
        None if call.spec is None else repr(call.spec),
        tuple(sorted(map(rank, call.writes))),
        call.grad,
        call.autocast,
    )
