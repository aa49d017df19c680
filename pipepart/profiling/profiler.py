"""Profiles a model: measures what each of its layers costs in time and memory."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from ..capture import (
    Chain,
    LayerInfo,
    Live,
    RecordedChain,
    TensorSpec,
    chain_of,
    describe,
    holds_meta,
    state_of,
    tensor_specs,
)
from ..cluster import Cluster
from ..data.arguments import Arguments, check_arguments
from ..data.recorded import entered
from ..data.split import MicroBatches, Splitter, least_samples, micro_batches_of
from ..input_error import InputError, InputTypeError
from ..workers.modes import Modes
from ..workers.worker import start_workers
from .costs import Costs, LayerCost, LiveValue, Overhead
from .inside_stage import Parallelize, copied_for, parallelize_layers
from .measuring import Measured, Task, measure_sizes
from .meta_tensors import META, refuse_autocast
from .profile_document import Profile, check_optimizer
from .progress import progress_bar
from .roofline import Roofline
from .timing import LayerTimes

_Result = TypeVar("_Result")
LossFunction = Callable[..., Any]  # returns a scalar tensor, or (sum, count)

_THREADS_A_CORE = 16  # with some thousands of threads, OpenMP crashes with a segmentation fault


def profile(
    model: nn.Module,
    sample: Any,
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    layers: Sequence[str] | None = None,
    micro_batches: int | Sequence[int] = 1,
    split: Splitter | None = None,
    optimizer: str = "adam",
    device: torch.device | str | None = None,
    devices: int = 2,
    threads: int | None = None,
    seconds: float = 1.0,
    progress: bool | None = None,
    measure: bool = True,
    roofline: Roofline | None = None,
    parallelize: Parallelize | None = None,
    tensor: int = 1,
) -> Profile:
    """Measure the time and memory of each layer of ``model`` on micro-batches of ``sample``.

    The layers run for real, on copies of their parameters and buffers. Afterwards the model is as it was: parameters,
    gradients, buffers, random states, modes and hooks. A model in evaluation mode is measured in training mode, with a
    warning; layers in evaluation mode within a model in training mode stay so. ``loss_fn`` is called on the output and
    the target of one micro-batch, once in each pass, and on no other values.

    Args:
        model: an ``nn.Sequential``, whose nested ``nn.Sequential`` modules are opened; or any other module, which is
            recorded.
        sample: a mini-batch, its tensors ``[samples, ...]``: the first argument of the model, a tuple of positional
            arguments, a dict of keyword arguments, or :class:`pipepart.Arguments`.
        loss_fn: called as ``loss_fn(output, target)``; if None, the backward starts with ones at the output.
        target: the target of the loss, its tensors ``[samples, ...]``; None to call ``loss_fn(output)``.
        layers: paths of the modules that become layers, with the modules beside them; None for the blocks of the model.
            An ``nn.Sequential`` with this argument is recorded.
        micro_batches: number of micro-batches in the mini-batch; several numbers measure several sizes. A micro-batch
            has at least one sample, or two if the model has a BatchNorm that needs two; larger numbers are reduced.
        split: a function that splits the mini-batch, if not along dimension 0; as for :class:`pipepart.Pipeline`.
        optimizer: the optimizer whose state counts: ``"sgd"``, ``"momentum"``, ``"adam"`` or ``"adamw"``.
        device: the device to measure on; by default that of the model, or the CPU for a model on the meta device. If
            the model is on another device, layers are measured one at a time on copies of their tensors, and the model
            is not moved. Tensors on the meta device become small random numbers or zeros.
        devices: number of virtual devices that will share the CPU. Layers are timed in turns, alone and while copies
            of the model keep the cores of the other devices busy: at most ``cores // threads - 1`` copies. Not used
            on an accelerator, or if layers are measured one at a time.
        threads: intra-operation threads of each device on the CPU; by default torch's number divided by ``devices``,
            as :meth:`Cluster.virtual` does.
        seconds: time to spend on each size; each layer is timed at least 12 times, even if this takes longer.
        progress: show a progress bar on standard error; by default if that is a terminal.
        measure: if False, no layer runs: bytes are counted on the meta device, seconds are estimated. The model may be
            on the meta device, and so may the sample if the model does not read its values.
        roofline: with ``measure=False``, the speed of the device to estimate for.
        parallelize: the function of ``Pipeline(..., parallelize=f)``, to profile what one process has of each layer. It
            is called on a copy of the model, with all layers and a mesh whose dimension "dp" has size 1, under torch's
            fake process group: collectives take no time, and :func:`pipepart.plan` prices their bytes on the links.
        tensor: size of the mesh's dimension "tp": the number of processes that share each layer.

    Raises:
        TypeError, CaptureError: ``model`` does not take ``sample``, or cannot be recorded.
        ValueError: a number is out of range, more micro-batches than samples, sizes of batches differ, or the loss is
            not a scalar.
        Exception: whatever a layer raises, with a note that names the layer.
    """
    counts = _counts(micro_batches)
    if devices < 1 or seconds < 0:
        raise InputError(f"devices must be at least 1 and seconds at least 0, got {devices} and {seconds}")
    optimizer = check_optimizer(optimizer)
    alone = parallelize is None and tensor == 1
    with nullcontext(model) if alone else copied_for(model, tensor) as profiled:
        chain = chain_of(
            profiled, layers=layers, verify="first" if alone else "never", split_loss=loss_fn is None
        )
        place = _place(profiled, device, measure, roofline)
        task = Task(
            chain=chain,
            loss_fn=loss_fn,
            device=place,
            one_at_a_time=measure
            and any(tensor.device != place for tensor in state_of(profiled))
            and (device is not None or holds_meta(profiled)),
            roofline=roofline,
            threads=_checked_threads(threads, devices) if place.type == "cpu" and measure else None,
            devices=devices,
            seconds=seconds,
            stop=threading.Event(),
        )
        arguments = Arguments.of(sample)
        check_arguments(*chain.entrance, arguments, target)
        batch = sum(micro_batches_of(arguments.input, target, 1, split).sizes)
        if split is None and counts[-1] > max(batch, 1):
            raise InputError(f"micro_batches={counts[-1]} is more than the mini-batch has samples, {batch}")
        if split is None:
            most = max(1, batch // least_samples(profiled.modules(), training=True))
            counts = sorted({min(count, most) for count in counts})
        if not profiled.training:
            warnings.warn(
                "the model is in evaluation mode and was profiled in training mode: its costs are those of training. "
                "Call model.train() before to say so yourself",
                stacklevel=3,  # pipepart.profile calls this function
            )
        modes = Modes.current()

        def work() -> tuple[list[Measured], list[LayerInfo]]:
            with (
                task.running(),
                modes.autocasting(),
                progress_bar(progress, f"profiling {type(profiled).__name__}") as tick,
            ):
                if not profiled.training:
                    profiled.train()
                batches = [micro_batches_of(arguments.input, target, count, split) for count in counts]
                if not alone:
                    for parts in batches:
                        entered(chain, parts)  # records the model as it is without other processes
                    parallelize_layers(chain, parallelize, tensor)
                return _measured(task, batches, tick)

        measured, infos = _on_own_thread(work, task)
    on_cpu = roofline is None and place.type == "cpu"
    return Profile(
        model=type(profiled).__name__,
        batch=batch,
        inputs=tensor_specs(measured[0].part.value),
        outputs=measured[0].memory.outputs[-1],
        layers=tuple(infos),
        costs=tuple(_costs(*pair) for pair in zip(counts, measured, strict=True)),
        writes_statistics=tuple(name for name, layer in chain.layers if _writes_statistics(layer)),
        optimizer=optimizer,
        device=str(place) if roofline is None else roofline.device,
        threads=task.threads,
        torch_version=torch.__version__,
        notes=tuple(_notes(chain, roofline)),
        roofline=roofline,
        tensor=tensor,
        overhead=_load_conditions(task, measured) if on_cpu else Overhead(),
    )


def _measured(
    task: Task, batches: Sequence[MicroBatches], tick: Callable[[float], None]
) -> tuple[list[Measured], list[LayerInfo]]:
    """Measure each size of micro-batches; return the results, and the layers."""
    results: list[Measured] = []
    for parts in batches:
        results.append(measure_sizes(task, parts, lambda done: tick((len(results) + done) / len(batches))))
    return results, describe(task.chain, results[0].memory.outputs)


def _load_conditions(task: Task, measured: Sequence[Measured]) -> Overhead:
    """Return the number of devices that computed while layers were timed, and the number of cores."""
    loaded = any(times.slowdown != 1.0 for result in measured for times in result.times)
    return Overhead(devices=task.devices_at_once if loaded else 1, cores=os.cpu_count())


def _writes_statistics(layer: nn.Module) -> bool:
    """Return True if the layer has a BatchNorm that updates its running statistics in its present mode."""
    norms = (part for part in layer.modules() if isinstance(part, nn.modules.batchnorm._NormBase))
    return any(norm.training and norm.track_running_stats for norm in norms)


def _notes(layered: Chain, roofline: Roofline | None) -> list[str]:
    """Return notes on opened modules, and a note if times are estimates."""
    notes = list(layered.opening.notes) if isinstance(layered, RecordedChain) else []
    return notes if roofline is None else [*notes, roofline.note]


def _place(
    model: nn.Module, device: torch.device | str | None, measure: bool, roofline: Roofline | None
) -> torch.device:
    """Return the device to measure on, with its index; with ``measure=False``, the device to estimate for."""
    if roofline is not None and not isinstance(roofline, Roofline):
        raise InputTypeError(
            f"roofline must be a Roofline, got {roofline!r}: write Roofline.parse(...) or Roofline.load(...)"
        )
    if measure != (roofline is None):
        raise InputError(
            "measure=False estimates times for a speed that it has to know, and roofline=... states it: write both, as "
            "in measure=False, roofline=pipepart.Roofline.parse('cuda: 156 TFLOP/s, 1.5 TB/s, 5 us')"
        )
    if not measure:
        if device is not None:
            raise InputError(
                f"roofline=... states the speed, so nothing is measured on device={str(device)!r}: leave one out"
            )
        refuse_autocast()
    if device is None:
        home = next((p.device for p in model.parameters()), torch.device("cpu"))
        if home != META:
            return home
        return torch.device("cpu")
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device={device!r} is no torch device: {str(error).splitlines()[0]}") from None
    if device.type == "meta":
        raise InputError('device="meta" has nothing to measure: name the device whose times are wanted')
    Cluster.of([device])  # raises if this machine does not have the device
    if device.type == "cpu" or device.index is not None:
        return torch.device("cpu") if device.type == "cpu" else device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _costs(count: int, measured: Measured) -> Costs:
    memory = measured.memory
    *times, last = measured.times
    if len(times) < len(memory.layers):  # there is no loss
        times, last = [*times, last], LayerTimes()
    memory.loss.input_bytes = measured.part.target_bytes
    pairs = zip(times, memory.layers, strict=True)
    return Costs(
        micro_batches=count,
        samples=measured.part.samples,
        layers=tuple(LayerCost(**time._asdict(), **vars(size)) for time, size in pairs),
        loss=LayerCost(**last._asdict(), **vars(memory.loss)),
        saved=memory.saved,
        values=_live_values(measured.part.value, memory.outputs),
        repeats=measured.repeats,
        scale=measured.scale,
    )


def _live_values(value: Any, outputs: Sequence[tuple[TensorSpec, ...]]) -> tuple[LiveValue, ...]:
    """Return the values that one layer of a recorded model produces and later layers use; none for other models.

    Args:
        value: the input of the first layer.
        outputs: specs of the tensors that each layer returns.
    """
    if not isinstance(value, Live):
        return ()
    recording = value.recording
    specs = dict(zip(recording.parts[0].takes, tensor_specs(value), strict=True))
    for part, output in zip(recording.parts[:-1], outputs, strict=False):
        specs |= zip(part.gives, output, strict=True)
    return tuple(
        LiveValue(bytes=specs[number].bytes, is_argument=number in recording.inputs, layers=tuple(layers))
        for number, layers in recording.touched.items()
        if len(layers) > 1
    )


def _counts(micro_batches: int | Sequence[int]) -> list[int]:
    counts = [micro_batches] if isinstance(micro_batches, int | float | str) else list(micro_batches)
    if not counts or any(type(count) is not int or count < 1 for count in counts):
        raise InputError(f"micro_batches must be whole numbers of at least 1, got {micro_batches!r}")
    return sorted(set(counts))


def _checked_threads(threads: int | None, devices: int) -> int:
    if threads is None:
        return max(1, torch.get_num_threads() // devices)
    cores = os.cpu_count() or 1
    most = _THREADS_A_CORE * cores
    if not 1 <= threads <= most:
        raise InputError(
            f"threads must be between 1 and {most} ({_THREADS_A_CORE} a core, {cores} cores), got {threads}"
        )
    return threads


def _on_own_thread(work: Callable[[], _Result], task: Task) -> _Result:
    """Run ``work`` as a pipeline worker would: on a new thread with the intra-operation threads of the task."""
    outcome: Future[_Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    (worker,) = start_workers([("profile", task.device, task.threads)])
    worker.submit(run)
    worker.stop()
    try:
        return outcome.result()
    finally:
        task.stop.set()  # if a KeyboardInterrupt came first
        worker.join()
        # Otherwise threads started later would use the worker's number of intra-operation threads.
        torch.set_num_threads(torch.get_num_threads())
