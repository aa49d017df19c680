"""Initializes the parameters and buffers of a model on the meta device, module by module."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ...capture import CaptureError, state_of
from ...generators import draws_undone
from .moving import swap_values

Initialize = Callable[[nn.Module], object]


def initialize_modules(model: nn.Module, what: Mapping[Tensor, str], initialize: Initialize) -> None:
    """Give tensors memory on the CPU and their initial values.

    Children come before their parents, as in ``nn.Module.apply``. Each module draws from a seed of its own, so the
    values do not depend on which other modules this process has.

    Args:
        what: the tensors that get values, each as ``"parameter 'head.weight'"``, for errors.
        initialize: see :class:`pipepart.Pipeline`.

    Raises:
        CaptureError: a tensor has no values afterwards, or cannot get memory.
    """
    seed = int(torch.randint(2**62, ()))  # moves the caller's generator: a second model gets other values
    versions = {tensor: _allocate(tensor, description) for tensor, description in what.items()}
    with draws_undone():
        for path, module in _bottom_up(model, "", set()):
            if not versions.keys().isdisjoint(state_of(module)):
                _call(initialize, module, path, seed)
    held = set(state_of(model))  # an initializer may bind buffers anew
    for tensor, description in what.items():
        if tensor in held and _is_unfilled(tensor, versions[tensor]):
            raise CaptureError(
                f"nothing initializes {description}: the initial values of this model must come from initialize=, "
                "called with each module after its children, or from weights='folder or file.safetensors'"
            )


def _bottom_up(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model with their paths, children before their parents."""
    if module not in seen:
        seen.add(module)
        for name, child in module.named_children():
            yield from _bottom_up(child, f"{path}.{name}" if path else name, seen)
        yield path, module


def _allocate(tensor: Tensor, description: str) -> int:
    """Give a tensor memory; return its version."""
    fill = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    values = torch.full_like(tensor, fill, device="cpu", requires_grad=False)
    if swap_values(tensor, values) is not tensor:
        raise CaptureError(
            f"{description} cannot get values, as a graph or a weak reference holds it: make the pipeline before a "
            "forward of the model, and detach tensors that the constructor computes from parameters"
        )
    return tensor._version


def _call(initialize: Initialize, module: nn.Module, path: str, seed: int) -> None:
    own_seed = hashlib.blake2b(f"{seed} {path}".encode(), digest_size=7).digest()
    torch.default_generator.manual_seed(int.from_bytes(own_seed))
    try:
        with torch.no_grad():
            initialize(module)
    except Exception as error:
        error.add_note(f"pipepart: while module {path!r} was initialized")
        raise


def _is_unfilled(tensor: Tensor, version: int) -> bool:
    if tensor.numel() == 0:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.detach().isnan().any())
    return tensor._version == version
