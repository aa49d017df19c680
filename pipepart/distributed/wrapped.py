"""Rejects models wrapped in DDP or FSDP or with distributed tensors, whose parameters torch shards or sums."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..input_error import InputError


def is_sharding_imported() -> bool:
    """Return True if the script may have sharded a module in place since the pipeline was constructed."""
    return "torch.distributed.fsdp" in sys.modules


def refuse_wrapped(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Check that no module is under DDP or FSDP, or has distributed tensors.

    These would wait for other processes in the middle of a stage.

    Args:
        layers: names and modules, such as those of ``model.named_children()``.

    Raises:
        InputError: one is.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported for this: that takes a second
    tensor = sys.modules.get("torch.distributed.tensor")
    sharded = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp else ()
    for name, layer in layers:
        for path, part in layer.named_modules(prefix=name):
            if isinstance(part, (DistributedDataParallel, *sharded)):
                what = (
                    "DistributedDataParallel"
                    if isinstance(part, DistributedDataParallel)
                    else "fully_shard (FSDP)"
                )
                raise InputError(
                    f"{f'layer {path!r}' if path else 'the model'} is under {what}, which waits for other processes "
                    "within a stage: give the pipeline the plain model. For data parallelism plan with replicas=2, and "
                    "share the optimizer state out by torch.distributed.optim.ZeroRedundancyOptimizer(..., "
                    'process_group=pipe.mesh.get_group("dp"))'
                )
            if tensor is None:
                continue
            for own, value in (
                *part.named_parameters(path, recurse=False),
                *part.named_buffers(path, recurse=False),
            ):
                if isinstance(value, tensor.DTensor):
                    raise InputError(
                        f"{own!r} is a DTensor, which is shared out over processes that would wait for each other "
                        "within a stage: give the pipeline the plain model, without parallelize_module or "
                        "distribute_tensor"
                    )
