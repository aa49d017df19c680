"""Finds the first number of a run that is not finite, and the layer that made it.

Workers note the largest magnitude in whatever their layers make, each a tensor of one number that stays where it is,
and do not look: a step goes on to its end. Then all are read, once a device, and the first is the one that plain
training on the same micro-batches, one after the other, would have come to first. No worker's pace decides::

    micro-batch 0:  input ─▶ outputs of layers 0, 1, 2, ... ─▶ loss ─▶ gradients of ..., 2, 1, 0
    micro-batch 1:  ...

What comes before it in this order is finite, and that is all the layer had.
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
from ..loss_sink import End
from ..stage import Stage

_BEFORE = -1  # in the place of a micro-batch
_FORWARD, _LOSS, _BACKWARD = range(3)


class _Place(NamedTuple):
    """Where a number is in the order of plain training, and in which words to tell of it."""

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
        sum_of: says which sum of all micro-batches it is, as a parameter's gradient. Once bad it stays so, and
            only the first in the worker's order tells anything.
    """

    place: _Place
    value: Tensor
    sum_of: str = ""


class StageGuard:
    """What one stage's layers make in a run. Used by the stage's worker, and by the caller between runs.

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
        """Before a run; ``scaled`` where its gradients are not looked at, ``backwards`` whether it makes any."""
        self.peaks.clear()
        self._micro_batch = _BEFORE
        self._gradients = not scaled
        if backwards:
            self.went_back()

    def enter(self, action: Action) -> None:
        """Before an action.

        Raises:
            FloatingPointError: it would have an optimizer apply gradients that are not finite.
        """
        if action.micro_batch is not None:
            self._micro_batch = action.micro_batch
        if action.kind is Kind.OPT_STEP and (first := _first_of(self.peaks)):
            raise FloatingPointError(first)

    def received(self, message: Any) -> None:
        """The input of a micro-batch, before the stage's forward."""
        if self._first == 0:
            self._note(message, _FORWARD, -1, 0, "the mini-batch has {value} in its input{place}")

    def made(self, index: int, value: Any) -> None:
        """The output of a layer."""
        text = f"{self._name(index)} made {{value}} in its output, from finite input{{place}}"
        self._note(value, _FORWARD, self._first + index, 0, text)
        if self._is_last or index + 1 < len(self._layers):
            self._await(value, index + 1)

    def went_back(self, gradients: Iterable[Tensor | None] = ()) -> None:
        """After a backward or a part of it, with the gradients of the stage's input."""
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
        """Has the gradient of what a layer takes noted as one that this layer makes, when all hooks have seen it."""
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
    """Has the stages of all copies of a model guarded from now on."""
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
        """Before a run, whose gradients are not looked at where they are scaled."""
        backwards = any(action.kind in (Kind.B, Kind.I) for row in schedule.actions for action in row)
        for guard in self._guards:
            guard.begin(scaled, backwards)

    def verdict(self, end: End, failure: BaseException | None) -> BaseException | None:
        """After a run: an error that tells of its first number that is not finite, else the failure that there is.

        An error that the run ended with is the cause of the one that is returned: layers may well refuse such numbers.
        """
        peaks = [peak for guard in self._guards for peak in guard.peaks]
        for guard in self._guards:
            guard.peaks.clear()
        if failure is not None and not isinstance(failure, Exception):
            return failure
        peaks += _losses(end)
        first = _first_of(peaks)
        if first is None:
            return failure
        found = FloatingPointError(first)
        found.__cause__ = None if isinstance(failure, FloatingPointError) else failure
        return found


def _losses(end: End) -> Iterable[_Peak]:
    for micro_batch, which, loss in end.losses():
        text = f"{which} made {{value}}, from finite numbers; micro-batch {micro_batch}"
        peak = _peak(loss, signed=False)
        if peak is not None:
            yield _Peak(_Place(micro_batch, _LOSS, 0, 0, text), peak)


def _peak(tensor: Tensor, signed: bool) -> Tensor | None:
    """A number below infinity if all in the tensor are finite; one that is signed may have -inf, as masks do."""
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
    """What is to be said of the first that is not finite; reads them, once a device."""
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
