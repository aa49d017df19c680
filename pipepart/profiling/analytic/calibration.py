"""Fits a roofline to layers that were measured on a device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ...capture import chain_of, shadow_parameters
from ...capture.restore import draws_restored
from ...data.arguments import Arguments, check_arguments
from ...data.recorded import entered
from ...data.split import micro_batches_of
from ...input_error import InputError
from ..layer_pass import LayerPass, Layers, fresh
from ..timing import LayerTimer
from .meta_tensors import META, on_meta, refuse_autocast, to_meta
from .roofline import Roofline
from .times import work_of_step
from .work import Work

_PASSES = (3, 50)  # of each kind, least and most
_SECONDS_A_SIZE = 0.1
_LONG_PASS = 0.002  # seconds of typical layers that are large enough
_ROUNDS = 30
_SMALL_ERROR = 0.05  # relative; smaller ones do not count more


class Sample(NamedTuple):
    """One part of a layer that was measured: its operations, and the seconds that they took together."""

    work: Sequence[Work]
    seconds: float


def calibrate(model: nn.Module, sample: Any, *, seconds: float = 1.0) -> Roofline:
    """Measure the layers of a model and fit a roofline to them, to estimate other models on this kind of device.

    The model should be like those that will be estimated: same kinds of layers, dtype and sizes, with fewer layers. It
    is measured where it is, with the number of threads of the caller, and left as it was.

    Args:
        model: any module, on the device.
        sample: a mini-batch, as for :func:`pipepart.profile`.
        seconds: time to spend.

    Raises:
        TypeError, CaptureError: ``model`` does not take ``sample``, or cannot be recorded.
        ValueError: ``model`` has no parameters, or is on the meta device; or under autocast.
        Exception: whatever a layer raises, with a note that names the layer.
    """
    refuse_autocast()
    device = next((parameter.device for parameter in model.parameters()), META)
    if device == META:
        raise InputError(
            "a roofline is fitted to layers that run: pass a model with parameters on a real device"
        )
    chain = chain_of(model)
    arguments = Arguments.of(sample)
    check_arguments(*chain.entrance, arguments)
    batch = micro_batches_of(arguments.input, None, 1, None)

    def value() -> Any:
        return entered(chain, batch).inputs[0]

    with shadow_parameters(model):
        given = fresh(value())
        measured = _timed(chain.layers, given, device, seconds)
    with on_meta(model, device.type):
        given = fresh(to_meta(value()))
        return fitted(device.type, _samples(chain.layers, given, measured))


def roofline_of(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Fit a roofline to linear layers, norms and activations of several sizes, measured on a device in a dtype."""
    found: list[Sample] = []
    for width in (16, 64, 256, 1024, 4096):
        with draws_restored(nn.Module(), device):
            layers = _typical_layers(width).to(device, dtype)
        named = list(layers.named_children())
        value = torch.zeros(width, width, device=device, dtype=dtype, requires_grad=True)
        measured = _timed(named, value, device, _SECONDS_A_SIZE)
        with on_meta(layers, device.type):
            found += _samples(named, to_meta(value), measured)
        if sum(map(sum, measured)) > _LONG_PASS:
            break
    return fitted(device.type, found)


def _typical_layers(width: int) -> nn.Sequential:
    wide, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    return nn.Sequential(wide, nn.GELU(), narrow, nn.LayerNorm(width), nn.Softmax(dim=-1))


def fitted(device: str, samples: Sequence[Sample]) -> Roofline:
    """Return the roofline whose relative errors on the samples have the least sum.

    Given which operations wait for memory and which for arithmetic, the time of a sample is linear in the times of one
    byte, of one floating point operation and of the start of an operation. Both are found in turns, by least squares
    with weights that make large errors, of kernels or times that are unlike the others, count less.

    Raises:
        ValueError: no sample has an operation and took time.
    """
    from scipy.optimize import nnls  # takes a while to import

    samples = [sample for sample in samples if sample.work and sample.seconds > 0]
    if not samples:
        raise InputError("there is nothing to fit a roofline to: no layer ran an operation that took time")
    seconds = np.array([sample.seconds for sample in samples])
    work = [np.array(sample.work) for sample in samples]  # [operations, 2]
    # The least that one unit can take, from the fastest sample: for what no operation waits for.
    totals = np.array([own.sum(axis=0) for own in work])
    least = 1 / (totals / seconds[:, None]).max(axis=0).clip(min=1.0)
    units, start = least, 0.0
    weights = np.ones(len(work))
    for _ in range(_ROUNDS):
        rows = np.array([_row(own, units) for own in work]) / seconds[:, None]
        scale = np.maximum(rows.max(axis=0), 1e-30)
        solution = nnls(rows / scale * weights[:, None], weights)[0] / scale
        weights = np.maximum(abs(rows @ solution - 1), _SMALL_ERROR) ** -0.5
        before, units, start = units, np.where(solution[:2] > 0, solution[:2], least), solution[2]
        if np.allclose(before, units, rtol=1e-6):
            break
    return Roofline(
        device=device,
        flops_per_second=1 / units[0],
        bytes_per_second=1 / units[1],
        seconds_per_operation=float(start),
    )


def _row(work: Any, units: Any) -> Any:
    """Return the flops that operations wait for, the bytes that they wait for, and the number of operations."""
    bound = (work * units).argmax(axis=1)
    return [work[bound == 0, 0].sum(), work[bound == 1, 1].sum(), len(work)]


def _timed(layers: Layers, value: Any, device: torch.device, budget: float) -> list[tuple[float, float]]:
    """Return the seconds of the forward and the backward of each layer."""
    timer = LayerTimer(LayerPass(layers, None), device)
    timer.measure(value, budget=budget, passes=_PASSES)
    return [
        (times.forward.seconds, times.backward_input.seconds + times.backward_weight.seconds)
        for times in timer.timings(1)
    ]


def _samples(layers: Layers, value: Any, measured: Sequence[tuple[float, float]]) -> list[Sample]:
    """Return work and seconds of the forward and of the backward of each layer. The layers are on the meta device."""
    work, _ = work_of_step(LayerPass(layers, None), value)
    return list(
        itertools.chain.from_iterable(
            (
                Sample(work["forward", index], forward),
                Sample([*work["backward_input", index], *work["backward_weight", index]], backward),
            )
            for index, (forward, backward) in enumerate(measured)
        )
    )
