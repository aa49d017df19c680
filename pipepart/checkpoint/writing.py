"""Writes files that survive a power failure, tensors in the safetensors format, and computes their hashes.

A file of tensors is written here, and not by the safetensors package, so that it is hashed as it is written, that no
second copy of the tensors is made, and that other threads run meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..input_error import InputTypeError
from ..tensor_file import DTYPE_NAMES
from .manifest import FileRecord

_ALIGNMENT = 8  # bytes: the largest number of the table


def check_tensor(what: str, tensor: Tensor) -> None:
    """Refuse a tensor without values, a sparse one, a subclass with other data, and dtypes that the format lacks."""
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
    if tensor.dtype not in DTYPE_NAMES:
        hint = ": torch.view_as_real makes two float64 of each" if tensor.dtype is torch.complex128 else ""
        raise InputTypeError(f"{what} has dtype {tensor.dtype}, which safetensors cannot hold{hint}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write tensors, checked by :func:`check_tensor`, as :func:`write_file` does."""
    # Large items first, so that each starts at a multiple of its item size.
    order = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in order:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % _ALIGNMENT)
    parts = chain((len(head).to_bytes(8, "little"), head), (bytes_of(tensor) for _, tensor in order))
    return write_file(path, parts)


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file and flush it to the disk; return its size and hash.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    digest = hashlib.sha256()
    size = 0
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(bytes=size, sha256=digest.hexdigest())


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a strided tensor's values, in host memory."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data
