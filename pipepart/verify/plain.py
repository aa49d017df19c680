"""Trains the plain model, one micro-batch after another; a check compares pipelines with its numbers.

Nothing here runs the layers of a pipeline. The losses of the micro-batches are combined by the rules of
:mod:`pipepart.loss`, and the result is compared with one loss over all outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from ..autograd import graph_cut
from ..autograd.own_copy import own_copy
from ..capture import own_loss
from ..capture.restore import draws_restored
from ..data.arguments import Arguments, call
from ..data.gather import gather
from ..data.split import MicroBatches, micro_batches_of
from ..input_error import InputError
from ..loss import Reduction, collect_losses, value_of
from ..loss.returned import check_returned
from ..relative_errors import largest_error, relative_error
from ..runtime.replay.randomness import RngKeys
from ..runtime.sinks import BatchLossSink, LossSink, MicroBatchLossSink
from ..runtime.step_gradients import StepGradients
from .choices import Choices, Chosen, ModelDraws
from .numbers import Numbers, errors
from .report import PlainFacts
from .training import Case, Training


@dataclass(frozen=True)
class Reference:
    """The plain model's numbers.

    Attributes:
        numbers: of every step.
        mini_batch: error of loss and gradients against the whole mini-batch; None if that cannot be compared.
        facts: further observations.
    """

    numbers: list[Numbers]
    mini_batch: float | None
    facts: PlainFacts


def make_reference(case: Case, dtype: str, tolerance: float) -> Reference:
    """Train the plain model, and compare its first step with the whole mini-batch."""
    steps = PlainSteps(case)
    numbers = Training(case).run(steps)
    mini_batch, at_once, mixes = steps.mini_batch, None, ""
    if case.split is None and not steps.drawing:
        whole = Training(case)
        differences = errors(numbers[:1], whole.run(_at_once, 1))
        at_once = max(differences["losses"] or 0.0, differences["gradients"] or 0.0)
        mixes = _batch_norm(whole.chain.places) if at_once > tolerance else ""
        if case.loss_fn is None and not mixes:
            mini_batch = at_once
    facts = PlainFacts(
        dtype=dtype,
        at_once=at_once,
        mixes=mixes,
        draws=tuple(steps.drawing),
        draws_match=steps.draws_match,
    )
    return Reference(numbers, mini_batch, facts)


class PlainSteps:
    """Trains the user's model on the same micro-batches as a pipeline, one after another.

    Args:
        case: of the check.

    Attributes:
        mini_batch: the largest error of any step's loss, and of its gradients at the model's outputs, against one loss
            over the outputs of all micro-batches; None if that cannot be computed.
        drawing: the layers that draw random numbers.
        draws_match: whether the model has always drawn as often as the layers of the pipeline.
    """

    def __init__(self, case: Case) -> None:
        self._choices = Choices(case)
        self.mini_batch: float | None = None
        self.drawing: dict[str, None] = {}
        self.draws_match = True

    def __call__(self, training: Training, x: Any, y: Any) -> Tensor:
        """Run a step; return the loss of the mini-batch."""
        chosen = self._choices.of_step(training.model, x, y)
        self._note_draws(chosen)
        if training.case.loss_fn is None and chosen.shares is None:
            return _at_once(training, x, y)
        batch = training.case.split_up(x, y)
        gradients = StepGradients(training.model.parameters)
        sink = _sink(training, batch, chosen, gradients)
        is_combined = isinstance(sink, MicroBatchLossSink) and not training.case.split
        outputs: list[Any] = []
        keys = RngKeys()
        waiting: list[tuple[int, Sequence[GradientEdge], Sequence[GradientEdge]]] = []
        for index, part in enumerate(batch.inputs):
            with collect_losses() as added, ModelDraws(keys, index, chosen.draws[index]) as draws:
                output = _call(training.model, graph_cut.part(part))
            self.draws_match &= draws.matches
            if is_combined:
                outputs.append(own_copy(output))
            loss = sink.receive(index, output)
            waiting.append((index, loss, sink.receive_added(0, index, added.found)))
            del output
            if isinstance(sink, BatchLossSink) and index + 1 < len(batch.inputs):
                continue  # the loss needs all outputs
            for place, roots, extra in waiting:
                weights = sink.gradients(place) if roots else ()
                graph_cut.backward((*roots, *extra), (*weights, *sink.added_gradients(0, place)))
            waiting.clear()
        gradients.finish(sink.correction())
        keys.finish()
        if is_combined:
            error = _combination_error(training, batch, outputs)
            self.mini_batch = None if error is None else max(error, self.mini_batch or 0.0)
        return sink.total

    def _note_draws(self, chosen: Chosen) -> None:
        totals = [sum(column) for column in zip(*chosen.draws, strict=True)]
        named = zip(self._choices.names, totals, strict=True)
        self.drawing |= dict.fromkeys(name for name, count in named if count)


class _OwnLossSink(LossSink):
    """Takes the losses that the user's model computes, each with its share in the loss of the mini-batch."""

    def __init__(self, batch: MicroBatches, chosen: Chosen) -> None:
        super().__init__(batch.sizes)
        self._chosen = chosen
        self._losses: list[Tensor] = []

    def receive(self, micro_batch: int, value: Any) -> tuple[GradientEdge, ...]:
        loss = check_returned(own_loss(value))
        self._losses.append(loss.detach())
        return graph_cut.roots(loss)

    def gradients(self, micro_batch: int) -> graph_cut.Gradients:
        assert self._chosen.shares is not None
        return [self._seed(self._chosen.shares[micro_batch], self._losses[micro_batch])]

    @property
    def total(self) -> Tensor:
        return self._with_added()

    def _own_total(self) -> Tensor:
        values = torch.stack(self._losses)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        shares = torch.tensor(self._chosen.shares, dtype=values.dtype, device=values.device)
        return (values.masked_fill(shares == 0, 0.0) * shares).sum().to(self._losses[0].dtype)


