"""Finds the first layer whose numbers differ between two runs of the same step, and says why they may differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Self

from torch import Tensor, nn

import schedules

from ..autograd.own_copy import tensors
from ..capture import Chain, describe
from ..loss import declared_reduction
from ..planning import Plan
from .report import PlainFacts, listed
from .training import Numbers, Tensors, copied, tensor_errors

Layers = Sequence[tuple[str, nn.Module]]


class LayerRecorder:
    """Records, within a ``with`` block, what each layer returns for each micro-batch and the gradients of that.

    A layer that the model contains twice is not recorded.

    Args:
        layers: of the model, with their names.
        calls: for each layer the micro-batches in the order of its forwards. If a micro-batch occurs twice, its second
            forward counts. Nothing is recorded for a layer without calls.
    """

    def __init__(self, layers: Layers, calls: Sequence[Sequence[int]]) -> None:
        self._layers = layers
        self._calls = calls
        self._counts = [0] * len(layers)
        # Of each layer, by micro-batch and index of the tensor in the output.
        self._outputs: list[dict[tuple[int, int], Tensor | None]] = [{} for _ in layers]
        self._gradients: list[dict[tuple[int, int], Tensor | None]] = [{} for _ in layers]
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        uses = Counter(id(layer) for _, layer in self._layers)
        for index, (_, layer) in enumerate(self._layers):
            if uses[id(layer)] == 1:
                self._hooks.callback(layer.register_forward_hook(partial(self._record, index)).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def recorded(self, index: int) -> tuple[Tensors, Tensors] | None:
        """A layer's outputs, and their gradients; None if it did not run as often as expected."""
        if not self._counts[index] == len(self._calls[index]) > 0:
            return None
        return self._outputs[index], self._gradients[index]

    def _record(self, index: int, layer: nn.Module, given: Any, output: Any) -> None:
        count = self._counts[index]
        self._counts[index] = count + 1
        if count >= len(self._calls[index]):
            return
        micro_batch = self._calls[index][count]
        for position, tensor in enumerate(tensors(output)):
            key = micro_batch, position
            self._outputs[index][key] = copied(tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._record_gradient, index, key))

    def _record_gradient(self, index: int, key: tuple[int, int], gradient: Tensor) -> None:
        self._gradients[index][key] = copied(gradient)


