"""Clips gradients to the numbers that a model on one device has, wherever the parameters are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales gradients so that their norm together is at most ``max_norm``, as torch's function of this name does.

    Torch sums the norms of several devices one device after the other, which has other last bits.

    Returns:
        The norm before, on the device of the first gradient.

    Raises:
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``.
    """
    own = list(parameters)
    gradients = [parameter.grad for parameter in own if parameter.grad is not None]
    if len({gradient.device for gradient in gradients}) < 2:
        norm = nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    else:
        norm = total_norm(gradients, norm_type, foreach)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the norm of order {norm_type} of all gradients is {float(norm)}: to scale by it all the same, set "
                "error_if_nonfinite=False"
            )
    nn.utils.clip_grads_with_norm_(own, max_norm, norm, foreach)
    return norm


def total_norm(gradients: Sequence[Tensor], norm_type: float = 2.0, foreach: bool | None = None) -> Tensor:
    """The norm of the gradients of several devices, summed in their order; those of one dtype stand together."""
    norms: dict[int, Tensor] = {}
    for device in dict.fromkeys(gradient.device for gradient in gradients):
        places = [place for place, gradient in enumerate(gradients) if gradient.device == device]
        here = [gradients[place].detach() for place in places]
        each = (
            [torch.linalg.vector_norm(gradient, norm_type) for gradient in here]
            if foreach is False
            else torch.ops.aten._foreach_norm.Scalar(here, norm_type)
        )
        norms.update(zip(places, each, strict=True))
    dtypes = list(dict.fromkeys(gradient.dtype for gradient in gradients))
    order = sorted(norms, key=lambda place: (dtypes.index(gradients[place].dtype), place))
    return torch.linalg.vector_norm(
        torch.stack([norms[place].to(gradients[0].device) for place in order]), norm_type
    )
