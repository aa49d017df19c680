"""Finds the calls of a recording that must stay in one layer, because they write into memory that others use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from .calls import Call
from .given import Ref


def joined(
    calls: Sequence[Call],
    aliases: Iterable[tuple[int, frozenset[int]]],
    state: Mapping[int, str],
    output: Iterable[Any],
    groups: Iterable[Collection[str]],
) -> list[tuple[int, int]]:
    """Return the ranges of calls that must stay together: the index of the first and of the last.

    Where a call writes into memory that another value shares, autograd sends the gradient of the one through the write
    into the other. It does not do so across the border of two layers, so the write must be in the layer where the later
    of both values was made, if the other value is used again. Likewise all that uses a buffer that functions write must
    be in one layer, and all calls of a module that changes Python values or that another module calls: stages work
    on several micro-batches at the same time.

    Args:
        calls: of the recording.
        aliases: for each write into memory that several values share: the index of its call and these values.
        state: path of each parameter and buffer that is used, by its number.
        output: what the model returned, with refs in place of tensors.
        groups: paths of modules whose calls must be in one layer.
    """
    born = {number: index for index, call in enumerate(calls) for number in call.new}
    last = {number: index for index, call in enumerate(calls) for number in call.given.numbers()}
    last |= {out.number: len(calls) for out in output if type(out) is Ref}
    last |= dict.fromkeys(state, len(calls))
    spans = []
    for index, shared in aliases:  # a write shows in all values of its memory that the call was given
        used = [number for number in shared if number in calls[index].writes or last.get(number, -1) >= index]
        if len(used) > 1:
            spans.append((max(born.get(number, 0) for number in used), index))
    written = {number for call in calls for number in call.writes if not call.module}
    for number in written & state.keys():
        users = [index for index, call in enumerate(calls) if _uses(call, number, state[number])]
        spans.append((users[0], users[-1]))
    for paths in groups:
        users = [index for index, call in enumerate(calls) if call.module in paths]
        spans += [(users[0], users[-1])] if users else []
    return [(first, last) for first, last in spans if first < last]


def _uses(call: Call, number: int, path: str) -> bool:
    """Return True if a call is given a parameter or buffer, or its module holds it."""
    return number in call.given.numbers() or bool(call.module and path.startswith(f"{call.module}."))
