"""A stage: consecutive layers of the model on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..autograd import graph_cut
from ..autograd.in_place import overlaps, version, written
from ..autograd.own_copy import own_copy, tensors
from ..capture import reads_values
from ..data.arguments import call
from ..loss import added_so_far
from .compiled import Regions, RunLayers, single_layers
from .failure.notes import LAYER, add_note
from .replay.buffers import Buffers
from .replay.randomness import ForwardPass, KeyedLayers, RngKeys
from .state.replicas import Replica
from .state.shared_parameters import SharedParameters

_requires_grad = attrgetter("requires_grad")


# The input of one forward, and where its gradients will be: the tensors that require a gradient, and the gradient that
# was caught for each; None if its `grad` is used.
#
# A leaf's `grad` has the layout of the leaf. If the gradient has another layout, `grad` is a copy, and the previous
# stage would sum the copy in another order than the plain model does. So nodes between the leaves and the layers catch
# the gradients, until gradients of an input of this shape are known to have its layout. Two leaves that are added have
# one gradient, of which `grad` is a copy as well: they are always caught, so that each step sends the same form.
Entered = tuple[tuple[Tensor, ...], list[Tensor | None] | None]


class Stage:
    """The layers of one stage. Only the stage's worker calls it.

    Args:
        index: the stage's number in the schedule.
        shared: the layers, and the parameters that they share with other stages.
        first: the position of the first layer in the model.
        device: the torch device.
        where: the device's name.
        guarded: whether layers that write into their input get a copy, because a second forward may need the input.
        compiled: keywords for torch.compile; consecutive layers that only compute are then compiled together.

    Attributes:
        replica: the layers, if they are those of a further replica of the model.
    """

    def __init__(
        self,
        index: int,
        shared: SharedParameters,
        first: int,
        device: torch.device,
        where: str,
        guarded: bool = False,
        compiled: Mapping[str, Any] | None = None,
    ) -> None:
        self.index = index
        self.first = first
        self.shared = shared
        self.layers = tuple(shared.layers)
        self.device = device
        self.where = where
        self.buffers = Buffers(self.layers)
        self.replica = shared if isinstance(shared, Replica) else None
        self._guarded = guarded
        self._modules = [module for _, module in self.layers]
        calls: list[RunLayers] = list(self._modules)
        if first == 0:  # the model's first layer may take several arguments
            calls[0] = partial(call, self._modules[0])
        self._program = single_layers(calls)
        self._regions = None if compiled is None else Regions(self._modules, self._program, compiled)
        self._keyed = KeyedLayers(self._modules, first, device)
        # Autograd forbids writing into a leaf, so a stage that does gets its input under an alias. Whether it does
        # is seen at the first micro-batch of each mode, training or not; a flag named `inplace` is believed.
        self._flagged = any(
            getattr(part, "inplace", False) for module in self._modules for part in module.modules()
        )
        self._writes_input: dict[bool, bool] = {}
        self._layouts: set[Any] = set()  # of inputs whose gradients have the same
        self._may_cast = not self._keyed.all_of_torch  # under autocast within a layer

    def run(
        self, message: Any, micro_batch: int, keys: RngKeys, which: ForwardPass = ForwardPass.ONLY
    ) -> tuple[Any, bool, Entered]:
        """Run the layers on the input of one micro-batch.

        Returns:
            The output, whether a second forward draws the same random numbers, and where the gradients of the input
            will be.
        """
        message, parts = graph_cut.received(message, self.device)
        if which is ForwardPass.FIRST:
            message = graph_cut.fresh_leaves(message)
            parts = tensors(message)
        training = self._modules[0].training
        writes = self._writes_input.get(training)
        is_data = writes is False and len(parts) == 1 and not parts[0].requires_grad
        if is_data or not torch.is_grad_enabled():
            return (*self._run_layers(message, micro_batch, keys, which), ((), None))
        if self._guarded and writes is not False:
            message = own_copy(message)
            parts = tensors(message)
        pairs = overlaps(parts) if len(parts) > 1 else ()
        leaves = tuple(filter(_requires_grad, parts))
        caught: list[Tensor | None] | None = None
        if not leaves:
            arguments = message
        elif writes is not False or self._flagged or pairs or _layout(leaves) not in self._layouts:
            places: list[Tensor | None] = [None] * len(leaves)
            arguments, caught = graph_cut.catching(message, places), places
        elif self._may_cast or torch.is_autocast_enabled(self.device.type):
            arguments = graph_cut.views(message)
        else:
            arguments = message
        versions = [version(part) for part in parts] if writes is None else ()
        output, repeatable = self._run_layers(arguments, micro_batch, keys, which)
        if pairs and written(pairs):
            raise RuntimeError(
                f"{self.name(range(len(self._modules)))} writes in place into a tensor of the stage's input that "
                "shares memory with another one. Autograd does not see such a write across the border of two stages, "
                "so gradients would be wrong. Put the layer that makes the view into the same stage "
                "(pipepart.plan(..., colocate=...)), or have it return view.clone()"
            )
        if writes is None:
            self._writes_input[training] = versions != [version(part) for part in parts]
        return output, repeatable, (leaves, caught)

    def caught_gradients(self, leaves: Sequence[Tensor], caught: list[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients that were caught for an input, and remember it if `grad` would be the same tensors."""
        pairs = zip(leaves, caught, strict=True)
        memories = {gradient.untyped_storage()._cdata for gradient in caught if type(gradient) is Tensor}
        if len(memories) == len(leaves) and all(
            gradient is not None and gradient.stride() == leaf.stride() for leaf, gradient in pairs
        ):
            self._layouts.add(_layout(leaves))
        return caught

    def begin(self) -> None:
        """Prepare for a step: look at modes and hooks of the layers, which the caller may have changed."""
        self._keyed.begin()
        if self._regions is not None:
            self._program = self._regions.program(self._keyed.unkeyed)

    def finish(self) -> None:
        """Called after a step, when no worker runs."""
        self._keyed.finish()

    def _run_layers(
        self, value: Any, micro_batch: int, keys: RngKeys, which: ForwardPass
    ) -> tuple[Any, bool]:
        """Run the layers in order; return the output and whether a second forward draws the same random numbers."""
        keyed, part = self._keyed, self._program[0]
        try:
            if which is ForwardPass.ONLY and keyed.all_unkeyed:  # most forwards, which only call the layers
                for part in self._program:
                    value = part.run(value)
                return value, True
            unkeyed = keyed.unkeyed if which is ForwardPass.ONLY else keyed.never
            regions = self._regions
            states = keyed.generator_states() if regions is not None and which is ForwardPass.FIRST else None
            repeatable = True
            for part in self._program:
                index, _, run_layers, is_compiled = part
                if is_compiled or unkeyed[index]:
                    value = run_layers(value)
                    continue
                added, entered = added_so_far(), value
                with keyed.drawing(index, micro_batch, keys) as draws:
                    value = run_layers(value)
                repeatable = repeatable and draws.repeatable
                if regions is not None and (
                    added_so_far() != added or reads_values(self._modules[index], entered)
                ):
                    regions.unfit.add(index)
            if states is not None and keyed.generator_states() != states:
                repeatable = False  # a compiled layer has begun to draw
            return value, repeatable
        except BaseException as error:
            name = "second forward" if which is ForwardPass.SECOND else "forward"
            add_note(error, f"{LAYER}in the {name} of {self.name(range(part.start, part.end))}")
            raise

    def name(self, indices: Sequence[int]) -> str:
        """Name layers by their positions in the stage."""
        named = [f"layer {name!r} ({type(module).__name__})" for name, module in self.layers]
        return " or ".join(named[index] for index in indices)


def _layout(leaves: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple([(leaf.shape, leaf.stride()) for leaf in leaves])
