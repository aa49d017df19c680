"""One run of a schedule: each device's worker goes through its actions, and the first failure ends all of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch.optim import Optimizer

from ..autograd import graph_cut
from .actions import Actions, Held
from .emulation import DeviceEmulation
from .loss_sink import End
from .observe.recorder import Recorder, Watch
from .order import Order
from .quick_turns import quick_turns
from .stage import Stage
from .transport.base import Stopped
from .transport.cuda import Callers, Streams


class Run:
    """One pass over a schedule's actions, on one mini-batch.

    Args:
        order: what each device does.
        stages: all stages.
        inputs: the first stage's input for each micro-batch.
        end: what the last stage's outputs go to.
        forward: the run whose stashes this one goes backward through, for one that has no forwards.
        optimizers: of the stages, for an order that has their steps.
        recorder: takes the times of its actions and messages.
        streams: of the workers, where they have any.
        emulation: of virtual devices, if any of them is emulated.

    Attributes:
        end: as given.
        failure: what ended the run, if anything did.
        failed_on: the device whose worker it came from; None for the caller's.
        held: what each stage held at that moment.
    """

    def __init__(
        self,
        order: Order,
        stages: Sequence[Stage],
        inputs: Sequence[Any],
        end: End,
        forward: Run | None = None,
        optimizers: Sequence[Optimizer | None] = (),
        recorder: Recorder | None = None,
        streams: Streams | None = None,
        emulation: DeviceEmulation | None = None,
    ) -> None:
        self.schedule = order.schedule
        self.end = end
        self.failure: BaseException | None = None
        self.failed_on: int | None = None
        self.held: list[Held] = []
        self._over = False
        before = forward.actions if forward else None
        watch = Watch.wanted(order.schedule, stages, recorder)
        self.actions = Actions(order, stages, inputs, end, before, optimizers, watch, streams, emulation)
        self._lock = threading.Lock()
        self._streams = streams
        # A backward begins and ends on the streams of its forward, as autograd's do.
        self._callers: Callers = forward._callers if forward else streams.callers() if streams else ()
        if streams:
            streams.begin(self._callers)

    @property
    def input_gradients(self) -> list[graph_cut.Gradients]:
        """Of each micro-batch's input, once the run has ended."""
        return self.actions.input_gradients

    def work(self, device: int) -> None:
        """Goes through the actions of one device, on its worker; raises nothing."""
        try:
            with (
                quick_turns,
                self.actions.modes.entered(),
                self._streams.entered(device) if self._streams else nullcontext(),
            ):
                self._work(device)
        except Stopped:
            pass
        except BaseException as error:
            self.fail(error, device)

    def backward_here(self) -> None:
        """Goes backward through all stages on the calling thread, one micro-batch after the other.

        Autograd runs the backward of an accelerator's tensors on a thread of that device. One that called the
        workers and waited would wait for ever: their backwards need the same thread.
        """
        streams = self._streams
        try:
            for action in self.actions.left():
                worker = self.schedule.device_of[action.stage]
                with streams.entered(worker) if streams else nullcontext():
                    self.actions.do(action)
        finally:
            self._end()
        if streams:
            # This thread is on other streams than the caller was, which copy gradients to inputs that are elsewhere.
            # Threads of other devices go on meanwhile, and may let go of gradients while a further run goes on here.
            streams.end(streams.callers())
            streams.hold_for_caller(self.input_gradients)

    def fail(self, error: BaseException, device: int | None = None) -> None:
        """Ends the run: the first error is kept, and every worker that waits or will wait gives up."""
        with self._lock:
            if self._over:
                return
            self._over = True
            self.failure, self.failed_on, self.held = error, device, self.actions.held()
        self.actions.transport.stop()

    def finish(self) -> None:
        """Behind the last worker, whether the run has failed or not."""
        self.actions.draws.finish()
        self._end()

    def forget(self) -> None:
        """Lets go of the failure and of all tensors, which its traceback would keep alive."""
        self.failure = None
        self._end()
        self.actions.forget()

    def _end(self) -> None:
        if self._streams:
            self._streams.end(self._callers)

    def _work(self, device: int) -> None:
        do = self._streams.paced(device, self.actions.do) if self._streams else self.actions.do
        try:
            for action in self.schedule.actions[device]:
                if self._over:
                    return
                do(action)
        finally:
            self.actions.settle(device)
        self.actions.finish(device)
