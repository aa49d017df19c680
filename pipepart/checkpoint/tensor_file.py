"""Writes and reads files of tensors in the safetensors format, with a hash of each file.

A file is a header and the bytes of the tensors one after the other::

    8 bytes: length of the header │ header: JSON {name: {dtype, shape, data_offsets}} │ bytes of the tensors

The format is that of https://github.com/huggingface/safetensors. The file is written here, and not by that package, so
that it is hashed as it is written, that no second copy of the tensors is made, and that other threads run meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..input_error import InputTypeError
from .durable import write_file
from .manifest import FileRecord

_NAMES = {
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
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGNMENT = 8  # bytes: the largest number of the table


def check_tensor(what: str, tensor: Tensor) -> None:
    """Check that a tensor can be written.

    Args:
        what: names the tensor in the message.

    Raises:
        TypeError: it has no values, is sparse, a subclass with other data, or of a dtype that the format lacks.
    """
    if tensor.is_meta:
        raise InputTypeError(f"{what} is on the meta device and has no values to save")
    if is_traceable_wrapper_subclass(tensor):
        raise InputTypeError(
            f"{what} is a {type(tensor).__name__}, which holds other tensors: save a model of plain tensors "
            "(for a DTensor, its full_tensor())"
        )
    if tensor.layout is not torch.strided:
        raise InputTypeError(
            f"{what} is sparse ({tensor.layout}), which safetensors cannot hold: use to_dense()"
        )
    if tensor.dtype not in _NAMES:
        hint = ": torch.view_as_real makes two float64 of each" if tensor.dtype is torch.complex128 else ""
        raise InputTypeError(f"{what} has dtype {tensor.dtype}, which safetensors cannot hold{hint}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write a new file and flush it to the disk; return its size and hash.

    Args:
        tensors: checked by :func:`check_tensor`, on any device.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    # Large items first, so that each starts at a multiple of its item size.
    order = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in order:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % _ALIGNMENT)
    parts = chain((len(head).to_bytes(8, "little"), head), (bytes_of(tensor) for _, tensor in order))
    return write_file(path, parts)


class TensorFile:
    """The tensors of a file that :func:`write_tensors` wrote, and whose hash was verified.

    Args:
        path: the file. It is mapped into memory: pages are read when a tensor is.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._header: dict[str, Any] = json.loads(file.read(length))
        self._header.pop("__metadata__")
        self._start = 8 + length
        self._bytes = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

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
        """Return a tensor on the CPU whose memory is the file. Copy it before it is kept or written."""
        start, end = self._header[name]["data_offsets"]
        shape, dtype = self.shape(name), self.dtype(name)
        if start == end:
            return torch.empty(shape, dtype=dtype)
        return self._bytes[self._start + start : self._start + end].view(dtype).reshape(shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a strided tensor's values, in the memory of the host."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data
