"""Computes parameter gradients of a random projection of a model's output, and compares two sets of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...autograd.own_copy import tensors

Gradients = Mapping[str, Tensor]
"""Gradient of each parameter by its name, without those that have none."""


def projected_gradients(result: Any, model: nn.Module) -> Gradients | None:
    """Return the parameter gradients of the sum of a result's entries, weighted by random numbers of a fixed seed.

    None for models whose checkpoints are reentrant: torch differentiates these by ``backward`` only.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    roots = [tensor for tensor in tensors(result) if tensor.requires_grad]
    if not trained or not roots:
        return {}
    generator = torch.Generator().manual_seed(0)
    factors = [torch.rand(root.shape, generator=generator).to(root) for root in roots]
    try:
        gradients = torch.autograd.grad(roots, [*trained.values()], factors, allow_unused=True)
    except RuntimeError as error:
        if "heckpoint" not in str(error):
            raise
        return None
    return {name: gradient for name, gradient in zip(trained, gradients, strict=True) if gradient is not None}


def differing_gradient(ones: Gradients | None, others: Gradients | None) -> tuple[str, float] | None:
    """Return the name and the relative difference of the first gradient that differs; None if all are equal.

    Sums may round in another order: a difference counts if it is larger than the square root of the dtype's precision,
    relative to the gradient, and than a thousandth of that relative to the largest one.
    """
    if ones is None or others is None or not (ones or others):
        return None
    norms = {name: _norm(gradient) for gradients in (ones, others) for name, gradient in gradients.items()}
    largest = max(norms.values())
    for name, norm in norms.items():
        first, second = ones.get(name), others.get(name)
        apart = norm if first is None or second is None else _norm(first - second.to(first.device))
        precision = torch.finfo((ones if first is not None else others)[name].dtype).eps ** 0.5
        if apart > precision * norm and apart > 1e-3 * precision * largest:
            return name, apart / norm if norm else 1.0
    return None


def _norm(gradient: Tensor) -> float:
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return float(gradient.double().nan_to_num().norm())
