"""Finds the first infinity or NaN of a step, and the layer that computed it.

Workers compute the largest magnitude in each tensor that their layers make, and leave it on the device: nobody waits,
and the step goes on to its end. Then all magnitudes are read, once per device. "First" refers to plain training on the
same micro-batches, one after the other, whichever worker was faster::

    micro-batch 0:  input ─▶ outputs of layers 0, 1, 2, ... ─▶ loss ─▶ gradients of the inputs of ..., 2, 1, 0
    micro-batch 1:  ...
    the step:       gradients of the parameters of ..., 2, 1, 0, which are sums over the micro-batches

All numbers before the first one are finite, so the layer made it from finite input.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...autograd.own_copy import tensors
from ..sinks import LossSink

_BEFORE_STEP, _AFTER_STEP = -1, sys.maxsize  # stand for a micro-batch
_FORWARD, _LOSS, _BACKWARD = range(3)
_Order = tuple[int, int, int, int]  # micro-batch, phase, layer (counted from the end in the backward), rank


class _Peak(NamedTuple):
    """The largest magnitude in a tensor, a tensor of one number, and how to report it."""

    order: _Order
    text: str
    value: Tensor


class StageGuard:
    """Notes what one stage's layers make in a step. Used by the stage's worker, and by the caller between steps.

    Args:
        layers: of the stage, by name.
        first: the position of the first of them in the model.
        where: the stage and its device, in words.
        is_last: whether the loss takes its output.
    """

    def __init__(
        self, layers: Sequence[tuple[str, nn.Module]], first: int, where: str, is_last: bool
    ) -> None:
        self._layers = layers
        self._makers = [f"layer {name!r} ({type(layer).__name__})" for name, layer in layers]
        self._makers += ["the loss"] if is_last else []
        self._first = first
        self._where = where
        self._gradients = True
        self._micro_batch = 0  # whose forward runs
        self.peaks: list[_Peak] = []

    def begin(self, scaled: bool, backwards: bool) -> None:
        """Before a step. ``scaled`` gradients are not checked; ``backwards`` says whether the step makes any."""
        self.peaks.clear()
        self._gradients = backwards and not scaled
        self._note_parameters(
            _BEFORE_STEP,
            "the gradient of parameter {key!r} has {{}} from before the step: clear the gradients after a step that "
            "failed",
        )

    def received(self, micro_batch: int, message: Any) -> None:
        """Begin the forward of a micro-batch, and note the input of the model."""
        self._micro_batch = micro_batch
        if self._first == 0:
            self._note((micro_batch, _FORWARD, -1, 0), "the mini-batch has {} in its input", message)

    def watching(self, index: int, run_layer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the call of a layer that notes what the layer makes."""

        def run(value: Any) -> Any:
            output = run_layer(value)
            self._made(self._micro_batch, index, output)
            return output

        return run

    def _made(self, micro_batch: int, index: int, value: Any) -> None:
        """Note a layer's output, and in the backward the gradient that the next layer or the loss makes for it."""
        text = f"{self._makers[index]} made {{}} in its output, from finite input"
        self._note((micro_batch, _FORWARD, self._first + index, 0), text, value)
        if self._gradients and torch.is_grad_enabled() and index + 1 < len(self._makers):
            nodes = {tensor.grad_fn for tensor in tensors(value)}
            for node in filter(None, nodes):
                node.register_prehook(partial(self._arrived, micro_batch, index + 1))  # after all hooks

    def went_back(self, micro_batch: int, gradients: Iterable[Tensor | None]) -> None:
        """Note the gradients of the stage's input after a backward."""
        if self._gradients:
            self._arrived(micro_batch, 0, gradients)

    def finish(self) -> None:
        """Note the gradients of the parameters after the last backward."""
        self._note_parameters(_AFTER_STEP, "{maker} made {{}} in the gradient of its parameter {key!r}")

    def check(self) -> None:
        """Check what was noted so far, before an optimizer steps.

        Raises:
            FloatingPointError: a number is not finite.
        """
        self.finish()
        if first := _first_of(self.peaks):
            raise FloatingPointError(first)

    def _arrived(self, micro_batch: int, maker: int, gradients: Iterable[Tensor | None]) -> None:
        text = (
            f"{self._makers[maker]} made {{}} in the gradient of its input, from a finite one of its output"
        )
        self._note((micro_batch, _BACKWARD, -self._first - maker, 0), text, list(gradients))

    def _note_parameters(self, when: int, text: str) -> None:
        for index, (name, layer) in enumerate(self._layers if self._gradients else ()):
            order = when, _BACKWARD, -self._first - index, 1
            for key, parameter in layer.named_parameters(prefix=name):
                self._note(order, text.format(maker=self._makers[index], key=key), parameter.grad)

    def _note(self, order: _Order, text: str, value: Any) -> None:
        place = {_BEFORE_STEP: "", _AFTER_STEP: f"; {self._where}"}
        text += place.get(order[0], f"; {self._where}, micro-batch {order[0]}")
        for tensor in tensors(value):
            is_mask = order[1] == _FORWARD and not tensor.requires_grad
            if (peak := _peak(tensor, is_mask)) is not None:
                self.peaks.append(_Peak(order, text, peak))


def first_not_finite(
    guards: Sequence[StageGuard], sink: LossSink, failure: BaseException | None
) -> BaseException | None:
    """After a step: return the error for its first number that is not finite; if all are, the failure as it is.

    If the step ended with an exception, that is the cause of the returned error: layers may refuse such numbers.
    """
    for guard in guards:
        guard.finish()
    peaks = [peak for guard in guards for peak in guard.peaks]
    for guard in guards:
        guard.peaks.clear()
    if failure is not None and not isinstance(failure, Exception):
        return failure
    for micro_batch, which, loss in sink.losses():
        if (peak := _peak(loss)) is not None:
            text = f"{which} made {{}}, from finite numbers; micro-batch {micro_batch}"
            peaks.append(_Peak((micro_batch, _LOSS, 0, 0), text, peak))
    if (first := _first_of(peaks)) is None:
        return failure
    found = FloatingPointError(first)
    found.__cause__ = None if isinstance(failure, FloatingPointError) else failure
    return found


def _peak(tensor: Tensor, is_mask: bool = False) -> Tensor | None:
    """Return a number that is below infinity if all of a tensor are finite, or minus infinity in a mask."""
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = values._values()
    if values.layout is not torch.strided or values.dtype.itemsize == 1 or values.numel() == 0:
        return None
    if not (values.is_floating_point() or values.is_complex()):
        return None
    with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
        if is_mask and not values.is_complex():
            return values.amax()
        return torch.linalg.vector_norm(values, math.inf)


def _first_of(peaks: Iterable[_Peak]) -> str | None:
    """Return the report of the first peak that is not finite, None if all are; reads them once per device."""
    of_device: dict[torch.device, list[_Peak]] = {}
    for peak in peaks:
        of_device.setdefault(peak.value.device, []).append(peak)
    bad: list[tuple[_Order, str]] = []
    for own in of_device.values():
        values = torch.stack([peak.value for peak in own]).tolist()
        bad += [
            (peak.order, peak.text.replace("{}", "nan" if math.isnan(value) else "an infinite number", 1))
            for peak, value in zip(own, values, strict=True)
            if not value < math.inf
        ]
    return min(bad)[1] if bad else None
