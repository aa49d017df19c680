"""Keeps other CPU cores busy with copies of the model while its layers are timed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..capture.deep_copies import deep_copies
from ..workers.worker import Worker, start_workers
from .layer_pass import LayerPass, Layers, Observer

# The copies must not need more memory than this; otherwise the model is timed without background load.
_LARGEST_COPIES_BYTES = 2**30


class BackgroundLoad:
    """Copies of the layers of a model, each with a worker thread that can train it."""

    def __init__(self, copies: Sequence[Layers], micro_batch: Any, workers: Sequence[Worker]) -> None:
        self._copies = copies
        self._micro_batch = micro_batch
        self._workers = workers

    @contextmanager
    def running(self) -> Iterator[None]:
        """Train the copies within the block; at its end no worker computes any more."""
        stop, ended = threading.Event(), [threading.Event() for _ in self._workers]
        for worker, copied, end in zip(self._workers, self._copies, ended, strict=True):
            worker.submit(partial(_train, copied, self._micro_batch, stop), end.set)
        try:
            yield
        finally:
            stop.set()
            for end in ended:
                end.wait()


@contextmanager
def background_load(
    layers: Layers, micro_batch: Any, workers: int, threads: int | None
) -> Iterator[BackgroundLoad | None]:
    """Yield a load of ``workers`` copies of the layers of a model, to train on ``micro_batch`` without a loss.

    Virtual devices share caches, memory bandwidth and often the execution units of a core. So a layer takes longer
    while other devices compute: up to a third longer on two virtual CPUs.

    Yields:
        None with no workers, a model that cannot be copied, or copies of more than 1 GiB.
    """
    copies = _copies(layers, workers)
    if not copies:
        yield None
        return
    cpu = torch.device("cpu")
    running = start_workers([(f"load-{index}", cpu, threads) for index in range(len(copies))])
    try:
        yield BackgroundLoad(copies, micro_batch, running)
    finally:
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
