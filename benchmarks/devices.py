"""Contenders of the GPU benchmark: the model on one device, and pipelines whose stages may share a device."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import pipepart
from benchmarks.contender import InThisProcess
from benchmarks.models import Block, Embedding, LossFn, next_token_loss
from benchmarks.overlap import synchronize
from pipepart import Cluster, Pipeline, Plan


@dataclass(frozen=True)
class Sizes:
    """Of a GPT and its mini-batch."""

    blocks: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    micro_batches: int


@dataclass(frozen=True)
class Task:
    """A model on a device, with a mini-batch there."""

    model: nn.Sequential
    sample: Tensor
    target: Tensor
    loss_fn: LossFn
    micro_batches: int


def gpt(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Task:
    """The same parameters and data at every call."""
    torch.manual_seed(0)
    with torch.device(device):
        blocks = (Block(sizes.width, sizes.heads) for _ in range(sizes.blocks))
        embedding = Embedding(sizes.vocabulary, sizes.width, sizes.sequence)
        model = nn.Sequential(embedding, *blocks, nn.Linear(sizes.width, sizes.vocabulary))
        tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.sequence + 1))
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Task(model.to(dtype), x, y, next_token_loss, sizes.micro_batches)


def small(layers: int, width: int, micro_batches: int, device: torch.device) -> Task:
    """So little arithmetic to a layer that launching it takes longer."""
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)),
        )
        batch = torch.randn(8 * micro_batches, width), torch.randn(8 * micro_batches, width)
    return Task(model, *batch, nn.functional.mse_loss, micro_batches)


def plan_for(task: Task, devices: Sequence[torch.device]) -> Plan:
    """1F1B with a stage on each of the devices, of which several may be one, and no optimizer."""
    profile = pipepart.profile(
        task.model,
        task.sample,
        loss_fn=task.loss_fn,
        target=task.target,
        micro_batches=task.micro_batches,
        optimizer="sgd",
        devices=len(devices),
    )
    cluster = Cluster.of(devices)
    return pipepart.plan(profile, cluster, schedule="1f1b", micro_batches=task.micro_batches)


class OnDevices(InThisProcess):
    """A copy of a task's model; a step begins and ends with idle devices."""

    def __init__(self, name: str, task: Task, devices: Sequence[torch.device]) -> None:
        self.name = name
        self._task = task
        self._devices = list(dict.fromkeys(devices))
        self._model = copy.deepcopy(task.model)

    def gradients(self) -> dict[str, Tensor]:
        home = self._task.sample.device
        return {name: p.grad.to(home) for name, p in self._model.named_parameters() if p.grad is not None}

    @contextmanager
    def _whole_step(self) -> Iterator[None]:
        self._model.zero_grad()
        yield
        synchronize(self._devices)


class Accumulation(OnDevices):
    """One micro-batch after the other through the whole model, on one device."""

    def __init__(self, task: Task) -> None:
        super().__init__("plain, micro-batches", task, [task.sample.device])
        parts = task.sample.chunk(task.micro_batches), task.target.chunk(task.micro_batches)
        self._pairs = list(zip(*parts, strict=True))

    def step(self) -> None:
        with self._whole_step():
            for sample, target in self._pairs:
                loss = self._task.loss_fn(self._model(sample), target)
                (loss / self._task.micro_batches).backward()


class Piped(OnDevices):
    """A plan's pipeline."""

    def __init__(self, name: str, task: Task, plan: Plan) -> None:
        devices = [torch.device(device.torch_device or "cpu") for device in plan.devices]
        super().__init__(name, task, devices)
        self.plan = plan
        self._pipe = Pipeline(self._model, plan, loss_fn=task.loss_fn)

    def peak_bytes(self) -> dict[str, int]:
        """What a step takes at most of each GPU, parameters and all; of the CPU nobody knows."""
        on_cuda = [device for device in self._devices if device.type == "cuda"]
        of_others = {device: torch.cuda.memory_allocated(device) - self._held(device) for device in on_cuda}
        for device in on_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        self.step()
        return {str(one): torch.cuda.max_memory_allocated(one) - of_others[one] for one in on_cuda}

    def planned_bytes(self) -> dict[str, int]:
        """The most that the plan says of each device, of stages that share one added up."""
        found: dict[str, int] = {}
        for device, held in zip(self.plan.cluster.devices, self.plan.predicted.memory_bytes, strict=True):
            name = device.torch_device or device.name
            found[name] = found.get(name, 0) + held
        return found

    def close(self) -> None:
        self._pipe.close()

    def _held(self, device: torch.device) -> int:
        here = [parameter for parameter in self._model.parameters() if parameter.device == device]
        return sum(tensor.nbytes for p in here for tensor in (p, p.grad) if tensor is not None)

    def step(self) -> None:
        with self._whole_step():
            self._pipe.step(self._task.sample, target=self._task.target)
