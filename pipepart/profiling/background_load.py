"""Keeps the rest of the CPU as busy as a pipeline will, while layers are timed on one part of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from ..autograd import graph_cut
from ..capture import flatten
from ..capture.deep_copies import deep_copies
from ..data.arguments import call
from ..workers.worker import start_workers
from .timing import Loss, fresh

# Copies of a larger model than this are not worth the memory: it is then timed on an idle machine.
_LARGEST_COPY_BYTES = 2**30


@contextmanager
def neighbours(model: nn.Module, sample: Any, loss: Loss, count: int, threads: int | None) -> Iterator[None]:
    """While the block runs, ``count`` other workers train copies of ``model`` on ``sample``.

    Virtual devices share caches, memory bandwidth and often execution units, so that a layer takes longer beside
    others than alone: up to a third longer was seen on two virtual CPUs. A model that cannot be copied, or is larger
    than 1 GiB, gets no neighbours.
    """
    copies = _copies(model, count)
    if not copies:
        yield
        return
    stop = threading.Event()
    done: SimpleQueue[None] = SimpleQueue()
    cpu = torch.device("cpu")
    workers = start_workers([(f"neighbour-{index}", cpu, threads) for index in range(len(copies))])
    try:
        for worker, twin in zip(workers, copies, strict=True):
            worker.submit(partial(_train, twin, sample, loss, stop, done))
        yield
    finally:
        stop.set()
        for worker in workers:
            done.get()
            worker.stop()
        for worker in workers:
            worker.join()


def _copies(model: nn.Module, count: int) -> list[nn.Module]:
    if sum(parameter.nbytes for parameter in model.parameters()) * count > _LARGEST_COPY_BYTES:
        return []
    try:
        return [twin for _ in range(count) for twin in deep_copies(model)]
    except Exception:
        return []


def _train(model: nn.Module, sample: Any, loss: Loss, stop: threading.Event, done: SimpleQueue[None]) -> None:
    try:
        while not stop.is_set():
            value = fresh(sample)
            for _, layer in flatten(model):
                value = call(layer, value)
                if stop.is_set():
                    return
            roots = graph_cut.cut(value if loss is None else loss(value))
            graph_cut.backward(roots[1], [torch.ones_like(leaf) for leaf in graph_cut.leaves(roots[0])])
    except Exception:
        return  # the layers are timed elsewhere, and fail there if they fail
    finally:
        done.put(None)
