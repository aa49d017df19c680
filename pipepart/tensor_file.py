"""Reads single tensors from a safetensors file, without loading the whole file.

::

    8 bytes: length of the header │ header: JSON {name: {dtype, shape, data_offsets}} │ bytes of the tensors

The format is that of https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .input_error import InputError

DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class TensorFile:
    """The tensors of one file.

    Args:
        path: the file. It is mapped into memory: pages are read when a tensor is.

    Raises:
        ValueError: the file is not of this format, cut off, or has a tensor of a dtype that torch lacks.
    """

    def __init__(self, path: Path) -> None:
        self._size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            content = file.read(length) if length <= self._size else b""
        self._start = 8 + length
        try:
            self._header: dict[str, Any] = json.loads(content)
            self._header.pop("__metadata__", None)
            is_whole = all(self._fits(name) for name in self._header)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{str(path)!r} is not a file of safetensors") from error
        if not is_whole:
            raise InputError(f"{str(path)!r} is not a whole file of safetensors: tensors lie behind its end")
        self._bytes = torch.from_file(str(path), shared=False, size=self._size, dtype=torch.uint8)

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return list(self._header)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._header[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return _DTYPES[self._header[name]["dtype"]]

    def window(self, name: str) -> Tensor:
        """Return a memory-mapped CPU tensor. Copy it before you keep it or write to it."""
        start, end = self._header[name]["data_offsets"]
        shape, dtype = self.shape(name), self.dtype(name)
        if start == end:
            return torch.empty(shape, dtype=dtype)
        content = self._bytes[self._start + start : self._start + end]
        if (self._start + start) % dtype.itemsize:
            content = content.clone()  # torch views memory as another dtype only where it is aligned
        return content.view(dtype).reshape(shape)

    def _fits(self, name: str) -> bool:
        start, end = self._header[name]["data_offsets"]
        expected = math.prod(self.shape(name)) * self.dtype(name).itemsize
        return start >= 0 and end - start == expected and self._start + end <= self._size
