"""Finds the first module of the user's model whose outputs or gradients differ between two runs of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

import schedules

from ..autograd.own_copy import tensors
from ..capture import Chain
from ..planning import Plan
from .numbers import Numbers, Tensors, copied, largest_error, tensor_errors

Orders = Mapping[str, Sequence[int]]  # for each module the micro-batches in the order of its forwards


class LayerRecorder:
    """Context manager that records the outputs of modules in each call, and the gradients of these outputs.

    Args:
        modules: paths in the model, and the modules there.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = {id(module): (path, module) for path, module in reversed(modules)}
        self._calls: dict[str, list[tuple[dict[int, Tensor | None], dict[int, Tensor | None]]]] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        for path, module in self._modules.values():
            self._hooks.callback(module.register_forward_hook(partial(self._record, path)).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    @property
    def paths(self) -> list[str]:
        """The modules that were called, in the order of their first calls."""
        return list(self._calls)

    def module(self, path: str) -> nn.Module:
        """Return a module by its path."""
        return next(module for own, module in self._modules.values() if own == path)

    def recorded(self, path: str, order: Sequence[int]) -> tuple[Tensors, Tensors] | None:
        """Return a module's outputs and their gradients, by micro-batch, call and tensor.

        Args:
            path: of the module.
            order: the micro-batches in the order of its forwards. If one occurs twice, its second forward counts.

        Returns:
            None if the module was called more often in one forward than in another.
        """
        calls = self._calls.get(path, [])
        each, rest = divmod(len(calls), len(order)) if order else (0, 1)
        if not each or rest:
            return None
        outputs: dict[Any, Tensor | None] = {}
        gradients: dict[Any, Tensor | None] = {}
        for number, (made, gradient) in enumerate(calls):
            place = order[number // each], number % each
            outputs |= {(*place, position): tensor for position, tensor in made.items()}
            gradients |= {(*place, position): tensor for position, tensor in gradient.items()}
        return outputs, gradients

    def _record(self, path: str, module: nn.Module, given: Any, output: Any) -> None:
        made: dict[int, Tensor | None] = {}
        gradients: dict[int, Tensor | None] = {}
        self._calls.setdefault(path, []).append((made, gradients))
        for position, tensor in enumerate(tensors(output)):
            made[position] = copied(tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(_keep, gradients, position))


def _keep(gradients: dict[int, Tensor | None], position: int, gradient: Tensor) -> None:
    gradients[position] = copied(gradient)


class Difference(NamedTuple):
    """The first difference of two runs.

    Attributes:
        layer, kind: path and class of the module; ``"loss"`` and nothing for the loss.
        what: the difference in words.
    """

    layer: str
    kind: str
    what: str


Run = tuple[Numbers, LayerRecorder, Orders]  # the numbers of a step, and what was recorded in it


def find_first_difference(ours: Run, theirs: Run, allowed: float) -> Difference:
    """Return the first module in which two runs of a step differ by a relative error of more than ``allowed``.

    Compares in the order of computation: outputs and buffers from the first module to the last; the loss; gradients
    from the last module to the first; parameters after the optimizer's step. What belongs to none of the modules comes
    last.
    """
    both = _Comparison(ours, theirs, allowed)
    ways = (both.forward(), both.backward(), both.rest())
    return next((found for way in ways for found in way), Difference("loss", "", "the loss"))


class _Comparison:
    """Two runs of the same step, module by module."""

    def __init__(self, ours: Run, theirs: Run, allowed: float) -> None:
        self._runs, self._allowed = (ours, theirs), allowed
        self._recorder = theirs[1]
        self._names = {
            kind: [name for name, error in tensor_errors(ours[0][kind], tensors).items() if error > allowed]
            for kind, tensors in theirs[0].items()
        }

    def forward(self) -> Iterator[Difference]:
        for path in self._recorder.paths:
            if self._differ(path, gradients=False):
                yield self._at(path, "its output")
            yield from self._own("buffers", path)
        if self._names["losses"]:
            yield Difference("loss", "", "the loss")

    def backward(self) -> Iterator[Difference]:
        after = None
        for path in reversed(self._recorder.paths):
            if self._differ(path, gradients=True):  # which the next module has computed
                of_output = Difference("loss", "", "the gradient of the model's output")
                yield self._at(after, "the gradient of its input") if after else of_output
            yield from self._own("gradients", path)
            after = path

    def rest(self) -> Iterator[Difference]:
        for path in self._recorder.paths:
            yield from self._own("parameters", path)
        for kind in ("buffers", "gradients", "parameters"):
            for name in self._names[kind]:
                yield Difference(name.rpartition(".")[0], "", _named(kind, [name]))

    def _differ(self, path: str, gradients: bool) -> bool:
        mine, other = (recorder.recorded(path, orders.get(path, ())) for _, recorder, orders in self._runs)
        if mine is None or other is None:
            return False
        return largest_error(mine[gradients], other[gradients]) > self._allowed

    def _own(self, kind: str, path: str) -> Iterator[Difference]:
        if names := [name for name in self._names[kind] if name.startswith(f"{path}.")]:
            yield self._at(path, _named(kind, names))

    def _at(self, path: str, what: str) -> Difference:
        return Difference(path, type(self._recorder.module(path)).__name__, what)


def _named(kind: str, names: Sequence[str]) -> str:
    return ("the gradient of " if kind == "gradients" else "") + ", ".join(names)


def forward_orders(plan: Plan, chain: Chain, micro_batches: int) -> Orders:
    """Return for each module the micro-batches in the order of its forwards, recomputed forwards included.

    Without modules of several stages. Nothing for a plan with replicas, which run some of the micro-batches each.
    """
    built = plan.build_schedule(micro_batches)
    if built.replicas > 1:
        return {}
    orders: list[list[int]] = [[] for _ in plan.stages]
    for row in schedules.split_overlaps(built).actions:
        for action in row:
            if action.kind in (schedules.Kind.F, schedules.Kind.RECOMPUTE) and action.micro_batch is not None:
                orders[action.stage].append(action.micro_batch)
    homes: dict[str, set[int]] = {}
    for index, stage in enumerate(plan.stages):
        for layer in stage.layers:
            for path in chain.groups[layer].modules if chain.groups else (layer,):
                homes.setdefault(path, set()).add(index)
    found = {path: homes.get(path, homes.get("", ())) for path, _ in chain.places}
    return {path: orders[min(stages)] for path, stages in found.items() if len(stages) == 1}


def mixing_module(parts: LayerRecorder, whole: LayerRecorder, micro_batches: int, allowed: float) -> str:
    """Return the first module whose outputs for the mini-batch differ from those for its micro-batches; or ``""``."""
    for path in parts.paths:
        of_parts, once = parts.recorded(path, range(micro_batches)), whole.recorded(path, [0])
        if of_parts is not None and once is not None and _mixed(of_parts[0], once[0], allowed):
            return path
    return ""


def _mixed(parts: Tensors, together: Tensors, allowed: float) -> bool:
    """Return True if outputs for all micro-batches are not the outputs for the mini-batch, taken apart.

    A tensor may have its samples in any dimension, or be the same for all micro-batches, as a mask of positions is.
    """
    columns: dict[Any, list[Tensor]] = {}
    for (_, *place), tensor in sorted(parts.items(), key=lambda item: item[0]):
        if tensor is not None:
            columns.setdefault(tuple(place), []).append(tensor)
    for (_, *place), whole in together.items():
        column = columns.get(tuple(place), [])
        if whole is None or not column:
            continue
        if all(one.shape == whole.shape for one in column):
            pairs = [(one, whole) for one in column]
        else:
            sizes = [sum(one.shape[dim] for one in column) for dim in range(whole.dim())]
            dims = [dim for dim, size in enumerate(sizes) if size == whole.shape[dim]]
            if not dims:
                return True
            pairs = [(torch.cat(column, dims[0]), whole)]
        if max(largest_error({0: one}, {0: other}) for one, other in pairs) > allowed:
            return True
    return False
