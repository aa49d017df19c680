"""Finds the first module of the user's model whose outputs or gradients differ between two runs of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NamedTuple, Self

from torch import Tensor, nn

from ..autograd.own_copy import tensors
from ..relative_errors import relative_error, tensor_errors
from .numbers import Numbers, copied

Kind = Literal["outputs", "gradients"]


class LayerRecorder:
    """Context manager that records the outputs of modules in each call, and the gradients of these outputs.

    Args:
        modules: paths in the model, and the modules there.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = {id(module): (path, module) for path, module in reversed(modules)}
        self._recorded: dict[str, dict[Kind, list[Tensor]]] = {}
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
        return list(self._recorded)

    def recorded(self, path: str, kind: Kind) -> list[Tensor]:
        """Return the outputs of a module in all its calls, or their gradients."""
        return self._recorded[path][kind] if path in self._recorded else []

    def kind(self, path: str) -> str:
        """Return the class of a module."""
        return next(type(module).__name__ for own_path, module in self._modules.values() if own_path == path)

    def _record(self, path: str, module: nn.Module, arguments: Any, output: Any) -> None:
        entry = self._recorded.setdefault(path, {"outputs": [], "gradients": []})
        for tensor in tensors(output):
            _keep(entry["outputs"], tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(_keep, entry["gradients"]))


def _keep(kept: list[Tensor], tensor: Tensor) -> None:
    dense = copied(tensor)
    assert dense is not None
    kept.append(dense)


class Difference(NamedTuple):
    """The first difference of two runs.

    Attributes:
        layer, kind: path and class of the module; ``"loss"`` and nothing for the loss.
        what: the difference in words.
    """

    layer: str
    kind: str
    what: str


Run = tuple[Numbers, LayerRecorder]  # the numbers of a step, and what was recorded in it


def find_first_difference(ours: Run, theirs: Run, allowed: float) -> Difference:
    """Return the first module in which two runs of a step differ by a relative error of more than ``allowed``.

    Compares in the order of computation: outputs and buffers from the first module to the last; the loss; gradients
    from the last module to the first; parameters after the optimizer's step. What belongs to none of the modules comes
    last. A module may be called in any order of micro-batches, and again to recompute: each tensor of one run needs an
    equal one in the other run.
    """
    both = _Comparison(ours, theirs, allowed)
    ways = (both.forward(), both.backward(), both.rest())
    return next((difference for way in ways for difference in way), Difference("loss", "", "the loss"))


class _Comparison:
    """Two runs of the same step, module by module."""

    def __init__(self, ours: Run, theirs: Run, allowed: float) -> None:
        self._ours, self._theirs, self._allowed = ours[1], theirs[1], allowed
        self._names = {
            kind: [name for name, error in tensor_errors(ours[0][kind], tensors).items() if error > allowed]
            for kind, tensors in theirs[0].items()
        }

    def forward(self) -> Iterator[Difference]:
        for path in self._theirs.paths:
            if self._differ(path, "outputs"):
                yield self._at(path, "its output")
            yield from self._own("buffers", path)
        if self._names["losses"]:
            yield Difference("loss", "", "the loss")

    def backward(self) -> Iterator[Difference]:
        after = None
        for path in reversed(self._theirs.paths):
            if self._differ(path, "gradients"):  # which the next module has computed
                of_output = Difference("loss", "", "the gradient of the model's output")
                yield self._at(after, "the gradient of its input") if after else of_output
            yield from self._own("gradients", path)
            after = path

    def rest(self) -> Iterator[Difference]:
        for path in self._theirs.paths:
            yield from self._own("parameters", path)
        for kind in ("buffers", "gradients", "parameters"):
            for name in self._names[kind]:
                yield Difference(name.rpartition(".")[0], "", _named(kind, [name]))

    def _differ(self, path: str, kind: Kind) -> bool:
        first, second = self._ours.recorded(path, kind), self._theirs.recorded(path, kind)
        return not (_all_in(first, second, self._allowed) and _all_in(second, first, self._allowed))

    def _own(self, kind: str, path: str) -> Iterator[Difference]:
        if names := [name for name in self._names[kind] if name.startswith(f"{path}.")]:
            yield self._at(path, _named(kind, names))

    def _at(self, path: str, what: str) -> Difference:
        return Difference(path, self._theirs.kind(path), what)


def _all_in(some: Sequence[Tensor], others: Sequence[Tensor], allowed: float) -> bool:
    """Return True if each tensor has an equal one among the others."""
    return all(any(relative_error(first, other) <= allowed for other in others) for first in some)


def _named(kind: str, names: Sequence[str]) -> str:
    return ("the gradient of " if kind == "gradients" else "") + ", ".join(names)
