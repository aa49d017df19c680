"""What a check learns of the plain model before it looks at any pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import plain
from .culprit import find_culprit
from .numbers import Numbers, Tensors, errors, largest_error
from .report import PlainFacts
from .training import Case, Training
from .watch import Watch


@dataclass(frozen=True)
class Reference:
    """The plain model's numbers of every step.

    Attributes:
        micro_batched: in the same micro-batches, one after the other.
        mini_batch: what losses and gradients of the whole mini-batch are; None where nothing can say that.
        facts: what else was seen.
        tolerance: what is allowed in this dtype.
    """

    micro_batched: list[Numbers]
    mini_batch: list[Numbers] | None
    facts: PlainFacts
    tolerance: float


def refer(case: Case, dtype: str, tolerance: float) -> Reference:
    """Trains the plain model in every way that it is compared with."""
    first, again = case.start(), case.start()
    before = dict(_python_state(first))
    numbers = first.run(plain.micro_batched(first))
    remembers = tuple(
        name for name, value in _python_state(first) if name not in before or before[name] != value
    )
    repeated = again.run(plain.micro_batched(again))
    repeats = first_apart(repeated, numbers, 0.0) is None
    whole = case.start()
    once = whole.run(plain.at_once(whole), follow=numbers)
    apart = _worst_of_step(once, numbers)
    mixes = _mixing_layer(case, tolerance) if apart > tolerance and case.split is None else ""
    total: list[Numbers] | None = None
    if case.split is not None:
        pass  # which need not be parts of anything that can be put together
    elif case.loss_fn is not None:
        one = case.start()
        total = one.run(plain.gathered(one), follow=numbers)
    elif mixes in ("", first.layers[-1][0]) and not first.drawn:
        total = once
    facts = PlainFacts(
        dtype=dtype,
        repeats=repeats,
        unsteady="" if repeats else _unsteady_layer(case, first_apart(repeated, numbers, 0.0) or 0),
        at_once=apart,
        mixes=mixes,
        draws=tuple(name for name, _ in first.layers if name in first.drawn),
        remembers=remembers,
    )
    return Reference(numbers, total, facts, tolerance)


def watched_plain(case: Case, step: int) -> tuple[Numbers, Watch, Training]:
    """One step of the plain model, seen layer by layer; those before it have run."""
    training = case.start()
    watch = Watch(training.layers, [range(case.parts)] * len(training.layers))
    numbers = training.run(plain.micro_batched(training), step + 1, watched=watch)
    return numbers[-1], watch, training


def first_apart(ours: list[Numbers], theirs: list[Numbers], allowed: float) -> int | None:
    """The first step in which anything differs by more than ``allowed``."""
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if _worst(errors([mine], [other])) > allowed:
            return step
    return None


def mini_batch_error(ours: list[Numbers], theirs: list[Numbers] | None) -> float | None:
    """The largest error of losses and gradients; None where there is nothing to compare with."""
    return None if theirs is None else _worst_of_step(ours, theirs)


def _worst(found: dict[str, float | None]) -> float:
    return max(error or 0.0 for error in found.values())


def _worst_of_step(ours: list[Numbers], theirs: list[Numbers]) -> float:
    found = errors(ours, theirs)
    return max(found["losses"] or 0.0, found["gradients"] or 0.0)


def _unsteady_layer(case: Case, step: int) -> str:
    """The layer in which two plain runs part; empty where they do so only now and then, and not this time."""
    (numbers, watch, training), (other, others, _) = watched_plain(case, step), watched_plain(case, step)
    found = find_culprit(training.layers, (numbers, watch), (other, others), 0.0)
    return found.layer if found else ""


def _mixing_layer(case: Case, allowed: float) -> str:
    """The first layer whose output for a sample hangs on the samples beside it, or on which micro-batch they are in."""
    _, watch, training = watched_plain(case, 0)
    whole = case.start()
    once = Watch(whole.layers, [[0]] * len(whole.layers))
    whole.run(plain.at_once(whole), 1, watched=once)
    for place, (name, _) in enumerate(training.layers):
        parts, together = watch.outputs(place), once.outputs(place)
        if parts is not None and together is not None:
            joined = _joined(parts)
            if largest_error(joined, {index: tensor for (_, index), tensor in together.items()}) > allowed:
                return name
    return ""


def _joined(parts: Tensors) -> dict[int, Tensor | None]:
    """The outputs of all micro-batches as those of the mini-batch."""
    columns: dict[int, list[Tensor]] = {}
    for (_, index), tensor in sorted(parts.items()):
        if tensor is not None:
            columns.setdefault(index, []).append(tensor)
    return {
        index: torch.stack(column) if column[0].dim() == 0 else torch.cat(column)
        for index, column in columns.items()
    }


def _python_state(training: Training) -> Iterator[tuple[str, Any]]:
    """Numbers, words and lengths that the layers keep as attributes in Python."""
    for name, module in training.model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in _TABLES:
                continue
            if isinstance(value, int | float | str):
                yield f"{name}.{attribute}", value
            elif isinstance(value, list | dict | set):
                yield f"{name}.{attribute}", len(value)


_TABLES = frozenset(vars(nn.Module()))
