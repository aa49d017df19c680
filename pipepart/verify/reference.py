"""Trains the plain model in each way that pipelines are compared with, and collects facts about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import plain
from .first_difference import LayerRecorder, find_first_difference
from .numbers import Numbers, Tensors, error_of_steps, first_different_step, largest_error
from .report import PlainFacts
from .training import Case, Training


@dataclass(frozen=True)
class Reference:
    """The plain model's numbers of every step.

    Attributes:
        micro_batched: run on the same micro-batches one after the other.
        mini_batch: losses and gradients of the whole mini-batch; None if they cannot be computed.
        facts: further observations about the plain model.
        tolerance: the largest error that counts as rounding in this dtype.
    """

    micro_batched: list[Numbers]
    mini_batch: list[Numbers] | None
    facts: PlainFacts
    tolerance: float


def make_reference(case: Case, dtype: str, tolerance: float) -> Reference:
    """Train the plain model."""
    first, again = case.start(), case.start()
    before = dict(_python_state(first))
    numbers = first.run(plain.micro_batched(first))
    remembers = tuple(
        name for name, value in _python_state(first) if name not in before or before[name] != value
    )
    repeated = again.run(plain.micro_batched(again))
    unsteady_step = first_different_step(repeated, numbers, 0.0)
    whole = case.start()
    once = whole.run(plain.at_once(whole), follow=numbers)
    at_once = error_of_steps(once, numbers)
    mixes = _mixing_layer(case, tolerance) if at_once > tolerance and case.split is None else ""
    mini_batch: list[Numbers] | None = None
    if case.split is None and case.loss_fn is not None:
        gathered = case.start()
        mini_batch = gathered.run(plain.gathered(gathered), follow=numbers)
    elif case.split is None and mixes in ("", first.layers[-1][0]) and not first.drawn:
        mini_batch = once
    facts = PlainFacts(
        dtype=dtype,
        repeats=unsteady_step is None,
        unsteady="" if unsteady_step is None else _unsteady_layer(case, unsteady_step),
        at_once=at_once,
        mixes=mixes,
        draws=tuple(name for name, _ in first.layers if name in first.drawn),
        remembers=remembers,
    )
    return Reference(numbers, mini_batch, facts, tolerance)


def recorded_plain_step(case: Case, step: int) -> tuple[Numbers, LayerRecorder, Training]:
    """Train the plain model up to a step, and record the layers of that step."""
    training = case.start()
    recorder = LayerRecorder(training.layers, [range(case.parts)] * len(training.layers))
    numbers = training.run(plain.micro_batched(training), step + 1, recorder=recorder)
    return numbers[-1], recorder, training


def _unsteady_layer(case: Case, step: int) -> str:
    """The first layer that differs between two plain runs; empty if this time they are equal."""
    (ours, recorder, training), (theirs, other, _) = (recorded_plain_step(case, step) for _ in range(2))
    found = find_first_difference(training.layers, (ours, recorder), (theirs, other), 0.0)
    return found.layer if found else ""


def _mixing_layer(case: Case, allowed: float) -> str:
    """The first layer whose outputs for the whole mini-batch are not those of its micro-batches."""
    _, recorder, training = recorded_plain_step(case, 0)
    whole = case.start()
    once = LayerRecorder(whole.layers, [[0]] * len(whole.layers))
    whole.run(plain.at_once(whole), 1, recorder=once)
    for index, (name, _) in enumerate(training.layers):
        parts, together = recorder.outputs(index), once.outputs(index)
        if parts is not None and together is not None:
            whole_outputs = {position: tensor for (_, position), tensor in together.items()}
            if largest_error(_joined(parts), whole_outputs) > allowed:
                return name
    return ""


def _joined(parts: Tensors) -> dict[int, Tensor | None]:
    """The outputs of all micro-batches as those of the mini-batch."""
    columns: dict[int, list[Tensor]] = {}
    for (_, position), tensor in sorted(parts.items()):
        if tensor is not None:
            columns.setdefault(position, []).append(tensor)
    return {
        position: torch.stack(column) if column[0].dim() == 0 else torch.cat(column)
        for position, column in columns.items()
    }


def _python_state(training: Training) -> Iterator[tuple[str, Any]]:
    """Numbers, strings and lengths of containers among the attributes of the model's modules."""
    for name, module in training.model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in _MODULE_ATTRIBUTES:
                continue
            if isinstance(value, int | float | str):
                yield f"{name}.{attribute}", value
            elif isinstance(value, list | dict | set):
                yield f"{name}.{attribute}", len(value)


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
