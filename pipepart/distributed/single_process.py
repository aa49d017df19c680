"""SingleProcess: coordinates the calls of a pipeline in one process, where there is little to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..capture import Chain
from ..data.split import MicroBatches
from ..planning import Plan
from ..ranks import Ranks
from ..runtime.sinks import BeforeBackward
from ..runtime.stage import Stage
from ..runtime.step import Step
from ..runtime.step_gradients import StepGradients, scaled
from ..runtime.transport.links import Links
from .model_part import ModelPart


class Call(NamedTuple):
    """A call of a pipeline in this process.

    Attributes:
        name: of the method.
        args, kwargs, target: its arguments.
        split: returns their micro-batches.
        options: further arguments of the method, as text; the same on all ranks.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    split: Callable[[], MicroBatches]
    options: str = ""


class Agreed(NamedTuple):
    """What all processes know before a call runs. One process alone knows the micro-batches, and needs no more.

    Attributes:
        batch: the micro-batches.
        form: equal for calls whose stages exchange equal messages.
        seed: of the random numbers; None for the caller's generator.
        number: of the call.
    """

    batch: MicroBatches
    form: Hashable = None
    seed: int | None = None
    number: int = 0


class SingleProcess:
    """Interface between a pipeline and its processes, for one process. ``MultiProcess`` is the subclass for several.

    Args:
        plan: has the stages.
        chain: the layers of the model.

    Attributes:
        plan: with the devices that this process drives, where a device of the plan is a group of several.
        part: of the model, that this process has.
        stages: of this process; None for all.
        replica: of the model, that this process has stages of; None for all.
        links: to other processes; None if there are none.
        mesh: of the processes, with replicas.
        shares_out: whether the micro-batches are shared out among replicas in other processes.
    """

    links: Links | None = None
    mesh: DeviceMesh | None = None
    stages: Collection[int] | None = None
    replica: int | None = None
    shares_out: bool = False

    def __init__(self, plan: Plan, chain: Chain) -> None:
        self.plan = plan
        self.part = ModelPart(chain.model)
        self.has_whole = True

    def connect(self, stages: Sequence[Stage]) -> None:
        """Called after the pipeline is constructed."""

    def begin(self, call: Call) -> Agreed:
        """Return the micro-batches of a call."""
        return Agreed(call.split())

    def before_backward(
        self, gradients: StepGradients, with_optimizers: bool, micro_batches: int
    ) -> BeforeBackward:
        """Return a function for the loss sink to call before the first backward.

        Args:
            gradients: of the step.
            with_optimizers: whether the optimizers of stages step within the step.
            micro_batches: how many the step has.
        """
        return gradients.begin

    def end(self, step: Step, *, scaled: bool = False) -> None:
        """Share the loss of a run; ``scaled`` for a ``GradScaler``."""

    def input_gradients(self, step: Step, batch: MicroBatches, factor: float) -> Sequence[Tensor | None]:
        """Return the gradients of the leaves of the inputs, of all micro-batches in order."""
        return [scaled(gradient, factor) for part in step.input_gradients for gradient in part]

    def collect(self, outputs: list[Any], inputs: Sequence[Any], always: bool = False) -> None:
        """Collect the results of other processes, such as outputs.

        Args:
            made: by micro-batch; None or an empty tuple where another process has made it.
            inputs: of the micro-batches.
            always: with one replica as well; otherwise nothing is done there.
        """

    def begin_backward(
        self,
        form: Hashable,
        number: int,
        gradients: Sequence[Tensor | None],
        parameters: bool,
        check: Callable[[], None],
    ) -> Hashable:
        """Agree on the backward of a differentiable call; return the form of its messages.

        Args:
            form, number: of the forward, as in :class:`Agreed`.
            gradients: of the output.
            parameters: whether the parameters get gradients.
            check: raises if it cannot run.
        """
        check()
        return None

    def end_backward(self, step: Step, in_half: bool) -> Sequence[Tensor | None]:
        """Return the gradients of the leaves of the inputs, of all micro-batches in order."""
        return [gradient for part in step.input_gradients for gradient in part]

    def from_last(self, make: Callable[[], Any]) -> Any:
        """Return the result of the last stage's process."""
        return make()

    def meet(self, call: str) -> Ranks | None:
        """Agree on a call that is no run; return the processes, None for one."""
        return None
