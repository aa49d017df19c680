"""Compares recordings of different processes, forwards or numbers of samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .calls import Call, positions
from .given import Arguments, Ref, Slice, same_value
from .recording import Recording

Place = tuple[int, ...]
"""The place of an argument, and that of a size in a ``torch.Size``."""

CHANGES = (
    "a counter, a clock, a generator of random numbers, a context variable or a mode that the forward sets. Move that "
    "code into a module of its own, which is called as it is, or compute it before the step and pass it as an argument"
)
"""What may differ from forward to forward, and what to do about it."""

_known: WeakKeyDictionary[Recording, str] = WeakKeyDictionary()
_COMPARED = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size, Ref, Slice)


def fingerprint(recording: Recording) -> str:
    """Return a digest of a recording: its calls, their assignment to layers, and the output of the model.

    It is the same in all processes that recorded the same code with arguments of the same shapes. Devices and objects,
    such as functions among the arguments, do not count.
    """
    if recording not in _known:
        _known[recording] = _digest(recording)
    return _known[recording]


def changed(first: Sequence[Call], second: Sequence[Call]) -> str:
    """Return a message about the first call that differs between two recordings; empty if none differs.

    Args:
        first, second: their calls.
    """
    for before, after in zip(first, second, strict=False):
        if (before.name, before.line) != (after.name, after.line):
            return (
                f"Two forwards with the same arguments take different ways: {after.name} is called at {after.line}, "
                f"and before it was {before.name} at {before.line}. What decides about that changes from forward to "
                f"forward: {CHANGES}"
            )
        for place in _different(before, after)[:1]:
            was, now = _constants(before)[place], _constants(after)[place]
            return (
                f"{before.name}() at {before.line} is given {was!r:.40} in one forward and {now!r:.40} in the next one "
                f"with the same arguments. That value changes from forward to forward: {CHANGES}"
            )
    return ""


def with_another_sample(arguments: Arguments) -> Arguments:
    """Return the arguments of a model with its first sample repeated at the end."""
    leaves, spec = pytree.tree_flatten(arguments)
    samples = next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)
    longer = [
        torch.cat([leaf, leaf[:1]])
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.dim() and len(leaf) == samples
        else leaf
        for leaf in leaves
    ]
    return pytree.tree_unflatten(longer, spec)


def depending_on_samples(calls: Sequence[Call], others: Sequence[Call]) -> dict[int, list[Place]]:
    """Map the index of each call whose constants differ between N and N + 1 samples to the places of the constants.

    The first call that is another one in the other recording is among them, with no places.
    """
    result: dict[int, list[Place]] = {}
    for index, (call, other) in enumerate(zip(calls, others, strict=False)):
        if call.name != other.name or len(call.given.leaves) != len(other.given.leaves):
            return result | {index: []}
        if places := _different(call, other):
            result[index] = places
    if len(calls) != len(others):
        result[min(len(calls), len(others)) - 1] = []
    return result


def for_any_samples(call: Call, places: Sequence[Place]) -> Call:
    """Rewrite a call so that it does not depend on the number of samples; if that is not possible, mark it.

    ``torch.arange(len(x))`` becomes one call on ``x``, and ``x.view(len(x) * n, 5)`` becomes ``x.view(-1, 5)``. A loss
    that is followed shows then what it does with its samples.

    Args:
        call: the call.
        places: of the constants that depend on it.
    """
    arguments = call.given
    if call.func is torch.arange and places == [(0,)] and arguments.positional == 1:
        return replace(call, func=positions)
    if call.name in ("view", "reshape") and places in ([(1,)], [(1, 0)]):
        size, others = arguments.leaves[1], arguments.leaves[2:]
        if places == [(1, 0)]:
            size, others = torch.Size((-1, *size[1:])), size[1:]
        if -1 not in others:
            return replace(call, given=arguments.replaced({1: -1 if places == [(1,)] else size}))
    return replace(call, counts=True)


def _digest(recording: Recording) -> str:
    calls = [
        (
            call.name,
            _compared(call.given.leaves),
            _compared(call.outs),
            sorted(call.writes),
            call.grad,
        )
        for part in (*recording.parts, recording.end)
        for call in part.calls
    ]
    parts = [(part.takes, part.gives, len(part.calls)) for part in (*recording.parts, recording.end)]
    state = sorted(recording.state.items())
    whole = (recording.inputs, state, calls, parts, _compared(recording.output), recording.loss)
    return hashlib.blake2b(repr(whole).encode(), digest_size=16).hexdigest()


def _different(first: Call, second: Call) -> list[Place]:
    """Return the places of the arguments, other than tensors, in which two calls of a function differ."""
    ones, others = _constants(first), _constants(second)
    return [
        place
        for place, was in ones.items()
        if type(was) is not Ref and not same_value(was, others.get(place)) and was != others.get(place)
    ]


def _constants(call: Call) -> dict[Place, Any]:
    """Return the arguments of a call by their places, with the sizes in a ``torch.Size`` one by one."""
    constants: dict[Place, Any] = {}
    for place, leaf in enumerate(_compared(call.given.leaves)):
        if type(leaf) is torch.Size:
            constants |= {(place, index): size for index, size in enumerate(leaf)}
        else:
            constants[(place,)] = leaf
    return constants


def _compared(leaves: Sequence[Any]) -> list[Any]:
    return [leaf if isinstance(leaf, _COMPARED) else type(leaf).__name__ for leaf in leaves]
