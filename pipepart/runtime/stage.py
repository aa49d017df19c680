"""A stage: its layers on its device, and one autograd graph for each micro-batch in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import GradientEdge

from schedules import Action

from ..autograd import graph_cut
from ..autograd.own_copy import own_copy, tensors
from ..autograd.split_backward import WeightGradients, backward_inputs
from ..data.arguments import Arguments, call
from ..loss import added_so_far
from .compiled import Region, Regions
from .failure.blame import failed_layers
from .failure.notes import LAYER, add_note
from .input_gradients import Awaited, InputGradients
from .replay.buffers import Buffers, version
from .replay.randomness import Draws, Turn, may_draw
from .state.replicas import CopiedLayers
from .state.shared_parameters import Ties

_NO_REGIONS: Mapping[int, Region] = {}
Made = tuple[Any, Awaited, list[int]]  # by a forward: its output, and of the stash inputs and ends


class Stash(NamedTuple):
    """What a stage keeps of one micro-batch from its forward to its backward.

    Attributes:
        inputs: the gradients of its input, for which the stage before waits.
        roots: where gradients of its output enter its graph.
        ends: the number of autograd's next node when each layer had run, to name the layer whose backward fails.
        added: where gradients of losses that its layers have added enter its graph.
    """

    inputs: Awaited
    roots: tuple[GradientEdge, ...]
    ends: tuple[int, ...]
    added: tuple[GradientEdge, ...] = ()


class Guard(Protocol):
    """Sees what a stage's layers make, on the stage's worker."""

    def enter(self, action: Action) -> None:
        """Before an action of the stage."""
        ...

    def received(self, message: Any) -> None:
        """The input of a micro-batch, before its forward."""
        ...

    def made(self, index: int, value: Any) -> None:
        """The output of a layer, by its place in the stage."""
        ...

    def went_back(self, gradients: Iterable[Tensor | None] = ()) -> None:
        """After a backward or a part of it, with the gradients of the stage's input."""
        ...


