"""Fits a roofline to the measured times of layers."""

from __future__ import annotations

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
_WIDTHS = (16, 64, 256, 1024, 4096)  # of typical layers
_SECONDS_PER_WIDTH = 0.1
_LONG_STEP = 0.002  # seconds of typical layers after which no wider ones are measured
_ROUNDS = 30
_SMALL_ERROR = 0.05  # relative; smaller errors have the weight of this one


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

    with shadow_parameters(model):
        value = fresh(entered(chain, batch).inputs[0])
    return fitted(device.type, _measured(model, chain.layers, value, device, seconds))


def roofline_of(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Fit a roofline to linear layers, norms and activations of several sizes, measured on a device in a dtype."""
    samples: list[Sample] = []
    for width in _WIDTHS:
        with draws_restored(nn.Module(), device):
            layers = _typical_layers(width).to(device, dtype)
        value = torch.zeros(width, width, device=device, dtype=dtype, requires_grad=True)
        measured = _measured(layers, list(layers.named_children()), value, device, _SECONDS_PER_WIDTH)
        samples += measured
        if sum(sample.seconds for sample in measured) > _LONG_STEP:
            break
    return fitted(device.type, samples)


def _typical_layers(width: int) -> nn.Sequential:
    wide, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    return nn.Sequential(wide, nn.GELU(), narrow, nn.LayerNorm(width), nn.Softmax(dim=-1))


def _measured(
    model: nn.Module, layers: Layers, value: Any, device: torch.device, seconds: float
) -> list[Sample]:
    """Return work and seconds of the forward and of the backward of each layer.

    Args:
        model: holds the layers, on the device.
        layers: names and modules, in execution order.
        value: the input of the first layer.
        device: where to measure.
        seconds: time to spend.
    """
    chain = LayerPass(layers, None)
    with shadow_parameters(model):
        timer = LayerTimer(chain, device)
        timer.measure(value, budget=seconds, passes=_PASSES)
        measured = timer.timings(1)
    with on_meta(model, device.type):
        work, _ = work_of_step(chain, to_meta(value))
    samples: list[Sample] = []
    for index, times in enumerate(measured):
        backward = [*work["backward_input", index], *work["backward_weight", index]]
        samples.append(Sample(work["forward", index], times.forward.seconds))
        samples.append(Sample(backward, times.backward_input.seconds + times.backward_weight.seconds))
    return samples


def fitted(device: str, samples: Sequence[Sample]) -> Roofline:
    """Fit a roofline to samples so that the sum of the relative errors is small.

    If it is known which operations wait for memory and which for arithmetic, the time of a sample is linear in the
    seconds of one byte, of one floating point operation and of the start of an operation. So two steps alternate:
    assign the operations, and solve for the three numbers by non-negative least squares. Samples with large errors get
    small weights (iteratively reweighted least squares), because some kernels are unlike all others.

    Raises:
        ValueError: no sample has an operation and took time.
    """
    from scipy.optimize import nnls  # takes a while to import

    samples = [sample for sample in samples if sample.work and sample.seconds > 0]
    if not samples:
        raise InputError("there is nothing to fit a roofline to: no layer ran an operation that took time")
    seconds = np.array([sample.seconds for sample in samples])
    work = [np.array(sample.work) for sample in samples]  # [operations, 2]
    # If no operation waits for a unit, it takes as long as if the fastest sample did nothing else.
    totals = np.array([operations.sum(axis=0) for operations in work])
    shortest = 1 / (totals / seconds[:, None]).max(axis=0).clip(min=1.0)
    units, start = shortest, 0.0  # seconds of one flop and of one byte, and to start an operation
    weights = np.ones(len(work))
    for _ in range(_ROUNDS):
        rows = np.array([_row(operations, units) for operations in work]) / seconds[:, None]
        scale = np.maximum(rows.max(axis=0), 1e-30)
        solution = nnls(rows / scale * weights[:, None], weights)[0] / scale
        weights = np.maximum(abs(rows @ solution - 1), _SMALL_ERROR) ** -0.5
        before, units, start = units, np.where(solution[:2] > 0, solution[:2], shortest), solution[2]
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
