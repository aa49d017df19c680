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

_PASSES = (3, 50)  # minimum and maximum number of passes of each kind
_WIDTHS = (16, 64, 256, 1024, 4096)  # features of the layers that roofline_of measures
_SECONDS_PER_WIDTH = 0.1
_LONG_STEP = 0.002  # if a pass over the layers of one width takes longer, wider layers are not measured
_ROUNDS = 30  # maximum number of iterations of the fit
_SMALL_ERROR = 0.05  # relative error; a sample with a smaller error gets no larger weight


class Sample(NamedTuple):
    """A measured part of a layer: its operations, and the seconds that they took together."""

    work: Sequence[Work]
    seconds: float


def calibrate(model: nn.Module, sample: Any, *, seconds: float = 1.0) -> Roofline:
    """Measure the layers of a model and fit a roofline to them, to estimate other models on this kind of device.

    The model should have the same kinds of layers, dtype and sizes as the models to estimate, but may have fewer
    layers. It is measured on its device with the caller's number of threads, and is not changed.

    Args:
        model: any module, on the device to measure.
        sample: a mini-batch, as for :func:`pipepart.profile`.
        seconds: time to spend.

    Raises:
        TypeError, CaptureError: ``model`` does not take ``sample``, or cannot be recorded.
        ValueError: ``model`` has no parameters or is on the meta device, or autocast is enabled.
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
    """Measure linear layers, norms and activations of several sizes on a device, and fit a roofline to them."""
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
    """Measure layers and return two samples for each: its forward and its backward.

    Args:
        model: the module on the device that holds the layers.
        layers: names and modules, in execution order.
        value: the input of the first layer.
        device: the device to measure on.
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
    """Fit a roofline to samples with a small sum of relative errors.

    If the limit of each operation (memory or arithmetic) is known, the time of a sample is linear in three unknowns:
    seconds per byte, seconds per floating point operation, and seconds to start an operation. So the fit alternates two
    steps: assign a limit to each operation, and solve for the unknowns by non-negative least squares. Samples with
    large errors get small weights (iteratively reweighted least squares), because some kernels are far off any
    roofline.

    Raises:
        ValueError: no sample has both an operation and a time above 0.
    """
    from scipy.optimize import nnls  # takes a while to import

    samples = [sample for sample in samples if sample.work and sample.seconds > 0]
    if not samples:
        raise InputError("there is nothing to fit a roofline to: no layer ran an operation that took time")
    seconds = np.array([sample.seconds for sample in samples])
    work = [np.array(sample.work) for sample in samples]  # each [operations, 2]: flops, bytes
    # Seconds of one flop and of one byte if they alone limited the fastest sample: used if they limit no operation.
    totals = np.array([operations.sum(axis=0) for operations in work])
    shortest = 1 / (totals / seconds[:, None]).max(axis=0).clip(min=1.0)
    units, start = shortest, 0.0  # seconds of one flop and of one byte [2]; seconds to start an operation
    weights = np.ones(len(work))
    for _ in range(_ROUNDS):
        rows = np.array([_row(operations, units) for operations in work]) / seconds[:, None]
        scale = np.maximum(rows.max(axis=0), 1e-30)
        solution = nnls(rows / scale * weights[:, None], weights)[0] / scale
        weights = np.maximum(abs(rows @ solution - 1), _SMALL_ERROR) ** -0.5
        previous, units, start = units, np.where(solution[:2] > 0, solution[:2], shortest), solution[2]
        if np.allclose(previous, units, rtol=1e-6):
            break
    return Roofline(
        device=device,
        flops_per_second=1 / units[0],
        bytes_per_second=1 / units[1],
        seconds_per_operation=float(start),
    )


def _row(work: Any, units: Any) -> Any:
    """Return the flops of compute-bound operations, the bytes of memory-bound ones, and the number of operations."""
    limit = (work * units).argmax(axis=1)  # [operations]: 0 for flops, 1 for bytes
    return [work[limit == 0, 0].sum(), work[limit == 1, 1].sum(), len(work)]
