"""Profiles a model: measures what each of its layers costs in time and memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from ..capture import capture, flatten
from ..data.arguments import Arguments, check_arguments
from ..data.split import MicroBatches, Splitter, micro_batches_of
from ..loss import scalar_of
from ..workers.modes import Modes
from ..workers.worker import start_workers
from .background_load import neighbours
from .costs import Costs, LayerCost
from .deferred import count_waiting
from .memory import Memory, count_memory
from .profile_document import Profile, check_optimizer
from .progress import watch
from .shadow_parameters import stand_ins
from .timing import ChainTimer, LayerTimes, Loss, fresh

LossFunction = Callable[..., Any]  # a scalar tensor, or (sum, count)


def profile(
    model: nn.Module,
    sample: Any,
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    micro_batches: int | Sequence[int] = 1,
    split: Splitter | None = None,
    optimizer: str = "adam",
    devices: int = 2,
    threads: int | None = None,
    seconds: float = 1.0,
    progress: bool | None = None,
) -> Profile:
    """Measures each layer of ``model`` on micro-batches of ``sample``.

    The model is measured in the mode it is in and comes back as it went in: parameters, gradients, buffers, random
    states, flags and hooks.

    Args:
        model: an ``nn.Sequential``; nested ones are opened.
        sample: a mini-batch, its tensors ``[samples, ...]``: the first argument of the model, a tuple of positional
            arguments, a dict of keyword arguments, or :class:`pipepart.Arguments`.
        loss_fn: called as ``loss_fn(output, target)``; without it the output's own gradient is taken as ones.
        target: what the loss compares with, its tensors ``[samples, ...]``; None to call ``loss_fn(output)``.
        micro_batches: how many parts the mini-batch will be split into; several numbers measure several sizes.
        split: how, where not along dimension 0 of all tensors; as for :class:`pipepart.Pipeline`.
        optimizer: whose state to count: ``"sgd"``, ``"momentum"``, ``"adam"`` or ``"adamw"``.
        devices: how many virtual devices will share the CPU: as many keep it busy while layers are timed. Without
            meaning on an accelerator.
        threads: intra-operation threads to measure with on CPU; by default torch's number shared out over ``devices``,
            as :meth:`Cluster.virtual` does.
        seconds: time to spend on each size once each layer has been timed five times.
        progress: show a progress bar on standard error; by default when a terminal watches.

    Raises:
        TypeError: ``model`` is no ``nn.Sequential``, or its first layer does not take ``sample``.
        ValueError: a number of micro-batches or devices below 1, batches that differ, or a loss that is no scalar.
        Exception: whatever a layer raises, with a note that names it.
    """
    counts = _counts(micro_batches)
    if devices < 1:
        raise ValueError(f"devices must be at least 1, got {devices}")
    state = check_optimizer(optimizer)
    layers = flatten(model)
    given = Arguments.of(sample)
    check_arguments(*layers[0], given, target)
    value = given.input
    batch = sum(micro_batches_of(value, target, 1, split).sizes)
    part = Arguments.of_input(micro_batches_of(value, target, min(counts), split).inputs[0])
    graph = capture(model, *part.args, **part.kwargs)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    on_cpu = device.type == "cpu"
    threads = (threads or max(1, torch.get_num_threads() // devices)) if on_cpu else None
    others = min(devices, os.cpu_count() or 1) - 1 if on_cpu else 0

    everything = nn.ModuleList([model, loss_fn]) if isinstance(loss_fn, nn.Module) else model
    stop = threading.Event()
    modes = Modes.current()

    def work() -> list[Costs]:
        with (
            stand_ins(everything),
            modes.autocasting(),
            watch(progress, f"profiling {len(layers)} layers") as tick,
        ):
            found = []
            for count in counts:
                part = _Largest(micro_batches_of(value, target, count, split), loss_fn)
                timer = ChainTimer(layers, part.loss, device, stop)
                memory = count_memory(model, layers, part.loss, part.sample)
                waiting = count_waiting(model, layers, part.loss, part.sample)
                with neighbours(model, part.sample, part.loss, others, threads):
                    timer.measure(part.sample, budget=seconds, passes=(5, 50))
                found.append(_costs(count, part.parts, part.samples, timer, memory, waiting))
                tick(len(found) / len(counts))
            return found

    costs = _on_own_thread(work, stop, device, threads)
    return Profile(
        model=type(model).__name__,
        batch=batch,
        inputs=graph.inputs,
        outputs=graph.layers[-1].outputs,
        layers=tuple(graph.layers),
        costs=tuple(costs),
        optimizer=state,
        device=str(device),
        threads=threads,
        torch_version=torch.__version__,
    )


class _Largest:
    """The micro-batch with the most samples, with the loss of its output."""

    def __init__(self, parts: MicroBatches, loss_fn: LossFunction | None) -> None:
        self.parts = len(parts.sizes)
        self.samples = max(parts.sizes)
        index = parts.sizes.index(self.samples)
        self.sample = parts.inputs[index]
        self.loss: Loss = None
        if loss_fn is not None:
            target = parts.targets[index]
            arguments = () if target is None else (fresh(target),)
            self.loss = lambda output: scalar_of(loss_fn(output, *arguments))


def _costs(
    count: int, parts: int, samples: int, timer: ChainTimer, memory: Memory, waiting: Sequence[int]
) -> Costs:
    timings = timer.timings(parts)
    layers = len(memory.saved_bytes)
    return Costs(
        micro_batches=count,
        samples=samples,
        layers=tuple(_cost(index, timings[index], memory, waiting[index]) for index in range(layers)),
        loss=LayerCost(**timings[-1]._asdict()) if len(timings) > layers else LayerCost(),
        saved=memory.saved,
        repeats=len(timer.times.forward),
    )


def _cost(index: int, times: LayerTimes, memory: Memory, waiting: int) -> LayerCost:
    return LayerCost(
        **times._asdict(),
        saved_bytes=memory.saved_bytes[index],
        input_bytes=memory.input_bytes[index],
        output_bytes=memory.output_bytes[index],
        workspace_bytes=memory.workspace_bytes[index],
        deferred_bytes=waiting,
    )


def _counts(micro_batches: int | Sequence[int]) -> list[int]:
    counts = list(micro_batches) if isinstance(micro_batches, list | tuple) else [micro_batches]
    if not counts or any(type(count) is not int or count < 1 for count in counts):
        raise ValueError(f"micro_batches must be at least 1, got {micro_batches!r}")
    return sorted({count for count in counts if isinstance(count, int)})


def _on_own_thread(
    work: Callable[[], list[Costs]], stop: threading.Event, device: torch.device, threads: int | None
) -> list[Costs]:
    """Runs ``work`` as a pipeline's worker would: on a thread of its own, with so many intra-operation threads.

    An interrupt has it stop, and arrives when it has.
    """
    outcome: SimpleQueue[list[Costs] | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put(work())
        except BaseException as error:
            outcome.put(error)

    (worker,) = start_workers([("profile", device, threads)])
    worker.submit(run)
    worker.stop()
    try:
        found = outcome.get()
    except BaseException:  # KeyboardInterrupt, in this thread
        stop.set()
        outcome.get()
        raise
    torch.set_num_threads(torch.get_num_threads())  # for threads to come, which the workers set to their own
    if isinstance(found, BaseException):
        raise found
    return found
