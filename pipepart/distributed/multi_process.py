"""MultiProcess: coordinates the construction and calls of a pipeline over several processes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..autograd import graph_cut
from ..autograd.own_copy import tensors
from ..capture import Chain, Live
from ..data.split import MicroBatches
from ..input_error import InputError
from ..loss import LossError
from ..planning import Plan
from ..ranks import Ranks, join_ranks
from ..runtime.observe.recorder import Recorder
from ..runtime.sinks import BeforeBackward
from ..runtime.state.replicas import refuse_copies
from ..runtime.step import Step
from ..runtime.step_gradients import StepGradients
from ..runtime.transport.links import Links
from ..runtime.transport.reductions import Reductions
from .agreed import Agreed, BackwardCall, Call
from .call_sync import CallSync
from .fingerprint import PipelineFingerprint, check_options, described_options
from .ownership import Ownership
from .rank_part import RankPart
from .single_process import SingleProcess
from .wrapped import is_sharding_imported, refuse_wrapped


class MultiProcess(SingleProcess):
    """One rank's part in the calls of a pipeline.

    Args:
        ranks: the processes.
        plan: has the stages.
        chain: the layers of the model.
        varying_shapes: whether every message is sent with its shape.
        strict: whether calls compare values of the mini-batches of the ranks.

    Attributes:
        rank_of: of each worker of the plan.
        mesh: the ranks by replica ("dp") and place in it ("pp"), once they are connected; None without replicas.

    Raises:
        ValueError: the plan's devices cannot be shared out among the ranks.
    """

    def __init__(self, ranks: Ranks, plan: Plan, chain: Chain, varying_shapes: bool, strict: bool) -> None:
        super().__init__(plan, chain)
        self._ownership = own = Ownership(plan, chain, ranks.rank, ranks.size)
        self.stages, self.replica, self.copied = own.stages, own.replica, own.copied
        self.has_whole = len(own.stages) == len(plan.stages)
        self.shares_out = len(own.rank_of_stage) > len(plan.stages)
        self.rank_of = own.rank_of
        homes = [torch.device(device.torch_device or "cpu") for device in plan.workers]
        self.links = self._links = Links(ranks, own.rank_of, homes, varying_shapes)
        owners, count = own.rank_of_stage, len(plan.stages)
        self._sync = CallSync(ranks, chain.model, owners[::count], owners[count - 1 :: count], strict)
        self.part: RankPart = RankPart(chain.model, own, ranks, self._sync.meet)
        self._ranks = ranks
        self._offset: float | None = None
        self._layers = chain.layers
        # By number of micro-batches: whether the gradients of the last such step needed no correction, whatever came.
        self._certain: dict[int, bool] = {}

    def connect(self) -> None:
        """Connect the replicas after construction, and copy parameters and buffers of the first to all others."""
        replicas, pairs = self._ownership.ranks, self._ownership.pairs
        if pairs:
            self.part.connect_pair(self._ranks.new_group(pairs))
        if len(replicas) == 1:
            return
        columns = list(zip(*replicas, strict=True))
        # Each worker adds up by itself.
        groups = {worker: self._ranks.new_group(columns) for worker in self._links.local}
        first = next(iter(groups.values()))
        self.mesh = DeviceMesh.from_group(
            [first, self._ranks.new_group(replicas)], "cpu", replicas, mesh_dim_names=("dp", "pp")
        )
        self._links.reductions = Reductions(self._ranks, self._ownership.replica, groups)
        self.part.connect(first)

    def before_backward(
        self, gradients: StepGradients, with_optimizers: bool, micro_batches: int
    ) -> BeforeBackward:
        """Begin the gradients, before the forwards.

        Only the rank of the last stage sees whether the gradients need a correction, and after other ranks have begun
        their backwards. So all ranks go by the last step of as many micro-batches.
        """
        gradients.begin(self._certain.get(micro_batches, all(self._certain.values())))
        return partial(self._begin_backward, gradients, with_optimizers)

    def _begin_backward(
        self, gradients: StepGradients, with_optimizers: bool, certain: bool, leaves: Iterable[Tensor]
    ) -> None:
        """Before the first backward, on a rank of a last stage.

        Args:
            gradients, with_optimizers: as for :meth:`before_backward`.
            certain: whether the gradients need no correction.
            leaves: of the loss.

        Raises:
            LossError: several replicas cannot share the loss out, or optimizers would step with wrong gradients.
        """
        gradients.add(leaves := list(leaves))
        if with_optimizers and not certain:
            raise LossError(
                "what the loss is divided by depends on the output of all micro-batches, and optimizers of the stages "
                "step on other ranks before it is known: return (sum, count) with a count of the target alone, plan "
                "with schedule='gpipe' and recompute='never', or make the pipeline without optimizer="
            )
        if self.shares_out and leaves:
            raise LossError(
                "the loss has tensors of its own that get a gradient, of which each replica of the model would see "
                "its own micro-batches only: make the loss a part of the model, or plan with replicas=1"
            )

    def end(self, step: Step, *, scaled: bool = False) -> None:
        """Share the loss, as :meth:`CallSync.end`, what the layers of the first replica have written, and the times."""
        gradients = self.part.gradients_to_unscale() if scaled else []
        self._sync.end(step.sink, step.keys, gradients)
        if step.sink.trains:
            self._certain[len(step.sink.outputs)] = step.sink.certain
        self.part.share_written()
        self._links.agree()
        if step.recorder is not None:
            self._complete(step.recorder)

    def input_gradients(self, step: Step, batch: MicroBatches, factor: float) -> Sequence[Tensor | None]:
        """Give every rank the gradients of the inputs, which the ranks of the first stage have, if any is asked for."""
        if not any(graph_cut.leaves(one) for one in batch.inputs):
            return []
        self.collect(step.input_gradients, batch)
        found = super().input_gradients(step, batch, factor)
        return self._sync.from_one(self._sync.first, lambda: found)

    def collect(self, made: list[Any], batch: MicroBatches) -> None:
        """Collect the results of other replicas for their micro-batches."""
        self._sync.collect(made, batch.inputs)

    def share_outputs(self, outputs: list[Any], batch: MicroBatches) -> None:
        """Send the outputs of all micro-batches to every rank."""
        self._sync.collect(outputs, batch.inputs, always=True)

    def begin_backward(self, call: BackwardCall) -> Hashable:
        """Agree on the backward of a differentiable call, which all ranks begin with the same gradients of the output.

        Raises:
            RuntimeError: the ranks make different calls.
            ValueError: their gradients of the output differ.
        """
        what = f"the backward of the output of call {call.number}"
        what += "" if call.parameters else " to its input alone"
        agreed = self._sync.begin_backward(what, call.gradients, call.check)
        return "backward", call.parameters, call.form, agreed

    def end_backward(self, step: Step, in_half: bool) -> Sequence[Tensor | None]:
        """Give every rank the gradients of the inputs, which the ranks of the first stage have.

        In float16 gradients that overflow on one rank get an infinity on all: so all scalers skip the step alike.
        """
        gradients = self.part.gradients_to_unscale()
        if in_half or any(one.dtype is torch.float16 for one in self.part.model.parameters()):
            self._sync.share_overflow(gradients)
        self._sync.collect(step.input_gradients, [None] * len(step.input_gradients))
        found = super().end_backward(step, in_half)
        found = self._sync.end_backward(list(found))
        self._links.agree()
        return found

    def from_last(self, make: Callable[[], Any]) -> Any:
        """Return the result of the last stage's rank on every rank."""
        return self._sync.from_one(self._sync.last, make)

    def meet(self, call: str) -> Ranks | None:
        """Agree on a call that is no run, as :meth:`CallSync.meet`."""
        self._sync.meet(call, lambda: None)
        return self._sync.ranks

    def begin(self, call: Call) -> Agreed:
        """Agree on a call, as :meth:`CallSync.begin`, and give shared parameters their newest values."""

        def checked(args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> MicroBatches:
            if is_sharding_imported():
                refuse_wrapped(self._layers)  # fully_shard changes modules in place
            if self.mesh is not None and torch.is_grad_enabled():
                refuse_copies(self._layers, forward=False, backward=True)
            if self._ownership.pairs:
                refuse_copies(self._layers, forward=True, backward=torch.is_grad_enabled())
            batch = call.make(args, kwargs, target)
            if call.name.startswith("forward") and torch.is_grad_enabled():
                _check_labels(batch)
            return batch

        agreed = self._sync.begin(call._replace(make=checked))
        self.part.share_tied()
        return agreed

    def _complete(self, recorder: Recorder) -> None:
        """Give every rank the times of all workers, on the clock of rank 0."""
        if self._offset is None:
            self._offset = self._ranks.clock_offset()
        recorder.adopt(self._ranks.gather(recorder.share(self._links.local, self._offset)))


def join(ranks: Ranks | None, plan: Plan, chain: Chain, varying_shapes: bool, strict: bool) -> SingleProcess:
    """Return the coordinator of a pipeline in this process.

    Raises:
        ValueError: the plan needs one process, or another number of them.
    """
    if ranks is None:
        return SingleProcess(plan, chain)
    side = MultiProcess(ranks, plan, chain, varying_shapes, strict)
    _check_links(plan, side.rank_of)
    return side


def _check_links(plan: Plan, rank_of: Sequence[int]) -> None:
    """Check that no link between ranks would have to be slowed down.

    Raises:
        ValueError: one would.
    """
    if not plan.cluster.emulated:
        return
    for (one, rank), (other, there) in permutations(zip(plan.workers, rank_of, strict=True), 2):
        link = plan.cluster.link_between(one.name, other.name)
        if rank != there and (link.bandwidth or link.latency > plan.cluster.message_seconds):
            raise InputError(
                f"the link between {one.name} and {other.name} is emulated, which is done between the threads of one "
                "process only: run without torchrun, or plan for a cluster without link= and latency="
            )


def _check_labels(batch: MicroBatches) -> None:
    """Check that this rank can compute the loss of a model that computes its own.

    Raises:
        ValueError: the rank was given no mini-batch.
    """
    has_loss = any(isinstance(one, Live) and one.recording.loss is not None for one in batch.inputs)
    if has_loss and any(label.is_meta for label in tensors(batch.targets)):
        raise InputError(
            "the model computes its own loss, which every rank goes backward from: give the mini-batch to all ranks"
        )


@contextmanager
def making(
    ranks: Ranks | None, plan: Plan, model: nn.Module | Chain, options: Mapping[str, Any]
) -> Iterator[None]:
    """Context manager around the construction of a pipeline: an error or a difference on one rank raises on all.

    Args:
        ranks: the processes; None for one.
        plan, model: arguments of the pipeline.
        options: the others, by name.

    Raises:
        RankError: it fails on another rank.
        InputError: the ranks have different plans, models or options.
    """
    with _failing_together(ranks):
        if isinstance(model, nn.Module | Chain):
            refuse_wrapped([("", model if isinstance(model, nn.Module) else model.model)])
        fingerprint = None
        if ranks is not None and isinstance(plan, Plan) and isinstance(model, nn.Module | Chain):
            fingerprint = PipelineFingerprint(plan, model, options)
        yield  # refuses other types
    if ranks is not None and fingerprint is not None:
        try:
            fingerprint.check(ranks)
        except BaseException:
            ranks.close("the pipeline could not be made")
            raise


def planned_once(check: Callable[[], object], make: Callable[[], Plan], options: Mapping[str, Any]) -> Plan:
    """Plan on rank 0 and return the plan on every rank; with one process, just plan.

    Args:
        check: refuses, on every rank, what cannot be planned for.
        make: makes the plan.
        options: of the plan, by name.

    Raises:
        Exception: what ``check`` or ``make`` raises, on the rank where it does.
        RankError: it has raised there, on the others.
        InputError: the ranks have different options.
    """
    ranks = join_ranks()
    with _failing_together(ranks):
        check()
        if ranks is not None:
            check_options(tuple(ranks.exchange(described_options(options))))
        made = make() if ranks is None or ranks.rank == 0 else None
        if ranks is None:
            assert made is not None
            return made
        text = ranks.gather(made and made.model_dump_json())[0]
        ranks.close("the plan is made")
        return Plan.model_validate_json(text)


@contextmanager
def _failing_together(ranks: Ranks | None) -> Iterator[None]:
    """If the block raises on one rank, tell the others."""
    try:
        yield
    except BaseException as error:
        if ranks is not None:
            ranks.tell(error)
            ranks.close("the pipeline could not be made")
        raise
