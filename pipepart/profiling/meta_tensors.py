"""Runs layers on the meta device, without kernels; tensors have the sizes that they have on a real device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..autograd.dispatch_mode import DispatchMode, on_shards
from ..autograd.own_copy import tensors
from ..capture import grouped_product, shadow_parameters
from ..input_error import InputError

META = torch.device("meta")
_FLASH = 1  # torch.nn.attention.SDPBackend.FLASH_ATTENTION

_aten = torch.ops.aten
_KEY = "AutogradMeta"
_ONE_PROFILE = threading.Lock()  # a kernel registered with torch applies to all threads
_RECURRENT = tuple(
    f"{kind}.{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")
)


def to_meta(nest: Any) -> Any:
    """Return a nest with its tensors moved to the meta device."""
    return pytree.tree_map_only(Tensor, _moved, nest)


def refuse_autocast() -> None:
    """Raise a ValueError if autocast is enabled: it has no effect on meta tensors."""
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise InputError(
            "autocast has no effect on the meta device, so bytes would be wrong under it: estimate a model of the "
            "lower precision, as in model.to(torch.bfloat16), or measure it (measure=True)"
        )


@contextmanager
def on_meta(model: nn.Module, device: str) -> Iterator[None]:
    """Run a model on the meta device within the block, with the operations that ``device`` would run.

    The model runs on copies of its parameters and buffers, as in :func:`shadow_parameters`. If an operation mixes real
    and meta tensors, the real tensors, such as constants of a layer, are moved to the meta device. On the meta device
    torch decomposes some operations that are a single kernel on real devices and save other tensors. Here attention and
    dropout call the kernels of ``device``, and recurrent layers raise a RuntimeError.

    Args:
        model: the model.
        device: type of device: ``"cpu"``, or any other type for an accelerator.
    """
    on_cpu = device == "cpu"
    with _ONE_PROFILE, torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", partial(_attention, on_cpu), _KEY)
        if not on_cpu:
            library.impl("dropout", _dropout, _KEY)
        for name in _RECURRENT:
            library.impl(name, _refused, _KEY)
        with MovesToMeta(), shadow_parameters(model, META):
            yield


class MovesToMeta(DispatchMode):
    """Moves the real tensors of an operation to the meta device if it also has meta tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if on_shards(types):
            return NotImplemented
        kwargs = kwargs or {}
        are_meta = {tensor.is_meta for tensor in tensors((args, kwargs))}
        if len(are_meta) > 1:
            args, kwargs = to_meta((args, kwargs))
        if func is _aten.native_layer_norm_backward.default and True in are_meta:
            # Real kernels do the same. Otherwise the result has the strides of this gradient.
            args = (args[0].contiguous(), *args[1:])
        if func is _aten._grouped_mm.default and True in are_meta:
            return grouped_product(*args, **kwargs)
        return func(*args, **kwargs)


def _moved(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    return tensor.detach().to(META).requires_grad_(tensor.requires_grad)


def _attention(
    on_cpu: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the kernels that ``scaled_dot_product_attention`` chooses on the CPU, or on an accelerator."""
    if on_cpu:
        with _disable_current_modes(), torch.no_grad():
            mask = None if attn_mask is None else _untouched(attn_mask)
            factors = map(_untouched, (query, key, value))
            choose: Any = torch._fused_sdp_choice  # type: ignore[attr-defined]
            kernel = choose(*factors, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            fused = kernel == _FLASH
    else:
        fused = query.dim() == 4 and not (attn_mask is not None and attn_mask.requires_grad)
    if (
        attn_mask is not None and attn_mask.dtype is torch.bool
    ):  # scaled_dot_product_attention does this before it calls a kernel
        scores = (torch.scalar_tensor(number, dtype=query.dtype, device=META) for number in (0.0, -torch.inf))
        attn_mask = torch.where(attn_mask, *scores)
    if fused:
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    """Call the dropout kernel of accelerators, whose mask has one byte per element."""
    if not train or p == 0 or not tensor.numel():
        return tensor
    return tensor.mul(0.0) if p == 1 else _aten.native_dropout(tensor, p, train)[0]


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "the kernels of recurrent layers keep other memory than their operations on the meta device"
    )


def _untouched(tensor: Tensor) -> Tensor:
    """Return an uninitialized CPU tensor of the same layout. Its pages are never written, so they use no memory."""
    on_cpu = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return on_cpu.requires_grad_(tensor.requires_grad)
