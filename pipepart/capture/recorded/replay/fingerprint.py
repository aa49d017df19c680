"""A digest of a recording, by which processes find out whether they have recorded the same forward."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree as pytree

from .given import Slice
from .numbers import Ref, plain
from .recording import Recording

_known: WeakKeyDictionary[Recording, str] = WeakKeyDictionary()
_COMPARED = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size, Ref, Slice)


def fingerprint(recording: Recording) -> str:
    """Return a digest of the calls, of how they are dealt out to layers, and of what the model returned.

    It is the same in all processes that recorded the same code with arguments of the same shapes. Devices and objects,
    such as functions among the arguments, do not count.
    """
    if recording not in _known:
        _known[recording] = _digest(recording)
    return _known[recording]


def _digest(recording: Recording) -> str:
    calls = [
        (call.name, _compared(call.given.values), _compared(call.outs), sorted(call.writes), call.grad)
        for part in (*recording.parts, recording.end)
        for call in part.calls
    ]
    parts = [(part.takes, part.gives, len(part.calls)) for part in (*recording.parts, recording.end)]
    state = sorted(recording.state.items())
    whole = (recording.inputs, state, calls, parts, _compared(recording.output), recording.loss)
    return hashlib.blake2b(repr(whole).encode(), digest_size=16).hexdigest()


def _compared(values: Any) -> list[Any]:
    leaves = pytree.tree_leaves(list(values), is_leaf=lambda leaf: isinstance(leaf, _COMPARED))
    return [plain(leaf) if isinstance(leaf, _COMPARED) else type(leaf).__name__ for leaf in leaves]
