"""What the schema of an operation says: which arguments it writes, whether it draws, makes or only views memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...autograd.own_copy import tensors

_EMPTY = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)
_FILLS = frozenset(
    {
        "uniform_",
        "normal_",
        "random_",
        "exponential_",
        "cauchy_",
        "log_normal_",
        "geometric_",
        "zero_",
        "fill_",
    }
)


class Traits(NamedTuple):
    """What a schema says.

    Attributes:
        writing: positions and names of the arguments that it writes.
        in_place: whether it returns what it writes, and nothing else.
        moves_only: whether it changes the window of a tensor, and no memory.
        is_empty: whether it makes memory without values.
        overwrites: whether the first argument's earlier values do not matter.
    """

    writing: tuple[tuple[int, str], ...]
    makes_tensors: bool
    in_place: bool
    moves_only: bool
    is_empty: bool
    overwrites: bool
    draws: bool
    takes_tensors: bool
    takes_device: bool
    takes_dtype: bool

    def written(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Tensor]:
        """Return the tensors that a call writes."""
        values = [args[place] if place < len(args) else kwargs.get(name) for place, name in self.writing]
        return tensors(values)


@cache
def traits_of(func: Any) -> Traits:
    """Return what the schema of an operation of the dispatcher says."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    arguments = schema.arguments
    writing = tuple(
        (place, argument.name)
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    named = {argument.name: str(argument.type) for argument in arguments}
    returned = [r.alias_info is not None and r.alias_info.is_write for r in schema.returns]
    return Traits(
        writing=writing,
        makes_tensors=bool(writing) or any("Tensor" in str(r.type) for r in schema.returns),
        in_place=bool(writing) and all(returned) and len(writing) == 1,
        moves_only=torch.Tag.inplace_view in func.tags,
        is_empty=name in _EMPTY,
        overwrites=name in _FILLS or name == "copy_" or func is torch.ops.aten.bernoulli_.float,
        draws=torch.Tag.nondeterministic_seeded in func.tags or "Generator" in " ".join(named.values()),
        takes_tensors=any("Tensor" in kind for kind in named.values()),
        takes_device="device" in named,
        takes_dtype="dtype" in named,
    )
