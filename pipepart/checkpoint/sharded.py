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


def of_this_rank(pipe: Any, optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has the state of this rank's parameters, with the settings of the one that is given.

    Raises:
        InputError: it is sharded over other processes than the replicas of the pipeline.
    """
    if not is_sharded(optimizer):
        return optimizer
    outer: Any = optimizer
    mesh = getattr(pipe, "mesh", None)
    replicas = None if mesh is None else dist.get_process_group_ranks(mesh.get_group("dp"))
    ranks = dist.get_process_group_ranks(outer.process_group)
    if ranks != replicas:
        raise InputError(
            f"the ZeroRedundancyOptimizer shares its state out over the ranks {ranks}, and the replicas of this rank's "
            f"stages are on {replicas or 'this rank alone'}: make it of a pipeline with replicas under torchrun, with "
            'process_group=pipe.mesh.get_group("dp")'
        )
    copy_settings(outer, outer.optim)
    return outer.optim


def copy_settings(source: Optimizer, target: Optimizer) -> None:
    """Copy the settings of parameter groups to another optimizer; does nothing for the same."""
    for theirs, ours in zip(source.param_groups, target.param_groups, strict=True):
        ours.update({name: value for name, value in theirs.items() if name != "params"})
