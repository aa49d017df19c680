"""One stage during one step: runs its forwards and backwards, and keeps what each micro-batch in flight needs.

::

    whole forward     F: layers, graph kept ──────────────────────────▶ B: graph                 stashes
    recompute         F: layers, graph dropped ─▶ RECOMPUTE: layers ──▶ B: graph                 inputs, then stashes
    offload           F: layers, graph kept ─▶ OFFLOAD: to the host ─▶ RELOAD: back ─▶ B: graph  stashes
    split backward    F ─────────────────────────▶ I: graph, to the inputs ─▶ W: to the weights  stashes, then deferred

With recompute, both forwards run with gradients enabled and in the caller's autocast, so that layers that query these
modes behave equally. The loss runs once, after the second forward of the last stage. A forward that cannot be repeated
keeps its graph: one that wrote into its input, wrote a buffer unexpectedly, or has compiled layers that drew random
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from ..autograd import graph_cut
from ..autograd.in_place import check_not_overwritten, version
from ..autograd.nests import check_nest
from ..autograd.own_copy import tensors
from ..autograd.split_backward import WeightGradients, backward_inputs
from ..capture import state_of
from ..loss import Added, AddedLosses
from ..workers.modes import Modes
from .failure.notes import LAYER, add_note
from .offload import CopyQueue, SavedTensors, storages_of
from .order import Order
from .replay.buffers import Values
from .replay.randomness import ForwardPass, RngKeys
from .sinks import LossSink
from .stage import Entered, Stage
from .state.replicas import Gradients, add_gradients
from .state.weight_versions import Versions
from .step_gradients import scale_gradients

_NOTHING = nullcontext()
_grad = attrgetter("grad")
_CPU_QUEUE = CopyQueue()


@dataclass(slots=True)
class Stash:
    """The graph of one micro-batch, kept from its forward to its backward.

    Attributes:
        entered: the stage's input, and where its gradients will be.
        roots: where gradients of its output enter its graph.
        added: where gradients of losses that its layers added enter its graph.
        saved: what autograd saved for it, if that is offloaded.
    """

    entered: Entered
    roots: tuple[GradientEdge, ...]
    added: tuple[GradientEdge, ...] = ()
    saved: SavedTensors | None = None


class KeptInput(NamedTuple):
    """The input of one micro-batch, kept between its two forwards.

    Attributes:
        message: its input.
        versions: version counters of the input's tensors, to detect writes by another stage.
        buffers: values before the first forward of the buffers that it wrote.
        roots: number of output tensors that required a gradient; None if the output was not handed over.
    """

    message: Any
    versions: tuple[int, ...]
    buffers: Values
    roots: int | None = None


class StageRun:
    """One stage during one step. Called on the stage's worker.

    Args:
        stage: the layers.
        order: the actions of the step.
        keys: the random numbers of the step.
        modes: of the caller.
        sink: takes the losses that layers add, and the output of a last stage.
        added: collects the losses that layers add on the stage's worker.
        optimizers: of the stages of the model, which step within the step; empty if they do not. In one process they
            are the first replica's.
        queue: copies to the host and back, if any stage offloads.

    Attributes:
        stashes: by micro-batch, from the forward that keeps its graph to the backward.
        inputs: by micro-batch, from the first forward to the second.
        deferred: by micro-batch, from I to W.
        is_last: whether it is the last stage of the model, or of a replica.
        offloads: whether it keeps saved tensors on the host.
        versions: the stage's weights, if the schedule changes them within the step.
    """

    def __init__(
        self,
        stage: Stage,
        order: Order,
        keys: RngKeys,
        modes: Modes,
        sink: LossSink,
        added: AddedLosses,
        optimizers: Sequence[Optimizer | None] = (),
        queue: CopyQueue = _CPU_QUEUE,
    ) -> None:
        self.index = number = stage.index
        self.stage = stage
        self.is_last = order.schedule.next_stage(number) is None
        self.routes = stage.shared.refresh()
        self.stashes: dict[int, Stash] = {}
        self.inputs: dict[int, KeptInput] = {}
        self.deferred: dict[int, WeightGradients] = {}
        self._keys = keys
        self._modes = modes
        self._sink = sink
        is_stepped = optimizers and stage.replica is None
        self._optimizer = optimizer = optimizers[number % len(optimizers)] if is_stepped else None
        self.versions = Versions(order.schedule, number, optimizer) if order.schedule.versions else None
        self._repeated = order.repeated[number] if modes.grad else frozenset()
        self._offloaded = order.offloaded[number] if modes.grad else frozenset()
        self.offloads = bool(self._offloaded)
        if self.offloads:
            self._queue = queue
            self._state = storages_of(tensor for _, layer in stage.layers for tensor in state_of(layer))
        self._is_on_cpu = stage.device.type == "cpu"
        self._added = added
        stage.begin()

    @property
    def forward(self) -> Callable[[int, Any], Any]:
        """F: run the layers; return the message for the next stage, None from the last."""
        return self._forward_in_contexts if self._modes.autocast or self.offloads else self._forward

    def _forward_in_contexts(self, micro_batch: int, message: Any) -> Any:
        saved = None
        if micro_batch in self._offloaded:
            message = graph_cut.move(message, self.stage.device)
            staying = self._state | storages_of(tensors(message))
            saved = SavedTensors(self._queue, self.stage.device, staying)
        with self._modes.autocasting(), saved.packing() if saved else _NOTHING:
            return self._forward(micro_batch, message, saved)

    def _forward(self, micro_batch: int, message: Any, saved: SavedTensors | None = None) -> Any:
        added = self._added
        if added.found:
            added.taken()  # those of a backward, as of a checkpointed layer that runs again
        kept = None
        if micro_batch in self._repeated:
            output, entered, kept = self._repeatable_forward(micro_batch, message)
        else:
            output, _, entered = self.stage.run(message, micro_batch, self._keys)
        losses = added.taken() if added.found else ()
        if kept and self.is_last and self._sink.can_wait and graph_cut.leaves(output):
            self.inputs[micro_batch] = kept
            return None
        message, stash = self._pass_on(micro_batch, output, entered, losses, saved)
        if kept and stash.roots:
            self.inputs[micro_batch] = kept._replace(roots=len(stash.roots))
        elif self._modes.grad:
            self.stashes[micro_batch] = stash
        return message

    def saved_of(self, micro_batch: int) -> SavedTensors | None:
        """Return what autograd saved for a micro-batch, if that is offloaded."""
        stash = self.stashes.get(micro_batch)
        return None if stash is None else stash.saved

    def offload(self, micro_batch: int, _: None = None) -> None:
        """OFFLOAD: free what is on the host now."""
        if (saved := self.saved_of(micro_batch)) is not None:
            saved.leave()

    def reload(self, micro_batch: int, _: None = None) -> None:
        """RELOAD: begin to copy it back."""
        if (saved := self.saved_of(micro_batch)) is not None:
            saved.start_back()

    def recompute(self, micro_batch: int, _: None = None) -> None:
        """RECOMPUTE: run the layers again, for the graph that the backward needs.

        Raises:
            RuntimeError: another stage has overwritten the input, or the second forward differs from the first.
        """
        kept = self.inputs.pop(micro_batch, None)
        if kept is None:
            return
        check_not_overwritten(tensors(kept.message))
        if _versions(kept.message) != kept.versions:
            raise RuntimeError(
                "a layer behind this stage has written over the stage's input, which its second forward needs: take "
                "that layer's inplace=True away, or plan with recompute='never'"
            )
        with torch.enable_grad(), self._modes.autocasting():
            self._added.taken()
            with self.stage.buffers.replaced(kept.buffers):
                output, _repeatable, entered = self.stage.run(
                    kept.message, micro_batch, self._keys, ForwardPass.SECOND
                )
            _, stash = self._pass_on(micro_batch, output, entered, self._added.taken())
        if kept.roots is not None and len(stash.roots) != kept.roots:
            raise RuntimeError(
                f"the second forward made {len(stash.roots)} tensors that ask for a gradient, the first "
                f"{kept.roots}: recompute wants layers that do the same twice; plan with recompute='never'"
            )
        self.stashes[micro_batch] = stash

    def backward(
        self, micro_batch: int, gradients: graph_cut.Gradients, defers_weights: bool = False
    ) -> graph_cut.Gradients:
        """B: run the backward from the gradients of the output; return the gradients of the input."""
        stash = self.stashes.pop(micro_batch)
        if stash.saved is not None:
            stash.saved.return_()
        roots = stash.roots + stash.added
        gradients = graph_cut.move_gradients(gradients, self.stage.device)
        if defers_weights:
            self.deferred[micro_batch] = backward_inputs(roots, gradients)
        else:
            graph_cut.backward(roots, gradients, here=self._is_on_cpu)
        leaves, caught = stash.entered
        return list(map(_grad, leaves)) if caught is None else self.stage.caught_gradients(leaves, caught)

    def backward_inputs(self, micro_batch: int, gradients: graph_cut.Gradients) -> graph_cut.Gradients:
        """I: run the backward without the deferred weight gradients; return the gradients of the input."""
        return self.backward(micro_batch, gradients, defers_weights=True)

    def backward_weights(self, micro_batch: int, _: None = None) -> None:
        """W: compute the deferred weight gradients."""
        self.deferred.pop(micro_batch).accumulate()

    def reduce(self, _: None, arrived: Sequence[Gradients]) -> Any:
        """REDUCE_GRAD: a replica returns its gradients; the first replica adds up those of the others in order."""
        if replica := self.stage.replica:
            return replica.hand_over()
        for gradients in arrived:
            add_gradients(self.stage.shared.originals, gradients)
        return None

    def update(self, _: None = None, __: None = None) -> None:
        """OPT_STEP: the stage's optimizer steps; the stages of further replicas have none."""
        try:
            if self.versions:
                self.versions.step()
            elif self._optimizer is not None:
                if (factor := self._sink.correction()) != 1.0:
                    groups = self._optimizer.param_groups
                    scale_gradients((leaf for group in groups for leaf in group["params"]), factor)
                self._optimizer.step()
        except BaseException as error:
            add_note(error, f"{LAYER}in the step of its optimizer ({type(self._optimizer).__name__})")
            raise

    def settle(self) -> None:
        """Called after the last action, also of a failed step: the parameters hold the newest weights again."""
        if self.versions:
            self.versions.settle()

    def finish(self) -> None:
        """Called after the last forward: take over what the forwards have set, and check what they must not write."""
        self.stage.shared.finish()

    def add_root(self, micro_batch: int, tensor: Tensor) -> None:
        """Have the backward of a micro-batch start at one more tensor."""
        self.stashes[micro_batch].added += graph_cut.roots(tensor)

    def forget(self) -> None:
        """Release all tensors of a step that has failed, with the gradients that a replica has not handed over."""
        for held in (self.stashes, self.inputs, self.deferred):
            held.clear()
        if replica := self.stage.replica:
            replica.hand_over()

    def _repeatable_forward(self, micro_batch: int, message: Any) -> tuple[Any, Entered, KeptInput | None]:
        """Run the layers; the last value is None if they cannot be run a second time."""
        message = graph_cut.move(message, self.stage.device)
        versions = _versions(message)
        noted = self.stage.buffers.note()
        output, repeatable, entered = self.stage.run(message, micro_batch, self._keys, ForwardPass.FIRST)
        buffers = self.stage.buffers.values(noted)
        if buffers is None or not repeatable or _versions(message) != versions:
            return output, entered, None
        return output, entered, KeptInput(message, versions, buffers)

    def _pass_on(
        self,
        micro_batch: int,
        output: Any,
        entered: Entered,
        losses: Sequence[Added],
        saved: SavedTensors | None = None,
    ) -> tuple[Any, Stash]:
        """Return the message for the next stage, or hand the output over; and what the backward needs."""
        added = self._sink.receive_added(self.index, micro_batch, losses) if losses else ()
        if self.is_last:
            with self._sink.receiving:
                message, roots = None, self._sink.receive(micro_batch, output)
        else:
            if type(output) is not Tensor:
                check_nest(output, "the output of a stage", "return its tensors themselves")
            message, roots = graph_cut.cut(output)
        return message, Stash(entered, roots, added, saved)


def _versions(message: Any) -> tuple[int, ...]:
    return tuple(version(tensor) for tensor in tensors(message))
