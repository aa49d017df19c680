"""Initializes the parameters and buffers of a model on the meta device, module by module, on the devices of stages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...capture import CaptureError, state_of
from ...generators import draws_undone
from .moving import swap_values

Initialize = Callable[[nn.Module], object]


def initialize_modules(
    model: nn.Module,
    homes: Mapping[Tensor, torch.device],
    what: Mapping[Tensor, str],
    initialize: Initialize,
) -> None:
    """Give tensors memory and their initial values.

    Children come before their parents, as in ``nn.Module.apply``. A module's tensors are initialized on the CPU and
    moved to their device after their module's parent has run. Each module draws from a seed of its own, so the values
    do not depend on the devices or on which other modules this process has.

    Args:
        model: has the tensors.
        homes: the device of each tensor that gets values.
        what: of each of these, as ``"parameter 'head.weight'"``, for errors.
        initialize: see :class:`pipepart.Pipeline`.

    Raises:
        CaptureError: a tensor has no values afterwards, or cannot get memory.
    """
    versions: dict[Tensor, int] = {}
    seed = int(torch.randint(2**62, ()))  # moves the caller's generator: a second model gets other values
    with draws_undone():
        run = _Run(homes, what, versions, seed, initialize)
        run.settle(run.visit(model, ""))
    held = set(state_of(model))  # an initializer may bind buffers anew
    for tensor, description in what.items():
        if tensor in held and _is_unfilled(tensor, versions[tensor]):
            raise CaptureError(
                f"nothing initializes {description}: the initial values of this model must come from initialize=, "
                "called with each module after its children, or from weights='folder or file.safetensors'"
            )


class _Run:
    """One pass over the modules of a model."""

    def __init__(
        self,
        homes: Mapping[Tensor, torch.device],
        what: Mapping[Tensor, str],
        versions: dict[Tensor, int],
        seed: int,
        initialize: Initialize,
    ) -> None:
        self._homes = homes
        self._what = what
        self._versions = versions
        self._seed = seed
        self._initialize = initialize
        self._visited: set[nn.Module] = set()

    def visit(self, module: nn.Module, path: str) -> list[Tensor]:
        """Initialize the children of a module and the module; return its own tensors, which are still on the CPU."""
        if module in self._visited:
            return []
        self._visited.add(module)
        of_children = [
            tensor
            for name, child in module.named_children()
            for tensor in self.visit(child, f"{path}.{name}" if path else name)
        ]
        tensors = [
            tensor
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None and tensor in self._homes
        ]
        for tensor in tensors:
            if tensor not in self._versions:
                self._allocate(tensor)
        if any(tensor in self._versions for tensor in (*module.parameters(), *module.buffers())):
            self._call(module, path)
        self.settle(of_children)
        return tensors

    def settle(self, tensors: Any) -> None:
        """Move tensors to their devices."""
        for tensor in tensors:
            if tensor.device != self._homes[tensor]:
                version = tensor._version
                swap_values(tensor, tensor.detach().to(self._homes[tensor]))
                self._versions[tensor] += tensor._version - version

    def _allocate(self, tensor: Tensor) -> None:
        fill = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
        values = torch.full_like(tensor, fill, device="cpu", requires_grad=False)
        if swap_values(tensor, values) is not tensor:
            raise CaptureError(
                f"{self._what[tensor]} cannot get values, as a graph or a weak reference holds it: make the pipeline "
                "before a forward of the model, and detach tensors that the constructor computes from parameters"
            )
        self._versions[tensor] = tensor._version

    def _call(self, module: nn.Module, path: str) -> None:
        seed = hashlib.blake2b(f"{self._seed} {path}".encode(), digest_size=7).digest()
        torch.default_generator.manual_seed(int.from_bytes(seed))
        try:
            with torch.no_grad():
                self._initialize(module)
        except Exception as error:
            error.add_note(f"pipepart: while module {path!r} was initialized")
            raise


def _is_unfilled(tensor: Tensor, version: int) -> bool:
    if tensor.numel() == 0:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.detach().isnan().any())
    return tensor._version == version
