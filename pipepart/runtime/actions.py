"""What each kind of action does, from the message that it takes to the one that it passes on.

::

    worker of device 0                   worker of device 1
    F(0, 3) ── message under (F, 1, 3) ──▶ take, F(1, 3), loss
    take, B(0, 3) ◀── gradients under (B, 0, 3) ── B(1, 3)

A message is keyed by the action that takes it. A stash goes in at F and out at B, by the same worker; where the forward
runs twice, what that needs goes in at F and is exchanged for the stash at RECOMPUTE; where the backward is split, the
stash goes out at I and what the gradients of the weights need goes in, to go out at W. Where stages have optimizers,
these step at OPT_STEP. Nothing else is shared between workers.

An action takes what it needs, and waits for it; computes; and sends what others need. What is watched is the second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from schedules import Action, Kind

from ..autograd import graph_cut
from ..autograd.own_copy import tensors
from ..autograd.split_backward import WeightGradients
from ..loss import Added, losses_of_stage
from ..workers.modes import Modes
from .all_losses import AllLosses
from .emulation import DeviceEmulation
from .failure.notes import LAYER, PLACE, add_note
from .loss_sink import End
from .observe.recorder import Parts, Watch, WatchedTransport
from .order import Order
from .replay.randomness import Draws
from .replay.recompute import Kept, first_forward, second_forward
from .stage import Made, Stage, Stash
from .state.replicas import CopiedLayers
from .state.weight_versions import Versions
from .transport.base import Stopped, Transport
from .transport.cuda import Streams, StreamTransport
from .transport.threads import ThreadTransport


class Held(NamedTuple):
    """What a stage keeps, in micro-batches: stashes, inputs of second forwards, what gradients of weights need."""

    stashes: int
    inputs: int
    weights: int


class Actions:
    """The actions of one run, and what they leave for each other. Each is done by the worker of its device.

    Args:
        order: what each device does.
        stages: all stages.
        inputs: the first stage's input for each micro-batch.
        end: what the last stage's outputs go to.
        forward: those of the run whose stashes this one goes backward through, for one that has no forwards.
        optimizers: of the stages, for an order that has their steps.
        watch: sees what each action computes, and each message; None for nobody.
        streams: of the workers, where they have any.
        emulation: of virtual devices, if any of them is emulated.

    Attributes:
        modes: the caller's, for the workers.
        input_gradients: of each micro-batch's input.
    """

    def __init__(
        self,
        order: Order,
        stages: Sequence[Stage],
        inputs: Sequence[Any],
        end: End,
        forward: Actions | None = None,
        optimizers: Sequence[Optimizer | None] = (),
        watch: Watch | None = None,
        streams: Streams | None = None,
        emulation: DeviceEmulation | None = None,
    ) -> None:
        self.schedule = schedule = order.schedule
        self.modes = Modes.current()
        transport: Transport = ThreadTransport(schedule)
        if streams is not None:
            arrivals = watch.recorder.arrivals if watch and watch.recorder else None
            transport = StreamTransport(transport, schedule, streams, arrivals)
        self._parts = _PARTS
        if emulation is not None:
            transport = emulation.transport(transport, schedule)
            self._parts = {
                kind: (take, _emulated(emulation, kind, compute), send)
                for kind, (take, compute, send) in self._parts.items()
            }
        if watch is not None:
            self._parts = watch.parts(self._parts)
            transport = WatchedTransport(transport, schedule, watch)
        self.transport = transport
        self.draws = forward.draws if forward else Draws()
        self.input_gradients: list[graph_cut.Gradients] = [()] * schedule.micro_batches
        self._stages = stages
        self._inputs = inputs
        self._end = end
        self._has_forwards = forward is None
        self._forward_modes = forward._forward_modes if forward else self.modes
        self._stashes: list[dict[int, Stash]] = forward._stashes if forward else [{} for _ in stages]
        self._kept: list[dict[int, Kept]] = forward._kept if forward else [{} for _ in stages]
        self._waiting: list[dict[int, WeightGradients]] = [{} for _ in stages]
        for stage in stages:
            if stage.copied:
                stage.copied.begin(self._has_forwards, self.modes.grad)
        self._links = forward._links if forward else [stage.ties.refresh() for stage in stages]
        if emulation is not None:
            emulation.begin(optimizers)
        self._repeated = order.repeated if self.modes.grad else frozenset()
        self._is_first = [schedule.previous_stage(stage) is None for stage in range(schedule.stages)]
        self._is_last = [schedule.next_stage(stage) is None for stage in range(schedule.stages)]
        self._optimizers = optimizers
        self._versions = [
            Versions(schedule, stage, optimizer)
            for stage, optimizer in enumerate(optimizers)
            if schedule.versions
        ]
        self._added = [losses_of_stage() for _ in stages]
        self._at_the_end = threading.Lock()  # last stages of several copies share the end
        self._all_losses = AllLosses(schedule, self.transport) if schedule.replicas > 1 else None

    def do(self, action: Action) -> None:
        """Does one action.

        Raises:
            Stopped: the run has failed elsewhere.
            BaseException: what went wrong, with a note that names the action.
        """
        kind, stage, micro_batch, _ = action
        guard = self._stages[stage].guard
        try:
            if guard is not None:
                guard.enter(action)
            if self._versions and micro_batch is not None and kind is not Kind.OPT_STEP:
                with self._versions[stage].used(micro_batch):
                    self._do(kind, stage, micro_batch)
            else:
                self._do(kind, stage, -1 if micro_batch is None else micro_batch)
        except Stopped:
            raise
        except BaseException as error:
            add_note(error, self._place(action))
            raise

    def settle(self, device: int) -> None:
        """Behind the last action of a device, or a failure."""
        for stage in self.schedule.stages_of(device) if self._versions else ():
            self._versions[stage].settle()

    def finish(self, device: int) -> None:
        """Behind the last action of a device, if nothing has failed."""
        for stage, home in zip(self._stages, self.schedule.device_of, strict=True):
            if home == device and self._has_forwards:
                stage.ties.finish()
                if stage.copied:
                    stage.copied.finish()

    def left(self) -> list[Action]:
        """The backwards that wait to be done, one micro-batch after the other."""
        stages = range(len(self._stages))[::-1]
        found = [
            Action(kind, stage, micro_batch)
            for micro_batch in range(self.schedule.micro_batches)
            for stage in stages
            if micro_batch in self._stashes[stage] or micro_batch in self._kept[stage]
            for kind in (Kind.RECOMPUTE, Kind.B)
        ]
        if self.schedule.replicas > 1:
            found += [Action(Kind.REDUCE_GRAD, stage) for stage in stages]
        return found

    def held(self) -> list[Held]:
        """What each stage keeps at present."""
        stages = zip(self._stashes, self._kept, self._waiting, strict=True)
        return [Held(*map(len, kept)) for kept in stages]

    def forget(self) -> None:
        """Lets go of all tensors."""
        for held in (*self._stashes, *self._kept, *self._waiting):
            held.clear()
        self._inputs = ()
        self.input_gradients.clear()
        self.transport.stop()

    def kept_on(self, device: int) -> Iterator[Tensor]:
        """What the stages of a device keep beside what autograd does."""
        for stage in self.schedule.stages_of(device):
            for stash in self._stashes[stage].values():
                yield from stash.inputs.leaves
            for kept in self._kept[stage].values():
                yield from tensors(kept.message)
            for waiting in self._waiting[stage].values():
                yield from waiting.tensors()

    def _do(self, kind: Kind, stage: int, number: int) -> None:
        take, compute, send = self._parts[kind]
        send(self, stage, number, compute(self, stage, number, take(self, stage, number)))

    def _take_nothing(self, stage: int, micro_batch: int) -> None:
        """The stage has it all."""

    def _send_nothing(self, stage: int, micro_batch: int, made: Any) -> None:
        """What is made stays in the stage."""

    def _take_input(self, stage: int, micro_batch: int) -> Any:
        if self._is_first[stage]:
            return self._inputs[micro_batch]
        return self.transport.recv(stage, (Kind.F, stage, micro_batch))

    def _forward(self, stage: int, micro_batch: int, message: Any) -> Any:
        """F: runs the layers on the input; returns the message for the next stage."""
        again = self._repeated and (stage, micro_batch) in self._repeated
        run = self._run_first if again else self._run_only
        if not self.modes.autocast:
            return run(stage, micro_batch, message)
        with self.modes.autocasting():
            return run(stage, micro_batch, message)

    def _send_output(self, stage: int, micro_batch: int, message: Any) -> None:
        if not self._is_last[stage]:
            self.transport.send(stage, stage + 1, (Kind.F, stage + 1, micro_batch), message)

    def _run_only(self, stage: int, micro_batch: int, message: Any) -> Any:
        """A forward that runs once: its graph waits for the backward."""
        with self._added[stage] as added:
            made = self._stages[stage].forward(message, micro_batch, self.draws)
        message, stash = self._pass_on(stage, micro_batch, made, added.taken())
        if self.modes.grad:
            self._stashes[stage][micro_batch] = stash
        return message

    def _run_first(self, stage: int, micro_batch: int, message: Any) -> Any:
        """A forward that runs again before its backward: its graph ends here."""
        with self._added[stage] as added:
            made, kept = first_forward(self._stages[stage], message, micro_batch, self.draws)
        losses = added.taken()
        if kept is not None and self._is_last[stage] and self._end.can_wait and graph_cut.leaves(made[0]):
            self._kept[stage][micro_batch] = kept
            return None
        message, stash = self._pass_on(stage, micro_batch, made, losses)
        if kept is not None and stash.roots:
            self._kept[stage][micro_batch] = kept._replace(roots=len(stash.roots))
        else:
            self._stashes[stage][micro_batch] = stash
        return message

    def _run_second(self, stage: int, micro_batch: int, _: None) -> None:
        """RECOMPUTE: runs a forward again, for the graph that its backward needs."""
        kept = self._kept[stage].pop(micro_batch, None)
        if kept is not None:
            with torch.enable_grad(), self._forward_modes.autocasting():
                with losses_of_stage() as added:
                    made = second_forward(self._stages[stage], kept, micro_batch, self.draws)
                _, stash = self._pass_on(stage, micro_batch, made, added.taken())
            if kept.roots is not None and len(stash.roots) != kept.roots:
                raise RuntimeError(
                    f"the second forward made {len(stash.roots)} tensors that ask for a gradient, the first "
                    f"{kept.roots}: recompute wants layers that do the same twice; plan with recompute='never'"
                )
            self._stashes[stage][micro_batch] = stash

    def _pass_on(
        self, stage: int, micro_batch: int, made: Made, losses: Sequence[Added]
    ) -> tuple[Any, Stash]:
        """The message for the next stage, or the output handed over at the end; and what the backward needs."""
        value, awaited, ends = made
        added = self._end.receive_added(stage, micro_batch, losses) if losses else ()
        if not self._is_last[stage]:
            message, roots = graph_cut.cut(value)
            return message, Stash(awaited, roots, tuple(ends), added)
        with self._at_the_end:
            roots = self._end.receive(micro_batch, value)
        if self._all_losses:
            self._all_losses.computed(stage)
        return None, Stash(awaited, roots, tuple(ends), added)

    def _backward(self, stage: int, micro_batch: int, given: _Given) -> graph_cut.Gradients:
        """B: runs the graph on the gradients of the output; returns those of the input."""
        return self._stages[stage].backward(*given)

    def _backward_inputs(self, stage: int, micro_batch: int, given: _Given) -> graph_cut.Gradients:
        """I: the same for all but the weights that can wait."""
        found, self._waiting[stage][micro_batch] = self._stages[stage].backward_inputs(*given)
        return found

    def _take_weights(self, stage: int, micro_batch: int) -> WeightGradients:
        return self._waiting[stage].pop(micro_batch)

    def _backward_weights(self, stage: int, micro_batch: int, waiting: WeightGradients) -> None:
        """W: the weights that have waited."""
        self._stages[stage].backward_weights(waiting)

    def _take_copies(self, stage: int, _: int) -> list[tuple[CopiedLayers | None, Any]]:
        """The gradients that further copies of the model have handed over, where the stage is of the first."""
        apart = self.schedule.model_stages
        if self._stages[stage].copied:
            return []
        return [
            (self._stages[other].copied, self.transport.recv(stage, (Kind.REDUCE_GRAD, other, stage)))
            for other in range(stage + apart, self.schedule.stages, apart)
        ]

    def _reduce(self, stage: int, _: int, arrived: list[tuple[CopiedLayers | None, Any]]) -> Any:
        """REDUCE_GRAD: a further copy of the model hands its gradients over, the first adds them up in order."""
        if own := self._stages[stage].copied:
            return own.hand_over()
        for copied, gradients in arrived:
            if copied:
                copied.add(gradients)
        return None

    def _send_copy(self, stage: int, _: int, gradients: Any) -> None:
        if self._stages[stage].copied:
            first = stage % self.schedule.model_stages
            self.transport.send(stage, first, (Kind.REDUCE_GRAD, stage, first), gradients)

    def _update(self, stage: int, _: int, __: None) -> None:
        """OPT_STEP: the stage's optimizer steps; a further copy of the model has none."""
        optimizer = self._optimizers[stage] if stage < len(self._optimizers) else None
        try:
            if self._versions:
                self._versions[stage].step()
            elif optimizer is not None:
                optimizer.step()
        except BaseException as error:
            add_note(error, f"{LAYER}in the step of its optimizer ({type(optimizer).__name__})")
            raise

    def _take_gradients(self, stage: int, micro_batch: int) -> _Given:
        """What a backward starts from."""
        stash = self._stashes[stage].pop(micro_batch)
        gradients: graph_cut.Gradients = ()
        if stash.roots and not self._is_last[stage]:
            gradients = self.transport.recv(stage, (Kind.B, stage, micro_batch))
        elif stash.roots:
            if self._all_losses and self._end.needs_all(micro_batch):
                self._all_losses.wait(stage)
            gradients = self._end.gradients(micro_batch)
        if stash.added:
            gradients = (*gradients, *self._end.added_gradients(stage, micro_batch))
            stash = stash._replace(roots=(*stash.roots, *stash.added))
        for link in self._links[stage]:
            if link.behind is not None:
                arrived = self.transport.recv(stage, (link.number, stage, micro_batch))
                if arrived is not None:
                    stash = stash._replace(roots=(*stash.roots, *graph_cut.roots(link.tensor)))
                    gradients = (*gradients, arrived)
        return stash, gradients

    def _send_gradients(self, stage: int, micro_batch: int, found: graph_cut.Gradients) -> None:
        """The gradients of the input, for the stage before or for the caller, and of stand-ins of parameters."""
        for link in self._links[stage]:
            if link.before is not None:
                key = link.number, link.before, micro_batch
                self.transport.send(stage, link.before, key, link.tensor.grad)
                link.tensor.grad = None
        if self._is_first[stage]:
            self.input_gradients[micro_batch] = found
        elif found:
            self.transport.send(stage, stage - 1, (Kind.B, stage - 1, micro_batch), found)

    def _place(self, action: Action) -> str:
        copy, stage = divmod(action.stage, self.schedule.model_stages)
        which = f" of copy {copy}" if self.schedule.replicas > 1 else ""
        part = (
            "all micro-batches"
            if action.micro_batch is None
            else f"micro-batch {action.micro_batch} of {self.schedule.micro_batches}"
        )
        where = self._stages[action.stage].where
        return f"{PLACE}stage {stage} of {self.schedule.model_stages}{which} on {where}, {part} (action {action})"


def _emulated(emulation: DeviceEmulation, kind: Kind, compute: Callable[..., Any]) -> Callable[..., Any]:
    def computed(actions: Actions, stage: int, number: int, given: Any) -> Any:
        with emulation.computing(kind, stage):
            return compute(actions, stage, number, given)

    return computed


_Given = tuple[Stash, graph_cut.Gradients]
_PARTS: Parts = {
    Kind.F: (Actions._take_input, Actions._forward, Actions._send_output),
    Kind.B: (Actions._take_gradients, Actions._backward, Actions._send_gradients),
    Kind.I: (Actions._take_gradients, Actions._backward_inputs, Actions._send_gradients),
    Kind.W: (Actions._take_weights, Actions._backward_weights, Actions._send_nothing),
    Kind.RECOMPUTE: (Actions._take_nothing, Actions._run_second, Actions._send_nothing),
    Kind.REDUCE_GRAD: (Actions._take_copies, Actions._reduce, Actions._send_copy),
    Kind.OPT_STEP: (Actions._take_nothing, Actions._update, Actions._send_nothing),
}