def _combination_error(training: Training, batch: MicroBatches, outputs: Sequence[Any]) -> float | None:
    """Combine the losses of the micro-batches' outputs, and compare with one loss over all outputs.

    Returns:
        The relative error of the loss and of its gradients at the outputs; None if outputs cannot be joined.
    """
    loss_fn = training.loss_fn
    assert loss_fn is not None
    loss_fn = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        output = gather(_writable(outputs), batch)
    except InputError:
        return None
    sink, gradients = MicroBatchLossSink(training.case.step_loss(loss_fn), batch), []
    with draws_restored(training.model):
        for index, part in enumerate(outputs):
            roots = sink.receive(index, _writable(part))
            gradients += _gradients_at(graph_cut.leaves(part), roots, sink.gradients(index) if roots else ())
        whole = _value(loss_fn, output, batch.target)
    leaves = [leaf for part in outputs for leaf in graph_cut.leaves(part)]
    at_whole = _gradients_at(leaves, graph_cut.roots(whole), [torch.ones_like(whole)])
    factor = sink.correction()
    corrected = [
        gradient if gradient is None or factor == 1.0 else gradient * factor for gradient in gradients
    ]
    return max(
        relative_error(sink.total.detach(), whole.detach()),
        largest_error(dict(enumerate(corrected)), dict(enumerate(at_whole))),
    )


def _writable(output: Any) -> Any:
    """Return a copy that is no leaf: a loss may write into it."""
    return pytree.tree_map_only(Tensor, Tensor.clone, output)


def _gradients_at(
    leaves: Sequence[Tensor], roots: Sequence[GradientEdge], weights: graph_cut.Gradients
) -> Sequence[Tensor | None]:
    if not leaves or not roots:
        return [None] * len(leaves)
    return torch.autograd.grad(roots, leaves, weights, allow_unused=True)


def _sink(training: Training, batch: MicroBatches, chosen: Chosen, gradients: StepGradients) -> Any:
    case = training.case
    if case.loss_fn is None:
        gradients.begin(certain=True)
        return _OwnLossSink(batch, chosen)
    loss = case.step_loss(training.loss_fn)
    if loss.reduction is Reduction.BATCH:
        return BatchLossSink(loss, batch)
    return MicroBatchLossSink(loss, batch, before_backward=gradients.begin)


def _value(loss_fn: Any, output: Any, target: Any) -> Tensor:
    return value_of(loss_fn(output) if target is None else loss_fn(output, target))


def _call(model: nn.Module, arguments: Any) -> Any:
    """Call the model as the user does. The first layer of a plain ``nn.Sequential`` may take several arguments."""
    several = type(arguments) is Arguments and (arguments.kwargs or len(arguments.args) != 1)
    if (
        not several
        or not isinstance(model, nn.Sequential)
        or type(model).forward is not nn.Sequential.forward
    ):
        return call(model, arguments)
    first, *others = model
    value = _call(first, arguments)
    for layer in others:
        value = layer(value)
    return value


def _at_once(training: Training, x: Any, y: Any) -> Tensor:
    """Run a step of the user's model on the whole mini-batch."""
    whole = micro_batches_of(x, y, 1, training.case.split)
    with collect_losses() as added:
        output = _call(training.model, graph_cut.part(whole.inputs[0]))
    if training.loss_fn is None:
        loss = check_returned(own_loss(output))
    else:
        loss = _value(training.loss_fn, output, whole.targets[0])
    loss = loss + added.total().to(loss.device, loss.dtype)
    if loss.requires_grad:
        loss.backward()
    return loss


def _batch_norm(places: Sequence[tuple[str, nn.Module]]) -> str:
    """Return the first place of a model with a batch norm that is in training mode; empty if there is none."""
    parts = ((path, part) for path, module in places for part in module.modules())
    kind = nn.modules.batchnorm._BatchNorm
    return next((path for path, part in parts if isinstance(part, kind) and part.training), "")
