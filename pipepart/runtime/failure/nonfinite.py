"""Finds the first number of a run that is not finite, and the layer that made it.

Workers compute the largest magnitude in each tensor that their layers make, and leave it on the device: nobody waits,
and the step goes on to its end. Then all magnitudes are read, once per device. "First" refers to plain training on the
same micro-batches, one after the other, whichever worker was faster::

    micro-batch 0:  input ─▶ outputs of layers 0, 1, 2, ... ─▶ loss ─▶ gradients of ..., 2, 1, 0
    micro-batch 1:  ...

All numbers before the first one are finite, so the layer made it from finite input.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from schedules import Action, Kind, Schedule

from ...autograd.own_copy import tensors
from ..loss_sink import LossSink
from ..stage import Stage

_BEFORE = -1  # stands for a micro-batch before the step
_FORWARD, _LOSS, _BACKWARD = range(3)


class _Place(NamedTuple):
    """A number's place in the order of plain training, and the text that reports it."""

    micro_batch: int
    phase: int
    layer: int  # counted from the end in the backward
    rank: int  # among several of one layer
    text: str


class _Peak(NamedTuple):
    """The largest magnitude in a tensor.

    Attributes:
        place: of the tensor.
        value: a tensor of one number.
        sum_of: the parameter whose gradient it is, a sum over micro-batches; "" for others. Once such a sum is not
            finite it stays so, and only the first of its peaks counts.
    """

    place: _Place
    value: Tensor
    sum_of: str = ""


class StageGuard:
    """Notes what one stage's layers make in a step. Used by the stage's worker, and by the caller between steps.

    Args:
        layers: of the stage, by name.
        first: which layer of the model is the first of them.
        where: the stage and its device, in words.
        is_last: whether the loss takes its output.
    """

    def __init__(
        self, layers: Sequence[tuple[str, nn.Module]], first: int, where: str, is_last: bool
    ) -> None:
        self._layers = layers
        self._first = first
        self._where = where
        self._is_last = is_last
        self._micro_batch = _BEFORE
        self._gradients = True
        self.peaks: list[_Peak] = []

    def begin(self, scaled: bool, backwards: bool) -> None:
        """Before a step. ``scaled`` gradients are not checked; ``backwards`` says whether the step makes any."""
        self.peaks.clear()
        self._micro_batch = _BEFORE
        self._gradients = not scaled
        if backwards:
            self.went_back()

    def enter(self, action: Action) -> None:
        """Note the micro-batch of an action.

        Raises:
            FloatingPointError: an optimizer would apply gradients that are not finite.
        """
        if action.micro_batch is not None:
            self._micro_batch = action.micro_batch
        if action.kind is Kind.OPT_STEP and (first := _first_of(self.peaks)):
            raise FloatingPointError(first)

    def received(self, message: Any) -> None:
        """Note the input of a micro-batch, before the stage's forward."""
        if self._first == 0:
            self._note(message, _FORWARD, -1, 0, "the mini-batch has {value} in its input{place}")

    def made(self, index: int, value: Any) -> None:
        """Note the output of a layer."""
        text = f"{self._name(index)} made {{value}} in its output, from finite input{{place}}"
        self._note(value, _FORWARD, self._first + index, 0, text)
        if self._is_last or index + 1 < len(self._layers):
            self._await(value, index + 1)

    def went_back(self, gradients: Iterable[Tensor | None] = ()) -> None:
        """Note the gradients after a backward or a part of it; ``gradients`` are those of the stage's input."""
        if not self._gradients:
            return
        for gradient in gradients:
            if gradient is not None:
                self._arrived(self._micro_batch, 0, (gradient,))
        for index, (name, layer) in enumerate(self._layers):
            for key, parameter in layer.named_parameters(prefix=name):
                if parameter.grad is None:
                    continue
                text = f"{self._name(index)} made {{value}} in the gradient of its parameter {key!r}{{place}}"
                if self._micro_batch == _BEFORE:
                    text = (
                        f"the gradient of parameter {key!r} has {{value}} from before the step: clear the gradients "
                        "after a step that failed"
                    )
                self._note(parameter.grad, _BACKWARD, -self._first - index, 1, text, key)

    def _await(self, value: Any, maker: int) -> None:
        """Have the gradient of a layer's input noted as made by that layer, after all hooks."""
        if self._gradients and torch.is_grad_enabled():
            for node in {tensor.grad_fn for tensor in tensors(value)}:
                if node is not None:
                    node.register_prehook(partial(self._arrived, self._micro_batch, maker))

    def _arrived(self, micro_batch: int, maker: int, gradients: Sequence[Tensor | None]) -> None:
        if not self._gradients:
            return
        self._micro_batch = micro_batch
        name = self._name(maker) if maker < len(self._layers) else "the loss"
        text = f"{name} made {{value}} in the gradient of its input, from a finite one of its output{{place}}"
        found = [gradient for gradient in gradients if gradient is not None]
        self._note(found, _BACKWARD, -self._first - maker, 0, text)

    def _note(self, value: Any, phase: int, layer: int, rank: int, text: str, parameter: str = "") -> None:
        for tensor in tensors(value):
            peak = _peak(tensor, signed=phase == _FORWARD and not tensor.requires_grad)
            if peak is not None:
                place = f"; {self._where}, micro-batch {self._micro_batch}"
                found = _Place(self._micro_batch, phase, layer, rank, text.replace("{place}", place))
                self.peaks.append(_Peak(found, peak, f"{self._where} {parameter}" if parameter else ""))

    def _name(self, index: int) -> str:
        name, layer = self._layers[index]
        return f"layer {name!r} ({type(layer).__name__})"


