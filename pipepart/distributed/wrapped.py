"""Rejects models wrapped in DDP or FSDP or with distributed tensors, whose parameters torch shards or sums."""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..input_error import InputError


def refuse_wrapped(model: nn.Module) -> None:
    """Check that no module is under DDP or FSDP, or has distributed tensors.

    These would wait for other processes in the middle of a stage.

    Raises:
        InputError: one is.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported for this: that takes a second
    tensor = sys.modules.get("torch.distributed.tensor")
    sharded = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp else ()
    for path, part in model.named_modules():
        if isinstance(part, (DistributedDataParallel, *sharded)):
            kind = type(part).__name__ if isinstance(part, DistributedDataParallel) else "fully_shard (FSDP)"
            raise InputError(
                f"{f'layer {path!r}' if path else 'the model'} is under {kind}, which waits for other processes within "
                "a stage: give the pipeline the plain model. For data parallelism plan with replicas=2, and share the "
                "optimizer state out by torch.distributed.optim.ZeroRedundancyOptimizer(..., "
                'process_group=pipe.mesh.get_group("dp"))'
            )
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if tensor is not None and isinstance(value, tensor.DTensor):
            raise InputError(
                f"{name!r} is a DTensor, which is shared out over processes that would wait for each other within a "
                "stage: give the pipeline the plain model, without parallelize_module or distribute_tensor"
            )
