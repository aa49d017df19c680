"""The FSDP units of the layers of a stage: what one call of ``fully_shard`` gathers and reduces together.

::

    step begins     gather every unit, in order (but those that reshard after each forward)
    F, B, I, W      parameters are whole; gradients add up in the whole parameters, and nothing is sent
    REDUCE_GRAD     the gradients of all micro-batches are reduced and scattered once, and added to those of the shards
    step ends       parameters are shards

``torch.distributed.pipelining`` drives FSDP in the same way (``perform_reduce_grad``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...input_error import InputError


class Unit:
    """One call of ``fully_shard``.

    Args:
        module: that it was called with.

    Attributes:
        state: of torch, the same for all modules of the call.
        reshards: whether its parameters are shards between a forward and its backward.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.state: Any = module._get_fsdp_state()
        if self.state._auto_reshard_after_forward:
            module.set_reshard_after_forward(False, recurse=False)  # else each micro-batch would gather again
        self.reshards = any(group.post_forward_mesh_info is not None for group in _groups(self.state))
        module.set_gradient_divide_factor(1.0)  # the loss is divided
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        self._set_last(False)

    @property
    def is_root(self) -> bool:
        """Whether its module is in no other unit's module."""
        return self.state._is_root

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The shards."""
        return [part.sharded_param for part in self._parts()]

    def gather(self) -> None:
        """Make the parameters whole. All ranks of the mesh call this."""
        if not self.reshards:
            self._module.unshard()

    def have_gradients(self) -> list[bool]:
        """Return for each parameter whether a backward on this rank has given it a gradient."""
        return [_gradient(part) is not None for part in self._parts()]

    def complete_gradients(self, wanted: Sequence[bool]) -> None:
        """Give parameters that lack a gradient one that changes nothing: all ranks reduce the same parameters."""
        for part, is_wanted in zip(self._parts(), wanted, strict=True):
            if is_wanted and _gradient(part) is None:
                whole = part.unsharded_param
                # Minus zero changes nothing that it is added to, not even another minus zero.
                whole.grad = torch.full_like(whole.detach(), -0.0)

    @torch.no_grad()
    def cast_gradients(self) -> None:
        """Add gradients up in the dtype of the reduction, as FSDP does behind a backward: for weights after W."""
        for part in self._parts():
            whole = getattr(part, "_unsharded_param", None)
            if part.reduce_dtype is None or whole is None or whole.grad is None:
                continue
            if part.unsharded_accumulated_grad is not None:
                part.unsharded_accumulated_grad += whole.grad
                whole.grad = None
            else:
                part.to_accumulated_grad_if_needed()

    def reduce(self) -> None:
        """Add the sum of the gradients of all ranks to those of the shards, and scatter. For a root: all its units."""
        context = self.state._state_ctx
        try:
            context.is_last_backward = True
            self._set_last(True)
            for state in context.all_states:
                for group in reversed(_groups(state)):
                    group.post_backward()
            self.state._root_post_backward_final_callback()
        finally:
            context.is_last_backward = False
            self._set_last(False)

    def scatter(self) -> None:
        """Make the parameters shards. Nothing is sent."""
        self._module.reshard()
        self.state._comm_ctx.post_forward_order.clear()
        for group in _groups(self.state):
            group._post_forward_indices.clear()

    def reset(self) -> None:
        """Make the parameters shards after a failure, without gradients. For a root."""
        self._module.reset_iter_state()

    def _set_last(self, last: bool) -> None:
        self._module.set_is_last_backward(last)
        self._module.set_reshard_after_backward(last)
        self._module.set_requires_gradient_sync(last)

    def _parts(self) -> Iterator[Any]:
        for group in _groups(self.state):
            yield from group.fsdp_params


def units_of(layers: Sequence[tuple[str, nn.Module]], mesh: DeviceMesh) -> list[Unit]:
    """Return the units of layers, each before those within its module.

    Raises:
        ValueError: a unit is not sharded over the dimension "dp" of the mesh, or torch cannot run it.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported for this: that takes a second
    units: dict[Any, Unit] = {}
    modules = (pair for name, layer in layers for pair in layer.named_modules(prefix=name))
    for path, module in modules if fsdp else ():
        if isinstance(module, fsdp.FSDPModule):  # type: ignore[union-attr]
            state = _checked_state(path, module, mesh)
            if state not in units:
                _initialize(path, state)
                units[state] = Unit(module)
    return list(units.values())


def _checked_state(path: str, module: Any, mesh: DeviceMesh) -> Any:
    if any(kind.__name__ == "ReplicateModule" for kind in type(module).__mro__):
        raise InputError(
            f"module {path!r} is under replicate, which adds gradients up by itself: leave it out, as the pipeline "
            "adds them up over mesh['dp']"
        )
    state = module._get_fsdp_state()
    ranks = mesh["dp"].mesh.tolist()
    for group in _groups(state):
        if (members := group.mesh_info.mesh.mesh.tolist()) != ranks:
            raise InputError(
                f"module {path!r} is sharded over the ranks {members}, and those that run its stage with other "
                f"micro-batches are {ranks}: fully_shard(module, mesh=mesh['dp'])"
            )
        if type(group.offload_policy).__name__ == "CPUOffloadPolicy":
            raise InputError(
                f"module {path!r} has its parameters on the host between two actions, and the pipeline keeps them "
                "where they are: leave offload_policy= out"
            )
    return state


def _initialize(path: str, state: Any) -> None:
    """Find the units within a module that is in no other one, as its first forward would."""
    if state._is_root is None and len(state._modules) > 1:
        raise InputError(
            f"module {path!r} is sharded by one call of fully_shard with modules beside it, and no layer that has all "
            "of them is sharded: call fully_shard for each module"
        )
    try:
        state._lazy_init()
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"torch cannot run module {path!r} as parallelize has sharded it: {error}"
        ) from error


def _groups(state: Any) -> Sequence[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return several
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # before torch 2.13


def _gradient(part: Any) -> Tensor | None:
    if part.unsharded_accumulated_grad is not None:
        return part.unsharded_accumulated_grad
    whole = getattr(part, "_unsharded_param", None)
    return None if whole is None else whole.grad
