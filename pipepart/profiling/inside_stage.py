"""Applies the function of ``Pipeline(..., parallelize=f)`` to a copy of a model in one process, to profile its share.

Torch's fake process group stands for the other processes: a collective returns at once. The parameters are the shards
of the first process, so the bytes and the compute seconds of each layer are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import nn

from ..capture import Chain
from ..capture.deep_copies import deep_copies
from ..input_error import InputError, InputTypeError
from ..units import is_count

# Called with modules by name, and the mesh of their processes with the dimensions "dp" and, if there are several, "tp".
Parallelize = Callable[[Mapping[str, nn.Module], Any], object]


@contextmanager
def copied_for(model: nn.Module, tensor: int) -> Iterator[nn.Module]:
    """Yield a copy of a model, with a fake process group of ``tensor`` processes within the block.

    Raises:
        ValueError: ``tensor`` is no number of at least 1, or torch.distributed is in use.
    """
    if not is_count(tensor):
        raise InputError(f"tensor must be a whole number of at least 1, got {tensor!r}")
    if dist.is_initialized():
        raise InputError(
            "parallelize= is profiled in one process under torch's fake process group, and torch.distributed is in use "
            "here: profile before the process group is made (Cluster.of_ranks() makes one), or in a script without "
            "torchrun, and load the saved profile"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    (copied,) = deep_copies(model)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tensor)
    try:
        yield copied
    finally:
        dist.destroy_process_group()


def parallelize_layers(chain: Chain, parallelize: Parallelize | None, tensor: int) -> None:
    """Call ``parallelize`` with the modules of all layers, as the pipeline does with those of a rank.

    Args:
        chain: of the copied model. A recorded model has been recorded with all micro-batches that will be measured.
        parallelize: the function.
        tensor: number of processes that share the layers: the size of the mesh's dimension "tp". That of "dp" is 1.

    Raises:
        TypeError: ``parallelize`` is no function.
        ValueError: it called ``fully_shard``.
        Exception: what ``parallelize`` raises.
    """
    if not callable(parallelize):
        raise InputTypeError(
            f"tensor={tensor!r} profiles the share of one process, which a function makes of the layers: give "
            f"parallelize=f, as for pipepart.Pipeline; got {parallelize!r:.80}"
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule

    sizes, names = ((1, tensor), ("dp", "tp")) if tensor > 1 else ((1,), ("dp",))
    modules = chain.modules_of(chain.layers)
    parallelize(MappingProxyType(modules), init_device_mesh("cpu", sizes, mesh_dim_names=names))
    for name, layer in modules.items():
        if any(isinstance(module, FSDPModule) for module in layer.modules()):
            raise InputError(
                f"parallelize called fully_shard on {name!r}, and a profile is that of one replica, whose parameters "
                "plan(..., shard=True) counts as sharded: write `if mesh['dp'].size() > 1:` before fully_shard"
            )
