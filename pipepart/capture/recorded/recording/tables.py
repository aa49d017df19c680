"""What a recorder knows of torch's functions by their names, and which arguments no forward changes."""

from __future__ import annotations

from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


METADATA = _words(
    "dim ndim ndimension dtype device layout requires_grad is_leaf grad_fn is_cuda is_cpu is_mps is_meta is_xpu "
    "is_quantized is_nested is_sparse is_sparse_csr is_floating_point is_complex is_signed is_conj is_neg names "
    "is_inference is_contiguous is_pinned is_shared element_size itemsize nbytes get_device stride storage_offset "
    "has_names _version output_nr __hash__ __repr__ __str__ __format__ __dir__ __class__ data_ptr untyped_storage "
    "storage is_same_size result_type can_cast promote_types __deepcopy__ __reduce_ex__ _is_view _base name "
    "retains_grad _is_zerotensor is_storage is_tensor is_coalesced dense_dim sparse_dim _backward_hooks "
    "_typed_storage"
)
"""What depends on nothing but shapes, dtypes and devices, which are part of a recording's key."""

SIZES = _words("shape size numel nelement __len__")
REFUSED = _words("backward grad numpy __array__ share_memory_")
"""What a replay cannot repeat."""

DRAWS = tuple(
    _words(
        "rand bernoulli multinomial normal poisson dropout exponential_ uniform_ cauchy_ geometric_ rrelu gumbel"
    )
)
"""Parts of the names of functions that draw random numbers."""

_FIXED = (bool, int, float, complex, str, bytes, type(None), type, Enum, range, torch.Size, torch.dtype)
_FIXED += (torch.device, torch.layout, torch.memory_format, torch.Generator, BuiltinFunctionType, nn.Module)


def is_fixed(value: Any) -> bool:
    """Return True for an argument that a replay can pass on: a tensor, or a value that nothing changes.

    A function is if it does not hold on to anything else.
    """
    if isinstance(value, partial):
        parts = pytree.tree_leaves((value.func, value.args, value.keywords))
        return not any(isinstance(part, Tensor) for part in parts) and all(map(is_fixed, parts))
    if isinstance(value, MethodType):
        return is_fixed(value.__self__)
    if isinstance(value, FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        return not any(isinstance(one, Tensor) for one in held) and all(map(is_fixed, held))
    if isinstance(value, slice):
        return all(map(is_fixed, (value.start, value.stop, value.step)))
    return isinstance(value, (Tensor, *_FIXED))
