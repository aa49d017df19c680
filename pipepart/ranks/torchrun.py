"""Says whether this process is one of several, and initializes torch.distributed for them."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore


def under_torchrun() -> bool:
    """Return whether this process is one of several of torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return (
        dist.is_available() and dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    )


def initialize() -> None:
    """Initialize torch.distributed, if nobody has."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        dist.init_process_group(backend)
        return
    # torchrun keeps its store when it starts processes again, with the addresses of those that have ended (torch 2.13).
    # Agents of several hosts count attempts differently, so this is for one host.
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False)
    attempt = PrefixStore(f"attempt/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=size)
