"""Makes a random mini-batch from a description such as ``32x3x16x16`` or ``8x128:int64:50257``."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from .errors import UsageError

_FORM = re.compile(r"(\d+(?:x\d+)*)(?::([a-z]+[0-9]*)(?::(\d+))?)?")
_FLOATS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_INTEGERS = {
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


def make_sample(text: str) -> Tensor:
    """Make normally distributed numbers, or integers below a bound, from ``SHAPE[:DTYPE[:BOUND]]``.

    The same text gives the same numbers. Without a bound, integers are 0 and 1, which every embedding has.

    Raises:
        UsageError: the text is not of this form.

    >>> make_sample("2x3").shape, make_sample("4x8:int64:100").dtype
    (torch.Size([2, 3]), torch.int64)
    """
    match = _FORM.fullmatch(text)
    if not match:
        raise UsageError(
            f"--input {text!r} is not a shape: write for example 32x3x16x16, 32x100:float64 or, for tokens "
            "of a vocabulary, 8x128:int64:50257"
        )
    shape = [int(extent) for extent in match[1].split("x")]
    dtype = match[2] or "float32"
    if 0 in shape:
        raise UsageError(f"--input {text!r} holds nothing: each number of the shape must be at least 1")
    generator = torch.Generator().manual_seed(0)
    if dtype in _FLOATS and match[3] is None:
        try:
            return torch.randn(shape, generator=generator).to(_FLOATS[dtype])
        except RuntimeError as error:  # torch cannot allocate it
            raise UsageError(f"--input {text!r} does not fit in memory: {error}") from None
    if dtype in _FLOATS:
        raise UsageError(f"--input {text!r}: a bound is for whole numbers, {dtype} takes none")
    if dtype not in _INTEGERS:
        raise UsageError(
            f"--input {text!r}: no dtype {dtype!r}, choose one of {', '.join((*_FLOATS, *_INTEGERS))}"
        )
    bound, most = int(match[3] or 2), torch.iinfo(_INTEGERS[dtype]).max
    if not 1 <= bound <= most:
        raise UsageError(f"--input {text!r}: the bound of {dtype} must be between 1 and {most}, got {bound}")
    return torch.randint(bound, shape, generator=generator).to(_INTEGERS[dtype])
