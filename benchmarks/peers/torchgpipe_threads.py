"""torchgpipe 0.0.7 on two CPU devices, as it comes and with a worker thread for each device."""

import copy
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torchgpipe.pipeline
from torch import Tensor
from torchgpipe import GPipe
from torchgpipe.worker import spawn_workers

from benchmarks.contender import Course, InThisProcess


class TorchGPipe(InThisProcess):
    """GPipe without recomputation; `worker_per_device` lends it the threads that it has on GPUs."""

    def __init__(self, course: Course, *, worker_per_device: bool) -> None:
        self.name = "torchgpipe, 2 workers" if worker_per_device else "torchgpipe"
        self._workload = course.workload
        self._workers = _worker_per_device if worker_per_device else nullcontext
        self._pipe = GPipe(
            copy.deepcopy(course.workload.model),
            [len(stage) for stage in course.cut],
            devices=["cpu"] * len(course.cut),
            chunks=course.micro_batches,
            checkpoint="never",
        )

    def step(self) -> None:
        self._pipe.zero_grad(set_to_none=True)
        with self._workers():
            output = self._pipe(self._workload.sample)
        self._workload.loss_fn(output, self._workload.target).backward()

    def gradients(self) -> dict[str, Tensor]:
        return {
            re.sub(r"^partitions\.\d+\.", "", name): p.grad
            for name, p in self._pipe.named_parameters()
            if p.grad is not None
        }


def _worker_per_device() -> AbstractContextManager[object]:
    """Undoes what the package does on CPUs only: it maps all of them to one worker."""
    return mock.patch.object(torchgpipe.pipeline, "spawn_workers", _spawn_one_each)


@contextmanager
def _spawn_one_each(devices: list[torch.device]) -> Iterator[tuple[list[Any], list[Any]]]:
    with ExitStack() as workers:
        queues = [workers.enter_context(spawn_workers([device])) for device in devices]
        yield [inputs[0] for inputs, _ in queues], [outputs[0] for _, outputs in queues]
