"""Support for ``ZeroRedundancyOptimizer``, which shards optimizer state over the replicas.

It has an optimizer of the user's class over the parameters of this rank's part, with their state. That one is saved and
loaded, so the files are those of the optimizer without sharding, and nothing has to be gathered. The settings of its
groups, such as the learning rate, are those of the outer groups, which schedulers change.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from ..input_error import InputError
from ..runtime.state.optimizers import is_sharded


def of_this_rank(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has the state of this rank's parameters, with the settings of the one that is given."""
    if not is_sharded(optimizer):
        return optimizer
    inner: Optimizer = optimizer.optim  # type: ignore[attr-defined]
    _copy_settings(optimizer, inner)
    return inner


def check_group(pipe: Any, optimizer: Optimizer) -> None:
    """Check that a sharded optimizer shards its state over the replicas of a pipeline.

    Raises:
        InputError: it does so over other processes, or there are no replicas on ranks of their own.
    """
    if not is_sharded(optimizer):
        return
    mesh = getattr(pipe, "mesh", None)
    replicas = None if mesh is None else dist.get_process_group_ranks(mesh.get_group("dp"))
    given = dist.get_process_group_ranks(optimizer.process_group)  # type: ignore[attr-defined]
    if given != replicas:
        have = (
            "there are no replicas"
            if replicas is None
            else f"the replicas of this rank's stages are on {replicas}"
        )
        raise InputError(
            f"the ZeroRedundancyOptimizer shares its state out over the ranks {given}, and {have}: make it of a "
            'pipeline with replicas under torchrun, with process_group=pipe.mesh.get_group("dp")'
        )


def adopt_settings(optimizer: Optimizer) -> None:
    """Copy the settings loaded for this rank's part to the parameter groups of a sharded optimizer."""
    if is_sharded(optimizer):
        _copy_settings(optimizer.optim, optimizer)  # type: ignore[attr-defined]


def _copy_settings(source: Any, target: Any) -> None:
    for one, other in zip(source.param_groups, target.param_groups, strict=True):
        other.update({name: value for name, value in one.items() if name != "params"})
