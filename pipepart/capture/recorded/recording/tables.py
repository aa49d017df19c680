"""Tables of torch function names that a recorder treats specially, and checks of call arguments."""

from __future__ import annotations

from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..python_state.access import COLLECTIONS, access_to


def words(text: str) -> frozenset[str]:
    """Split a text into words."""
    return frozenset(text.split())


METADATA = words(
    "dim ndim ndimension dtype device layout requires_grad is_leaf grad_fn is_cuda is_cpu is_mps is_meta is_xpu "
    "is_quantized is_nested is_sparse is_sparse_csr is_floating_point is_complex is_signed is_conj is_neg names "
    "is_inference is_contiguous is_pinned is_shared element_size itemsize nbytes get_device stride storage_offset "
    "has_names _version output_nr __hash__ __repr__ __str__ __format__ __dir__ __class__ data_ptr untyped_storage "
    "storage is_same_size result_type can_cast promote_types __deepcopy__ __reduce_ex__ _is_view _base name "
    "retains_grad _is_zerotensor is_storage is_tensor is_coalesced dense_dim sparse_dim _backward_hooks "
    "_typed_storage"
)
"""What depends on nothing but shapes, dtypes and devices, which are part of a recording's key."""

SIZES = words("shape size numel nelement __len__")
REFUSED = words("backward grad numpy __array__ share_memory_")
"""What a replay cannot repeat."""

DRAWS = tuple(
    words(
        "rand bernoulli multinomial normal poisson dropout exponential_ uniform_ cauchy_ geometric_ rrelu gumbel"
    )
)
"""Parts of the names of functions that draw random numbers."""

_FIXED = (bool, int, float, complex, str, bytes, type(None), type, Enum, range, torch.Size, torch.dtype)
_FIXED += (torch.device, torch.layout, torch.memory_format, torch.Generator, BuiltinFunctionType, nn.Module)
_FIXED += (np.generic, frozenset)
_OF_PYTHON = 1 << 9  # the flag of classes that Python code defines
_OPEN = (object, SimpleNamespace)  # classes of C whose objects hold nothing but attributes


def is_fixed(value: Any, objects: bool = False) -> bool:
    """Return True for an argument that a replay can reuse: a tensor, or an immutable value.

    A function is if it does not hold on to anything else.

    Args:
        value: the argument.
        objects: accept collections and objects as well, if they hold neither tensors nor what cannot be looked into.
    """
    return isinstance(value, Tensor) or _is_fixed(value, objects, set())


def _is_fixed(value: Any, objects: bool, seen: set[int]) -> bool:
    if isinstance(value, _FIXED) or id(value) in seen:
        return True
    seen.add(id(value))
    if isinstance(value, Tensor):
        return False
    if isinstance(value, slice):
        held: list[Any] = [value.start, value.stop, value.step]
    elif isinstance(value, tuple | partial | MethodType | FunctionType):
        held = _parts(value)
    elif objects and type(value) in COLLECTIONS:
        held = [*value.items()] if isinstance(value, dict) else [*value]  # of any size
    elif objects and all(kind in _OPEN or kind.__flags__ & _OF_PYTHON for kind in type(value).__mro__):
        held = _parts(value)
    else:
        return False
    return all(_is_fixed(part, objects, seen) for part in held)


def modules_in(value: Any) -> list[nn.Module]:
    """Return the modules that a callable may call: itself, its owner, and those in its closure and defaults."""
    if isinstance(value, nn.Module):
        return [value]
    if not isinstance(value, tuple | list | dict | partial | MethodType | FunctionType):
        return []
    return [module for part in _parts(value) for module in modules_in(part)]


def _parts(value: Any) -> list[Any]:
    """Return what an object, a collection, a partial function, or the closure and defaults of a function hold."""
    access = access_to(value)
    return [] if access is None else [*access.read(value).values()]