def guard_stages(stages: Sequence[Stage]) -> NanGuard:
    """Guard the stages of all replicas from now on."""
    in_model = sum(stage.copied is None for stage in stages)
    guards = []
    for number, stage in enumerate(stages):
        place = number % in_model
        where = f"stage {place} of {in_model} on {stage.where}"
        stage.guard = guard = StageGuard(stage.layers, stage.first, where, place == in_model - 1)
        guards.append(guard)
    return NanGuard(guards)


class NanGuard:
    """The guards of all stages.

    Args:
        guards: of the stages, in their order.
    """

    def __init__(self, guards: Sequence[StageGuard]) -> None:
        self._guards = guards

    def begin(self, schedule: Schedule, scaled: bool) -> None:
        """Before a step, whose gradients are not checked if they are scaled."""
        backwards = any(action.kind in (Kind.B, Kind.I) for row in schedule.actions for action in row)
        for guard in self._guards:
            guard.begin(scaled, backwards)

    def verdict(self, sink: LossSink, failure: BaseException | None) -> BaseException | None:
        """After a step: the error for its first number that is not finite, otherwise the failure as it is.

        If the step ended with an exception, that is the cause of the returned error: layers may refuse such numbers.
        """
        peaks = [peak for guard in self._guards for peak in guard.peaks]
        for guard in self._guards:
            guard.peaks.clear()
        if failure is not None and not isinstance(failure, Exception):
            return failure
        peaks += _losses(sink)
        first = _first_of(peaks)
        if first is None:
            return failure
        found = FloatingPointError(first)
        found.__cause__ = None if isinstance(failure, FloatingPointError) else failure
        return found


def _losses(sink: LossSink) -> Iterable[_Peak]:
    for micro_batch, which, loss in sink.losses():
        text = f"{which} made {{value}}, from finite numbers; micro-batch {micro_batch}"
        peak = _peak(loss, signed=False)
        if peak is not None:
            yield _Peak(_Place(micro_batch, _LOSS, 0, 0, text), peak)


def _peak(tensor: Tensor, signed: bool) -> Tensor | None:
    """The largest magnitude, below infinity if all numbers are finite; ``signed`` accepts -inf, as in masks."""
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = values._values()
    if values.layout is not torch.strided or values.dtype.itemsize == 1 or values.numel() == 0:
        return None
    with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
        if signed and not values.is_complex():
            return values.amax()
        return torch.linalg.vector_norm(values, math.inf)


def _first_of(peaks: Iterable[_Peak]) -> str | None:
    """The report of the first peak that is not finite, None if all are; reads them once per device."""
    of_device: dict[torch.device, list[_Peak]] = {}
    for peak in peaks:
        of_device.setdefault(peak.value.device, []).append(peak)
    bad: list[tuple[_Place, float]] = []
    bad_sums: set[str] = set()
    for own in of_device.values():
        values = torch.stack([peak.value for peak in own]).tolist()
        for peak, value in zip(own, values, strict=True):
            if value < math.inf or peak.sum_of in bad_sums:
                continue
            bad.append((peak.place, value))
            bad_sums |= {peak.sum_of} - {""}
    if not bad:
        return None
    place, value = min(bad, key=lambda one: one[0])
    return place.text.replace("{value}", "nan" if math.isnan(value) else "an infinite number")
