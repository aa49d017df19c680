"""Trains the plain model in three ways, without stages, schedules or workers, and observes it.

:func:`micro_batched` runs forward and backward of one micro-batch after the other: a pipeline must equal it bit for
bit. :func:`gathered` computes one loss over the outputs of all micro-batches, so it does not depend on how their losses
are combined. :func:`at_once` runs the whole mini-batch, which shows layers that mix samples. Random layers draw as in a
pipeline, by seed, step, micro-batch and layer, because draws from torch's one generator could not be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..autograd import graph_cut
from ..capture import RecordedChain, Whole, loss_of, own_loss
from ..data.arguments import call
from ..data.gather import gather
from ..data.recorded import entered
from ..data.split import micro_batches_of
from ..loss import Reduction, StepLoss, collect_losses, value_of
from ..loss.auxiliary import AddedLosses
from ..runtime.replay.randomness import RngKeys
from ..runtime.sinks import MicroBatchLossSink
from ..runtime.step_gradients import StepGradients
from .first_difference import LayerRecorder, find_first_difference
from .report import PlainFacts
from .training import (
    Case,
    Numbers,
    Tensors,
    Training,
    copy_of,
    error_of_steps,
    first_different_step,
    recorded_chain,
    tensor_errors,
)

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


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
    """Train the plain model in each way that pipelines are compared with."""
    first = Training(case)
    before = dict(_python_state(first.model))
    numbers = first.run(micro_batched)
    after = dict(_python_state(first.model))
    unsteady_step = first_different_step(Training(case).run(micro_batched), numbers, 0.0)
    once = Training(case).run(at_once, follow=numbers)
    at_once_error = error_of_steps(once, numbers)
    mixes = _mixing_layer(case, tolerance) if at_once_error > tolerance and case.split is None else ""
    mini_batch: list[Numbers] | None = None
    if case.split is None and case.loss_fn is not None:
        mini_batch = Training(case).run(gathered, follow=numbers)
    elif case.split is None and mixes in ("", first.layers[-1][0]) and not first.drawn:
        mini_batch = once
    facts = PlainFacts(
        dtype=dtype,
        repeats=unsteady_step is None,
        unsteady="" if unsteady_step is None else _unsteady_layer(case, unsteady_step),
        at_once=at_once_error,
        mixes=mixes,
        draws=tuple(name for name, _ in first.layers if name in first.drawn),
        remembers=tuple(name for name, value in after.items() if name not in before or before[name] != value),
    )
    return Reference(numbers, mini_batch, facts, tolerance)


def recorded_step(case: Case, step: int) -> tuple[Numbers, LayerRecorder, Training]:
    """Train the plain model up to a step, and record the layers of that step."""
    training = Training(case)
    recorder = LayerRecorder(training.layers, [range(case.parts)] * len(training.layers))
    numbers = training.run(micro_batched, step + 1, recorder=recorder)
    return numbers[-1], recorder, training


def _unsteady_layer(case: Case, step: int) -> str:
    """The first layer that differs between two plain runs; empty if this time they are equal."""
    (ours, recorder, training), (theirs, other, _) = (recorded_step(case, step) for _ in range(2))
    found = find_first_difference(training.layers, (ours, recorder), (theirs, other), 0.0)
    return found.layer if found else ""


def _mixing_layer(case: Case, allowed: float) -> str:
    """The first layer whose outputs for the whole mini-batch are not those of its micro-batches."""
    _, recorder, training = recorded_step(case, 0)
    whole = Training(case)
    once = LayerRecorder(whole.layers, [[0]] * len(whole.layers))
    whole.run(_forward_at_once, 1, recorder=once)
    for index, (name, _) in enumerate(training.layers):
        parts, together = recorder.recorded(index), once.recorded(index)
        if parts is not None and together is not None and _mixed(parts[0], together[0], allowed):
            return name
    return ""


def _mixed(parts: Tensors, together: Tensors, allowed: float) -> bool:
    """Whether the outputs of a layer for all micro-batches are not its outputs for the mini-batch, taken apart.

    A tensor may have its samples in any dimension, or be the same for all micro-batches, as a mask of positions is.
    """
    columns: dict[int, list[Tensor]] = {}
    for (_, position), tensor in sorted(parts.items()):
        if tensor is not None:
            columns.setdefault(position, []).append(tensor)
    for (_, position), whole in together.items():
        column = columns.get(position, [])
        if whole is None or not column:
            continue
        if all(one.shape == whole.shape for one in column):
            pairs = {index: (one, whole) for index, one in enumerate(column)}
        else:
            sizes = [sum(one.shape[dim] for one in column) for dim in range(whole.dim())]
            dims = [dim for dim, size in enumerate(sizes) if size == whole.shape[dim]]
            if not dims:
                return True
            pairs = {0: (torch.cat(column, dims[0]), whole)}
        ours, theirs = ({key: pair[side] for key, pair in pairs.items()} for side in (0, 1))
        if max(tensor_errors(ours, theirs).values()) > allowed:
            return True
    return False


def _python_state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Numbers, strings and lengths of containers among the attributes of the model's modules."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in _MODULE_ATTRIBUTES:
                continue
            if isinstance(value, int | float | str):
                yield f"{name}.{attribute}", value
            elif isinstance(value, list | dict | set):
                yield f"{name}.{attribute}", len(value)


def micro_batched(training: Training, x: Any, y: Any) -> Tensor:
    """Run one micro-batch after the other. With ``reduction="batch"`` the loss is that of :func:`gathered`."""
    case = training.case
    if case.reduction == "batch":
        return gathered(training, x, y)
    computed = loss_of if isinstance(training.chain, RecordedChain | Whole) else None
    loss = StepLoss(training.loss_fn or computed, Reduction(case.reduction) if case.reduction else None)
    batch = training.parts_of(x, y)
    gradients = StepGradients(training.model.parameters)
    sink = MicroBatchLossSink(loss, batch, before_backward=gradients.begin)
    draws = RngKeys()
    for index, part in enumerate(batch.inputs):
        with collect_losses() as added:
            output = _forward(training.layers, graph_cut.part(part), index, draws, training.drawn)
        roots = sink.receive(index, output)
        weights = sink.gradients(index) if roots else ()
        if added.found:
            roots = (*roots, *sink.receive_added(0, index, added.found))
            weights = (*weights, *sink.added_gradients(0, index))
        graph_cut.backward(roots, weights)
    gradients.finish(sink.correction())
    draws.finish()
    return sink.total


def gathered(training: Training, x: Any, y: Any) -> Tensor:
    """Compute one loss over the outputs of all micro-batches.

    A copy of the model computes the outputs first, so that here, too, each backward follows its own forward.
    """
    batch = training.parts_of(x, y)
    parts = [graph_cut.part(part) for part in batch.inputs]
    ahead = recorded_chain(copy_of(training.model, None)[0], training.case, x)
    draws = RngKeys()
    # Views of one copy, not copies of the parts: kernels may round otherwise where data is aligned otherwise.
    again = pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), x)
    outputs = [
        graph_cut.cut(_forward(ahead.layers, graph_cut.part(part), index, draws))[0]
        for index, part in enumerate(entered(ahead, training.case.split_up(again, y)).inputs)
    ]
    loss = _loss(training, gather(outputs, batch), batch.target)
    leaves = [leaf for output in outputs for leaf in graph_cut.leaves(output)]
    gradients = iter(torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ())
    draws = RngKeys()
    for index, (part, samples) in enumerate(zip(parts, batch.sizes, strict=True)):
        with collect_losses() as added:
            _, roots = graph_cut.cut(_forward(training.layers, part, index, draws, training.drawn))
        extra = _weighed(added, samples / sum(batch.sizes))
        loss = loss.detach() + extra.detach().to(loss.dtype)
        more = graph_cut.roots(extra)
        found = [*(next(gradients) for _ in roots), *(torch.ones_like(extra) for _ in more)]
        graph_cut.backward((*roots, *more), found)
    draws.finish()
    return loss


def at_once(training: Training, x: Any, y: Any) -> Tensor:
    """Run the whole mini-batch as one micro-batch."""
    whole = micro_batches_of(x, y, 1, training.case.split)
    draws = RngKeys()
    with collect_losses() as added:
        if isinstance(training.chain, RecordedChain):
            output = call(training.model, graph_cut.part(whole.inputs[0]))
        else:
            output = _forward(training.layers, graph_cut.part(whole.inputs[0]), 0, draws)
    loss = _loss(training, output, whole.targets[0]) + _weighed(added, 1.0)
    draws.finish()
    if loss.requires_grad:
        loss.backward()
    return loss


def _forward_at_once(training: Training, x: Any, y: Any) -> Tensor:
    """Run the layers on the whole mini-batch, forward only, so that each of them can be observed."""
    whole = entered(training.chain, micro_batches_of(x, y, 1, training.case.split))
    draws = RngKeys()
    with collect_losses():
        _forward(training.layers, graph_cut.part(whole.inputs[0]), 0, draws)
    draws.finish()
    return torch.zeros(())


def _weighed(added: AddedLosses, share: float) -> Tensor:
    """The losses that layers have added for a share of the samples, as they count in the mini-batch."""
    weighed = [loss * (share if reduction is Reduction.MEAN else 1.0) for loss, reduction in added.found]
    return torch.stack(weighed).sum() if weighed else torch.zeros(())


def _forward(
    layers: Sequence[tuple[str, nn.Module]],
    value: Any,
    micro_batch: int,
    draws: RngKeys,
    drawn: set[str] | None = None,
) -> Any:
    """The output of the layers for one micro-batch. Adds the layers that draw random numbers to ``drawn``."""
    for index, (name, layer) in enumerate(layers):
        with draws.of(index, micro_batch) as own:
            value = call(layer, value)
        if own.used and drawn is not None:
            drawn.add(name)
    return value


def _loss(training: Training, output: Any, target: Any) -> Tensor:
    if training.loss_fn is None:
        return value_of(own_loss(output))
    return value_of(training.loss_fn(output) if target is None else training.loss_fn(output, target))
