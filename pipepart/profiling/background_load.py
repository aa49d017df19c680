"""Keeps other CPU cores busy with copies of the model while its layers are timed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..capture.deep_copies import deep_copies
from ..workers.worker import start_workers
from .layer_pass import LayerPass, Layers, Observer

# The copies must not need more memory than this; otherwise the model is timed without background load.
_LARGEST_COPIES_BYTES = 2**30


@contextmanager
def background_load(layers: Layers, micro_batch: Any, workers: int, threads: int | None) -> Iterator[bool]:
    """Train copies of the layers of a model on ``micro_batch`` in ``workers`` threads within the block, without a loss.

    Virtual devices share caches, memory bandwidth and often the execution units of a core. So a layer takes longer
    while other devices compute: up to a third longer on two virtual CPUs.

    Yields:
        True if the load runs. False with no workers, a model that cannot be copied, or copies of more than 1 GiB.
    """
    copies = _copies(layers, workers)
    if not copies:
        yield False
        return
    stop = threading.Event()
    cpu = torch.device("cpu")
    running = start_workers([(f"load-{index}", cpu, threads) for index in range(len(copies))])
    try:
        for worker, copied in zip(running, copies, strict=True):
            worker.submit(partial(_train, copied, micro_batch, stop))
        yield True
    finally:
        stop.set()
        for worker in running:
            worker.stop()
        for worker in running:
            worker.join()


def _copies(layers: Layers, count: int) -> list[Layers]:
    model = nn.ModuleList([layer for _, layer in layers])
    if sum(parameter.nbytes for parameter in model.parameters()) * count > _LARGEST_COPIES_BYTES:
        return []
    try:
        return [[("", copied) for copied in deep_copies(*model)] for _ in range(count)]
    except Exception:
        return []


def _train(layers: Layers, micro_batch: Any, stop: threading.Event) -> None:
    try:
        chain = LayerPass(layers, None, stop)
        while True:
            chain.run(micro_batch, Observer())
    except Exception:
        return  # the load was stopped, or a layer failed; that layer also fails when it is timed
