"""Computes parameter gradients of a random projection of a model's output, and compares two sets of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...autograd.own_copy import tensors
from ...relative_errors import tensor_errors

Gradients = Mapping[str, Tensor]
"""Gradient of each parameter by its name; zeros for one that was not used."""


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
        gradients = torch.autograd.grad(roots, [*trained.values()], factors, materialize_grads=True)
    except RuntimeError as error:
        if "heckpoint" not in str(error):
            raise
        return None
    return {name: gradient.to_dense() for name, gradient in zip(trained, gradients, strict=True)}


def differing_gradient(ones: Gradients | None, others: Gradients | None) -> tuple[str, float] | None:
    """Return the name and the relative error of the first gradient that differs; None if all are equal.

    Sums may round in another order: an error counts if it is larger than the square root of the dtype's precision.
    """
    if ones is None or others is None:
        return None
    for name, error in tensor_errors(ones, others).items():
        if error > torch.finfo((ones if name in ones else others)[name].dtype).eps ** 0.5:
            return name, error
    return None