class Stage:
    """The layers of one stage, the first of which is layer ``first`` of the model. Only its worker calls it.

    With ``guarded``, layers that write into their input get one of their own: somebody may still need the message.
    With ``compiled``, keywords for torch.compile, consecutive layers that only compute are compiled together.

    Attributes:
        repeats: whether the forward that runs is the second of a micro-batch.
        guard: looks for numbers that are not finite, where somebody has asked for that.
    """

    def __init__(
        self,
        index: int,
        ties: Ties,
        first: int,
        device: torch.device,
        where: str,
        guarded: bool = False,
        copied: CopiedLayers | None = None,
        compiled: Mapping[str, Any] | None = None,
    ) -> None:
        self.index = index
        self.first = first
        self.ties = ties
        self.layers = tuple(ties.layers)
        self.device = device
        self.where = where
        self.buffers = Buffers(self.layers)
        self.copied = copied
        self.repeats = False
        self.guard: Guard | None = None
        self._guarded = guarded
        self._modules = [module for _, module in self.layers]
        self._calls: list[Callable[[Any], Any]] = list(self._modules)
        if first == 0:  # the model's first layer may take several arguments
            self._calls[0] = partial(call, self._modules[0])
        self._regions = None if compiled is None else Regions(self._modules, compiled)
        self._input_gradients = InputGradients()
        # Whether a layer draws random numbers, by its place and mode; None until it has run in that mode.
        self._draws: list[list[bool | None]] = [[None, may_draw(module) or None] for module in self._modules]
        # Autograd forbids writing into a leaf, so a stage that does gets its input under an alias. Whether it does
        # is seen at the first micro-batch of each mode, training or not; a flag named `inplace` is believed.
        self._flagged = any(
            getattr(part, "inplace", False) for module in self._modules for part in module.modules()
        )
        self._writes_input: dict[bool, bool] = {}

    def forward(self, message: Any, micro_batch: int, draws: Draws, turn: Turn = Turn.ONLY) -> Made:
        """Runs the layers; returns their output, the input's gradients to come, and where each layer's nodes end."""
        self.repeats = turn is Turn.SECOND
        message = graph_cut.move(message, self.device)
        if self.guard is not None:
            self.guard.received(message)
        ends: list[int] = []
        if not torch.is_grad_enabled():
            awaited = self._input_gradients.await_for(())
            return self.run_layers(message, ends, micro_batch, draws, turn), awaited, ends
        training = self._modules[0].training
        writes = self._writes_input.get(training)
        if self._guarded and writes is not False:
            message = own_copy(message)
        awaited = self._input_gradients.await_for(graph_cut.leaves(message))
        # A hook of a layer's on its input must come before the one that catches the input's gradient.
        if writes is False and not self._flagged and awaited.caught is None:
            return self.run_layers(message, ends, micro_batch, draws, turn), awaited, ends
        versions = [version(tensor) for tensor in tensors(message)] if writes is None else ()
        value = self.run_layers(graph_cut.alias(message), ends, micro_batch, draws, turn)
        if writes is None:
            self._writes_input[training] = versions != [version(tensor) for tensor in tensors(message)]
        return value, awaited, ends

    def backward(self, stash: Stash, gradients: graph_cut.Gradients) -> list[Tensor | None]:
        """Runs the backward of one micro-batch; returns the gradients of its inputs."""
        try:
            graph_cut.backward(stash.roots, graph_cut.move_gradients(gradients, self.device))
        except BaseException as error:
            self._blame(stash, error)
            raise
        found = self._input_gradients.collect(stash.inputs)
        if self.guard is not None:
            self.guard.went_back(found)
        return found

    def backward_inputs(
        self, stash: Stash, gradients: graph_cut.Gradients
    ) -> tuple[list[Tensor | None], WeightGradients]:
        """The first part of it: returns the gradients of its inputs, and those of weights that wait."""
        try:
            waiting = backward_inputs(stash.roots, graph_cut.move_gradients(gradients, self.device))
        except BaseException as error:
            self._blame(stash, error)
            raise
        found = self._input_gradients.collect(stash.inputs)
        if self.guard is not None:
            self.guard.went_back(found)
        return found, waiting

    def backward_weights(self, waiting: WeightGradients) -> None:
        """The second part of it."""
        try:
            waiting.accumulate()
        except BaseException as error:
            owners = self._owners(waiting.computed)
            add_note(error, f"{LAYER}in the backward for the weights of {self.name(owners)}")
            raise
        if self.guard is not None:
            self.guard.went_back()

    def _blame(self, stash: Stash, error: BaseException) -> None:
        add_note(error, f"{LAYER}in the backward of {self.name(self._failed(stash, error))}")

    def _failed(self, stash: Stash, error: BaseException) -> Sequence[int]:
        """The layers that may have failed; those that ran together cannot be told apart."""
        found = failed_layers(stash.ends, [root.node for root in stash.roots], error)
        if not self._regions:
            return found
        own = {stash.ends[index] for index in found if index < len(stash.ends)}
        together = [index for index, end in enumerate(stash.ends) if end in own]
        return together + [index for index in found if index == len(stash.ends)]

    def run_layers(self, value: Any, ends: list[int], micro_batch: int, draws: Draws, turn: Turn) -> Any:
        running: Sequence[int] = ()
        try:
            if self._regions is None and self.guard is None:
                for index, module in enumerate(self._modules):
                    running = (index,)
                    if self._draws[index][module.training] is False:
                        value = self._calls[index](value)
                    else:
                        value = self._run_one(index, value, micro_batch, draws, turn)
                    ends.append(_get_sequence_nr())
                return value
            together = self._regions if self.guard is None else None
            regions = together.of_run(draws) if together else _NO_REGIONS
            while (index := len(ends)) < len(self._modules):
                region = None if type(value) is Arguments else regions.get(index)
                running = region.places if region else (index,)
                value = region.run(value) if region else self._run_one(index, value, micro_batch, draws, turn)
                ends.extend([_get_sequence_nr()] * len(running))
                if self.guard is not None:
                    self.guard.made(index, value)
        except BaseException as error:
            which = "second forward" if turn is Turn.SECOND else "forward"
            add_note(error, f"{LAYER}in the {which} of {self.name(running)}")
            raise
        return value

    def _run_one(self, index: int, value: Any, micro_batch: int, draws: Draws, turn: Turn) -> Any:
        module = self._modules[index]
        before = added_so_far() if self._regions else 0
        drew = False
        known = self._draws[index]
        several = type(value) is Arguments
        if known[module.training] is False:
            value = self._calls[index](value)
        else:
            with draws.of(self.first + index, micro_batch, turn) as own:
                value = self._calls[index](value)
            drew = own.used
            if known[module.training] is None:
                known[module.training] = drew
        if self._regions:
            self._regions.note(index, plain=not (drew or several) and added_so_far() == before)
        return value

    def _owners(self, parameters: Sequence[nn.Parameter]) -> Sequence[int]:
        """The layers that have any of them; all layers if it is none's, as where a function holds it."""
        own = {id(parameter) for parameter in parameters}
        found = [
            index
            for index, module in enumerate(self._modules)
            if not own.isdisjoint(map(id, module.parameters()))
        ]
        return found or range(len(self._modules))

    def name(self, indices: Sequence[int]) -> str:
        """Layers by their places in the stage; behind the last is the loss."""
        named = [f"layer {name!r} ({type(module).__name__})" for name, module in self.layers]
        return " or ".join([*named, "the loss"][index] for index in indices)
