"""``deferred_init``: constructs modules without allocating memory for their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules import module as registration


@contextmanager
def deferred_init() -> Iterator[None]:
    """Construct modules with parameters on the meta device. Buffers and other tensors keep their values.

    ::

        with pipepart.deferred_init():
            model = Net(config)
        pipe = pipepart.Pipeline(model, plan, loss_fn=loss_fn, initialize=init_weights)

    A parameter is moved to the meta device when a module registers it, so at most one has memory at a time. What the
    constructor writes into it afterwards is lost: ``initialize=`` or ``weights=`` of :class:`Pipeline` give each
    stage its values, on its device. ``torch.device("meta")`` does the same for all tensors; buffers then need values,
    too.
    """

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            return None  # registers it as it is: None, lazy, of a class of its own, or moved already
        moved = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        vars(moved).update(vars(parameter))
        return moved

    hook = registration.register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()
