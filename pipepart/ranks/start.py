"""Waits for all processes of a job to start, through the store of torch.distributed.

::

    rank 0     token ──▶ store                        store ── nonces of all ──▶ rank 0 ── go: nonces ──▶ store
    rank 1               store ── token ──▶ nonce ──▶ store                      store ── go, with its nonce ──▶ rank 1

torch 2.13 keeps the store of a job that torchrun starts again, with what the processes before have written. So a token
counts only if rank 0 answers under it with the nonce of this process.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from .failure import is_lost

_POLL_SECONDS = 0.02  # between two looks into the store
_TOKEN = "pipepart/token"


def agree_on_start(rank: int, size: int, store: Any, seconds: float) -> Any:
    """Wait for all processes, and return a store that is used only by this start of the job.

    Raises:
        TimeoutError: not all ranks have come within ``seconds``.
        RankError: the process that has the store has ended.
    """
    end = time.monotonic() + seconds
    try:
        token = _gather(size, store, end) if rank == 0 else _follow(rank, store, end)
    except RuntimeError:
        raise is_lost(0) from None  # the only process that may have the store, if torchrun has not
    return PrefixStore(f"pipepart/{token}/log", store)


def is_store_of(rank: int) -> bool:
    """Return True if the store may be in this rank's process, and end with it, instead of in torchrun's agent."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _gather(size: int, store: Any, end: float) -> str:
    """On rank 0, wait for the nonces of all other ranks; return the token."""
    token = secrets.token_hex(8)
    nonces: dict[int, str] = {}
    store.set(_TOKEN, token)
    while len(nonces) < size - 1:
        for rank in range(1, size):
            if rank not in nonces and store.check([f"pipepart/{token}/{rank}"]):
                nonces[rank] = store.get(f"pipepart/{token}/{rank}").decode()
        if time.monotonic() > end:
            missing = ", ".join(str(rank) for rank in range(1, size) if rank not in nonces)
            raise TimeoutError(
                f"of the {size} ranks {missing} did not make the pipeline in time, which all ranks make at "
                "the same point of the script: do they wait elsewhere, or have they ended before?"
            )
        time.sleep(_POLL_SECONDS)
    store.set(f"pipepart/{token}/go", json.dumps(nonces))
    return token


def _follow(rank: int, store: Any, end: float) -> str:
    """On another rank, wait for rank 0; return its token."""
    nonce, token = secrets.token_hex(8), ""
    while True:
        if store.check([_TOKEN]) and (newest := store.get(_TOKEN).decode()) != token:
            token = newest
            store.set(f"pipepart/{token}/{rank}", nonce)
        if token and store.check([f"pipepart/{token}/go"]):
            nonces = json.loads(store.get(f"pipepart/{token}/go"))
            if nonces.get(str(rank)) == nonce:
                return token
        if time.monotonic() > end:
            raise TimeoutError(
                f"rank {rank} makes the pipeline and rank 0 does not, or not all others, which all ranks make at the "
                "same point of the script: does one wait elsewhere, or has it ended before?"
            )
        time.sleep(_POLL_SECONDS)
