"""A stage: consecutive layers of the model on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..autograd import graph_cut
from ..autograd.in_place import check_not_overwritten, overlaps, version, written
from ..autograd.own_copy import own_copy, tensors
from ..capture import reads_values
from ..data.arguments import Arguments, call
from ..loss import added_so_far
from .compiled import Region, Regions
from .failure.nonfinite import StageGuard
from .failure.notes import LAYER, add_note
from .input_gradients import Awaited, InputGradients
from .replay.buffers import Buffers
from .replay.randomness import ForwardPass, KeyedLayers, RngKeys
from .state.replicas import Replica
from .state.shared_parameters import SharedParameters

_NO_REGIONS: Mapping[int, Region] = {}


class Made(NamedTuple):
    """What a forward returns.

    Attributes:
        output: of the last layer.
        repeatable: whether a second forward draws the same random numbers.
        inputs: where the gradients of the stage's input will be.
    """

    output: Any
    repeatable: bool
    inputs: Awaited


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
        repeats: whether the forward that is running is the second one of its micro-batch.
        guard: set to check the numbers that the layers make.
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
        self.repeats = False
        self.guard: StageGuard | None = None
        self._guarded = guarded
        self._modules = [module for _, module in self.layers]
        self._calls: list[Callable[[Any], Any]] = list(self._modules)
        if first == 0:  # the model's first layer may take several arguments
            self._calls[0] = partial(call, self._modules[0])
        self._regions = None if compiled is None else Regions(self._modules, compiled)
        self.input_gradients = InputGradients()
        self._keyed = KeyedLayers(self._modules, first, device)
        # Autograd forbids writing into a leaf, so a stage that does gets its input under an alias. Whether it does
        # is seen at the first micro-batch of each mode, training or not; a flag named `inplace` is believed.
        self._flagged = any(
            getattr(part, "inplace", False) for module in self._modules for part in module.modules()
        )
        self._writes_input: dict[bool, bool] = {}

    def run(
        self, message: Any, micro_batch: int, keys: RngKeys, which: ForwardPass = ForwardPass.ONLY
    ) -> Made:
        """Run the layers on the input of one micro-batch."""
        self.repeats = which is ForwardPass.SECOND
        parts = tensors(message)
        check_not_overwritten(parts)
        if graph_cut.emulated.bring is not None or any(part.device != self.device for part in parts):
            message = graph_cut.move(message, self.device)
            parts = tensors(message)
        if self.guard is not None:
            self.guard.received(micro_batch, message)
        if which is ForwardPass.FIRST:
            message = graph_cut.fresh_leaves(message)
            parts = tensors(message)
        if not torch.is_grad_enabled():
            return Made(*self.run_layers(message, micro_batch, keys, which), Awaited((), None))
        training = self._modules[0].training
        writes = self._writes_input.get(training)
        if self._guarded and writes is not False:
            message = own_copy(message)
            parts = tensors(message)
        awaited = self.input_gradients.await_for(tuple([part for part in parts if part.requires_grad]))
        pairs = overlaps(parts)
        if awaited.caught is not None:
            given = graph_cut.catching(message, awaited.caught)
        elif not awaited.leaves:
            given = message
        elif writes is not False or self._flagged or pairs:
            given = graph_cut.alias(message)
        else:
            given = graph_cut.views(message)
        versions = [version(part) for part in parts] if writes is None else ()
        made = Made(*self.run_layers(given, micro_batch, keys, which), awaited)
        if pairs and written(pairs):
            raise RuntimeError(
                f"{self.name(range(len(self._modules)))} writes in place into a tensor of the stage's input that "
                "shares memory with another one. Autograd does not see such a write across the border of two stages, "
                "so gradients would be wrong. Put the layer that makes the view into the same stage "
                "(pipepart.plan(..., colocate=...)), or have it return view.clone()"
            )
        if writes is None:
            self._writes_input[training] = versions != [version(part) for part in parts]
        return made

    def begin(self) -> None:
        """Prepare for a step: look at modes and hooks of the layers, which the caller may have changed."""
        self._keyed.begin()
        if self._regions is not None:
            self._regions.begin()

    def finish(self) -> None:
        """Called after a step, when no worker runs."""
        self._keyed.finish()

    def run_layers(self, value: Any, micro_batch: int, keys: RngKeys, which: ForwardPass) -> tuple[Any, bool]:
        """Run the layers in order; return the first two fields of :class:`Made`."""
        running: Sequence[int] = ()
        repeatable = True
        try:
            if self._regions is not None or self.guard is not None:
                regions = _NO_REGIONS if self._regions is None or self.guard else self._regions.current
                while (index := running[-1] + 1 if running else 0) < len(self._modules):
                    region = None if type(value) is Arguments else regions.get(index)
                    running = region.places if region else (index,)
                    if region is None:
                        value, same = self._run_one(index, value, micro_batch, keys, which)
                    else:
                        value, same = self._run_region(region, value)
                    repeatable = repeatable and same
                    if self.guard is not None:
                        self.guard.made(micro_batch, index, value)
                return value, repeatable
            unkeyed = self._keyed.unkeyed(which)
            for index, run_layer in enumerate(self._calls):
                running = (index,)
                if unkeyed[index]:
                    value = run_layer(value)
                else:
                    with self._keyed.drawing(index, micro_batch, keys) as draws:
                        value = run_layer(value)
                    repeatable = repeatable and draws.repeatable
        except BaseException as error:
            name = "second forward" if which is ForwardPass.SECOND else "forward"
            add_note(error, f"{LAYER}in the {name} of {self.name(running)}")
            raise
        return value, repeatable

    def _run_one(
        self, index: int, value: Any, micro_batch: int, keys: RngKeys, which: ForwardPass
    ) -> tuple[Any, bool]:
        """Run a layer by itself, and note whether it may be compiled with its neighbours.

        Returns:
            Its output, and whether a second forward draws the same random numbers.
        """
        before = added_so_far() if self._regions else 0
        drew, repeatable = False, True
        alone = type(value) is Arguments or (self._regions and reads_values(self._modules[index], value))
        if self._keyed.unkeyed(which)[index]:
            value = self._calls[index](value)
        else:
            with self._keyed.drawing(index, micro_batch, keys) as draws:
                value = self._calls[index](value)
            drew, repeatable = draws.used, draws.repeatable
        if self._regions:
            self._regions.note(index, plain=not (drew or alone) and added_so_far() == before)
        return value, repeatable

    def _run_region(self, region: Region, value: Any) -> tuple[Any, bool]:
        """Run compiled layers; if one of them has begun to draw random numbers, they are run one by one again."""
        before = self._keyed.generator_states()
        value = region.run(value)
        if self._keyed.generator_states() == before:
            return value, True
        assert self._regions is not None
        for index in region.places:
            self._regions.note(index, plain=False)
        self._keyed.look_again()
        return value, False

    def name(self, indices: Sequence[int]) -> str:
        """Name layers by their positions in the stage."""
        named = [f"layer {name!r} ({type(module).__name__})" for name, module in self.layers]
        return " or ".join(named[index] for index in indices)