class Part(Enum):
    """The part of a step in which two runs first differ."""

    FORWARD = "its output"
    BUFFERS = "its buffers"
    LOSS = "the loss"
    BACKWARD = "the gradient of its input"
    GRADIENTS = "the gradient of its parameters"
    PARAMETERS = "its parameters"


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs.

    Attributes:
        layer, kind: name and class of the layer; empty for the loss.
        part: the part of the step.
        tensors: names of the parameters or buffers that differ, if it is these.
    """

    layer: str
    kind: str
    part: Part
    tensors: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """The difference in words."""
        if not self.layer and self.part is Part.BACKWARD:
            return "the gradient of the model's output"
        if not self.tensors:
            return self.part.value
        named = ", ".join(self.tensors)
        return f"the gradient of {named}" if self.part is Part.GRADIENTS else named


Run = tuple[Numbers, LayerRecorder]  # the numbers of a step, and what was recorded of its layers


def find_first_difference(layers: Layers, ours: Run, theirs: Run, allowed: float) -> Difference | None:
    """Find the first layer in which two runs of a step differ by more than a relative error of ``allowed``.

    Compares in the order of computation: outputs and buffers from the first layer to the last; the loss; gradients
    from the last layer to the first; parameters after the optimizer's step.
    """
    both = _Comparison(layers, ours, theirs, allowed)
    ways = (both.forward(), both.backward(), both.update())
    return next((found for way in ways for found in way), None)


class _Comparison:
    """Two runs of the same step, layer by layer."""

    def __init__(self, layers: Layers, ours: Run, theirs: Run, allowed: float) -> None:
        self._layers = layers
        self._recorders = ours[1], theirs[1]
        self._allowed = allowed
        self._names = {
            kind: [name for name, error in tensor_errors(ours[0][kind], tensors).items() if error > allowed]
            for kind, tensors in theirs[0].items()
        }

    def forward(self) -> Iterator[Difference]:
        for index in range(len(self._layers)):
            if self._outputs_differ(index):
                yield self._at(index, Part.FORWARD)
            yield from self._own("buffers", index, Part.BUFFERS)
        if self._names["losses"]:
            yield self._at(len(self._layers), Part.LOSS)

    def backward(self) -> Iterator[Difference]:
        for index in reversed(range(len(self._layers))):
            if self._outputs_differ(index, gradients=True):  # which the next layer has computed
                yield self._at(index + 1, Part.BACKWARD)
            yield from self._own("gradients", index, Part.GRADIENTS)

    def update(self) -> Iterator[Difference]:
        for index in range(len(self._layers)):
            yield from self._own("parameters", index, Part.PARAMETERS)

    def _outputs_differ(self, index: int, gradients: bool = False) -> bool:
        ours, theirs = (recorder.recorded(index) for recorder in self._recorders)
        if ours is None or theirs is None:
            return False
        return max(tensor_errors(ours[gradients], theirs[gradients]).values(), default=0.0) > self._allowed

    def _own(self, kind: str, index: int, part: Part) -> Iterator[Difference]:
        layer, module = self._layers[index]
        own = {name for name, _ in (*module.named_parameters(layer), *module.named_buffers(layer))}
        if names := [name for name in self._names[kind] if name in own]:
            yield self._at(index, part, tuple(names))

    def _at(self, index: int, part: Part, tensors: tuple[str, ...] = ()) -> Difference:
        if index == len(self._layers):
            return Difference("", "", part)
        name, module = self._layers[index]
        return Difference(name, type(module).__name__, part, tensors)


def why_different(
    difference: Difference, plan: Plan, micro_batches: int, chain: Chain, facts: PlainFacts
) -> str:
    """Explain why a pipeline's numbers may differ from those of the plain model on the same micro-batches."""
    if not facts.repeats:
        return facts.unsteady_text
    if plan.compressed:
        return f"the plan sends {plan.compressed}"
    kept = [name for name in facts.remembers if name.startswith(f"{difference.layer}.")]
    if kept and any(stage.recompute != "never" for stage in plan.stages):
        return f"it keeps {', '.join(kept)} in Python, and recompute runs its forward twice: use recompute='never'"
    if (replicas := plan.build_schedule(micro_batches).replicas) > 1:
        return f"order of sums: each of {replicas} replicas adds up the gradients of its own micro-batches"
    order = _summing_order(plan, micro_batches)
    if difference.part is Part.GRADIENTS and order != sorted(order):
        shown = ", ".join(map(str, order))
        return f"order of sums: {plan.schedule} adds up the gradients of micro-batches in the order {shown}"
    if len({device.threads for device in plan.devices}) > 1:
        return "the devices have different numbers of intra-operation threads, which sum in different orders"
    if difference.part is Part.LOSS:
        return (
            "the outputs are the same: the loss draws random numbers, keeps state, or sums in another order"
        )
    if difference.part in (Part.FORWARD, Part.BUFFERS, Part.BACKWARD):
        state = f" ({', '.join(kept)})" if kept else ""
        return (
            f"its inputs are the same: it keeps state between calls{state} that micro-batches in flight share, or "
            "it is not safe on several threads"
        )
    lost = "missing, doubled or summed in another order"
    if partners := _sharing(chain, difference.layer):
        return f"it shares parameters with {listed(partners)}: one part of the gradient is {lost}"
    if difference.part is Part.GRADIENTS:
        return f"the gradient of its output is the same: one part of the gradient is {lost}"
    return "the gradients are the same: something other than the optimizer writes its parameters"


def why_other_loss(loss_fn: Any, reduction: str | None, error: float) -> str:
    """Explain why the losses of the micro-batches do not add up to the loss of the mini-batch."""
    combined = reduction or declared_reduction(loss_fn)
    how = f"combined as a {combined} over samples" if combined else "combined as they were recognized"
    return (
        f"the pipeline's step is that of the micro-batches' losses, {how}; the loss of the whole mini-batch has other "
        f"gradients (relative error {error:.0e}): declare reduction='mean', 'sum' or 'batch', or return (sum, count)"
    )


def forward_order(plan: Plan, micro_batches: int) -> list[list[int]]:
    """For each layer the micro-batches in the order of its forwards, recomputed forwards included.

    Empty for a plan with replicas: each runs some of the micro-batches only.
    """
    if plan.build_schedule(micro_batches).replicas > 1:
        return [[] for stage in plan.stages for _ in stage.layers]
    order = _order(plan, micro_batches, {schedules.Kind.F, schedules.Kind.RECOMPUTE})
    return [order[index] for index, stage in enumerate(plan.stages) for _ in stage.layers]


def _summing_order(plan: Plan, micro_batches: int) -> list[int]:
    """The order in which gradients of micro-batches are added up, by the first stage that does not keep theirs."""
    own = list(range(micro_batches))
    kinds = {schedules.Kind.B, schedules.Kind.W}
    return next((order for order in _order(plan, micro_batches, kinds) if order != own), own)


def _order(plan: Plan, micro_batches: int, kinds: set[schedules.Kind]) -> list[list[int]]:
    """For each stage the micro-batches of its actions of some kinds, in their order."""
    found: list[list[int]] = [[] for _ in plan.stages]
    for row in schedules.split_overlaps(plan.build_schedule(micro_batches)).actions:
        for action in row:
            if action.kind in kinds and action.micro_batch is not None:
                found[action.stage].append(action.micro_batch)
    return found


def _sharing(chain: Chain, layer: str) -> list[str]:
    """The layers that share a parameter or buffer with one."""
    shared = {info.name: info.shares_with for info in describe(chain)}
    return [
        name
        for name, partners in shared.items()
        if name != layer and (layer in partners or name in shared.get(layer, ()))
    ]
