"""Initializes torch.distributed and the message log under torchrun, and reports the end of the script to all ranks."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from .failure import serialize_exception
from .log import MessageLog
from .waiting import all_have_left
from .watch import break_connections

_LEAVE_SECONDS = 2.0  # for threads to leave what they wait for in torch
_logs: list[MessageLog] = []  # that of this process, once it is there


def under_torchrun() -> bool:
    """Return True if this process is one of several processes of torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return (
        dist.is_available() and dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    )


def initialize() -> MessageLog:
    """Connect the processes, and initialize torch.distributed if it is not. All processes call this.

    torch 2.13 keeps its store when torchrun starts processes again, with the addresses of those that have ended. The
    process group that is made here looks below a name in it that is new for each start.
    """
    if not _logs:
        if dist.is_initialized():
            store: Any = dist.distributed_c10d._get_default_store()
            rank, size = dist.get_rank(), dist.get_world_size()
        else:
            store, rank, size = next(iter(rendezvous("env://")))
        _logs.append(MessageLog(rank, size, store, store.timeout.total_seconds()))
    log = _logs[0]
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = PrefixStore("torch", log.store)
        dist.init_process_group(backend, store=store, rank=log.rank, world_size=log.size)
    return log


@atexit.register
def _script_ended() -> None:
    """Tell the other ranks that the script has ended, and by which exception."""
    interactive = sys.flags.interactive or hasattr(sys, "ps1")
    error = None if interactive else getattr(sys, "last_value", None)
    report = serialize_exception(error) if error is not None else {}
    during = f" with {report['what']}" if report else ""
    last = {"why": f"its script has ended{during}", "traceback": report.get("traceback", "")}
    if error is not None:
        gc.freeze()  # the interpreter would walk all of torch several times, while the others wait for its end
    if _logs:
        _logs[0].end(last, wait=error is not None)
    if not all_have_left(_LEAVE_SECONDS):
        for group in list(dist.distributed_c10d._world.pg_map):
            break_connections(group)
        all_have_left(_LEAVE_SECONDS)
