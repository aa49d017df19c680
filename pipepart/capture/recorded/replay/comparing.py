"""Compares recordings of different processes, forwards or numbers of samples."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .calls import Call
from .given import Arguments, Ref, Slice, same_value
from .recording import Part, Recording

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


def code_of(calls: Sequence[Call]) -> Hashable:
    """Return a key of calls: their functions, lines, and arguments other than tensors."""
    return tuple([(call.name, call.line, *_compared(call.given.leaves)) for call in calls])


def samples_of(arguments: Sequence[Any]) -> int:
    """Return the number of samples among the arguments of a model, without their nest: the length of a tensor."""
    return next((len(leaf) for leaf in arguments if isinstance(leaf, Tensor) and leaf.dim()), 0)


def with_samples(arguments: Arguments, total: int) -> Arguments | None:
    """Return the arguments of a model with their first sample repeated up to ``total``; None if there are as many."""
    leaves, spec = pytree.tree_flatten(arguments)
    samples = samples_of(leaves)
    if samples == total:
        return None
    longer = [
        torch.cat([leaf, *[leaf[:1]] * (total - samples)])
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.dim() and len(leaf) == samples
        else leaf
        for leaf in leaves
    ]
    return pytree.tree_unflatten(longer, spec)


def end_for(end: Part, calls: Sequence[Call]) -> Part | None:
    """Return the end of a recording with the numbers that another one has there; None if it calls other functions.

    Args:
        end: of a model that computes its own loss.
        calls: those of the loss in the other recording.
    """
    if [call.name for call in end.calls] != [call.name for call in calls]:
        return None
    result = []
    for call, other in zip(end.calls, calls, strict=True):
        if len(call.given.leaves) != len(other.given.leaves):
            return None
        places = {place[0] for place in _different(call, other)}
        if any(type(call.given.leaves[place]) is not type(other.given.leaves[place]) for place in places):
            return None
        leaves = {place: other.given.leaves[place] for place in places}
        result.append(replace(call, given=call.given.replaced(leaves)) if leaves else call)
    return end if all(map(operator.is_, result, end.calls)) else end._replace(calls=tuple(result))


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
