"""Makes random samples from a description, and casts samples to another precision."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..data.arguments import Arguments
from .errors import UsageError
from .options import FLOATS

_SAMPLE = re.compile(r"(\d+(?:x\d+)*)(?::([a-z]+[0-9]*)(?::(\d+))?)?")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


def make_sample(text: str) -> Tensor:
    """Make a random tensor from ``SHAPE[:DTYPE[:BOUND]]``: normal numbers, or integers below the bound.

    The same text gives the same numbers. Without a bound, integers are 0 and 1, which every embedding has.

    Raises:
        UsageError: the text is not of this form.

    >>> make_sample("2x3").shape, make_sample("4x8:int64:100").dtype
    (torch.Size([2, 3]), torch.int64)
    """
    match = _SAMPLE.fullmatch(text)
    if not match:
        raise UsageError(
            f"--input {text!r} is not a shape: write for example 32x3x16x16, 32x100:float64 or, for tokens "
            "of a vocabulary, 8x128:int64:50257"
        )
    shape, name = [int(extent) for extent in match[1].split("x")], match[2] or "float32"
    if 0 in shape:
        raise UsageError(f"--input {text!r} holds nothing: each number of the shape must be at least 1")
    if name not in FLOATS + _INTEGERS:
        raise UsageError(
            f"--input {text!r}: no dtype {name!r}, choose one of {', '.join(FLOATS + _INTEGERS)}"
        )
    dtype, generator = getattr(torch, name), torch.Generator().manual_seed(0)
    if name in FLOATS:
        if match[3]:
            raise UsageError(f"--input {text!r}: a bound is for whole numbers, {name} takes none")
        try:
            return torch.randn(shape, generator=generator).to(dtype)
        except RuntimeError as error:  # torch cannot allocate it
            raise UsageError(f"--input {text!r} does not fit in memory: {error}") from None
    bound, most = int(match[3] or 2), torch.iinfo(dtype).max
    if not 1 <= bound <= most:
        raise UsageError(f"--input {text!r}: the bound of {name} must be between 1 and {most}, got {bound}")
    return torch.randint(bound, shape, generator=generator).to(dtype)


def cast_floats(sample: Any, dtype: str) -> Any:
    """Return a sample, or a target, with its floating point tensors in another precision."""
    wanted = getattr(torch, dtype)

    def cast(value: Any) -> Any:
        return value.to(wanted) if isinstance(value, Tensor) and value.is_floating_point() else value

    if isinstance(sample, Arguments):
        args, kwargs = pytree.tree_map(cast, (sample.args, sample.kwargs))
        return Arguments(*args, **kwargs)
    return pytree.tree_map(cast, sample)
