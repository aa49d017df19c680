"""MultiProcess: one rank's part in the calls of a pipeline over several processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..autograd import graph_cut
from ..autograd.own_copy import tensors
from ..capture import Chain, Live
from ..data.split import MicroBatches
from ..input_error import InputError
from ..loss import LossError
from ..planning import Plan
from ..ranks import Ranks
from ..ranks.clock import offset_to_rank_0
from ..runtime.observe.recorder import Recorder
from ..runtime.sinks import BeforeBackward, LossSink, Share
from ..runtime.state.replicas import refuse_copies
from ..runtime.step import Step
from ..runtime.step_gradients import StepGradients
from ..runtime.transport.links import Links
from ..runtime.transport.reductions import Reductions
from .broadcast import broadcast_result
from .call_sync import CallSync
from .mini_batches import digest, forms
from .overflow import share_overflow
from .ownership import Ownership
from .rank_part import RankPart
from .single_process import Agreed, Call, SingleProcess
from .wrapped import refuse_wrapped


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
        self.stages, self.replica = own.stages, own.replica
        self.has_whole = len(own.stages) == len(plan.stages)
        self.shares_out = len(own.rank_of_stage) > len(plan.stages)
        self.rank_of = own.rank_of
        homes = [torch.device(device.torch_device or "cpu") for device in plan.workers]
        self.links = self._links = Links(ranks, own.rank_of, homes, varying_shapes)
        owners, count = own.rank_of_stage, len(plan.stages)
        firsts, lasts = owners[::count], owners[count - 1 :: count]
        self._first, self._last, self._has_replicas = firsts[0], lasts[0], len(lasts) > 1
        self._sync = CallSync(ranks, chain.model, firsts, lasts, strict)
        self.part: RankPart = RankPart(chain.model, own, ranks, self._sync.meet)
        self._ranks = ranks
        self._offset: float | None = None
        self._layers = chain.layers
        # By number of micro-batches: whether the gradients of the last such step needed no correction, whatever came.
        self._certain: dict[int, bool] = {}

    def connect(self) -> None:
        """Connect the replicas after construction, and copy parameters and buffers of the first to all others."""
        replicas = self._ownership.ranks
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
        """Share the loss, what the layers of the first replica have written, and the times; add up the losses.

        Args:
            step: that has run.
            scaled: gradients may overflow, for a ``GradScaler``.

        Raises:
            LossError: on all ranks, if the loss of the mini-batch does not reduce.
            RankError: another rank has failed or is lost.
        """
        sink, keys = step.sink, step.keys
        if scaled:
            share_overflow(self._ranks, self.part.gradients_to_unscale())
        refusal = self._share_taken(sink) if self._has_replicas else ""
        share = sink.share(is_last=self._ranks.rank == self._last).as_plain()
        found = self._ranks.exchange((share, keys.drawn))
        self._ranks.midway = False
        shares = [Share.from_plain(share) for share, _ in found]
        keys.drawn = any(drawn for _, drawn in found)
        keys.finish()
        if refusal := refusal or shares[self._last].refusal:
            raise LossError(refusal)
        sink.adopt(shares, self._last)
        if sink.trains:
            self._certain[len(sink.outputs)] = sink.certain
        self.part.share_written()
        self._links.agree()
        if step.recorder is not None:
            self._complete(step.recorder)

    def _share_taken(self, sink: LossSink) -> str:
        """Give every rank the losses of the micro-batches of all replicas; return why they do not fit, if so."""
        try:
            for taken in self._ranks.gather(sink.taken()):
                sink.adopt_taken(taken)
        except LossError as error:
            return str(error)
        return ""

    def input_gradients(self, step: Step, batch: MicroBatches, factor: float) -> Sequence[Tensor | None]:
        """Give every rank the gradients of the inputs, which the ranks of the first stage have, if any is asked for."""
        if not any(graph_cut.leaves(one) for one in batch.inputs):
            return []
        self.collect(step.input_gradients, batch.inputs)
        found = super().input_gradients(step, batch, factor)
        return broadcast_result(self._ranks, self._first, lambda: found)

    def collect(self, made: list[Any], inputs: Sequence[Any], always: bool = False) -> None:
        """Collect the results of other ranks on every rank; with one replica only with ``always``."""
        if not self._has_replicas and not always:
            return
        everyone = self._ranks.gather([one is not None and type(one) is not tuple for one in made])
        for index, given in enumerate(inputs):
            source = next((rank for rank, has in enumerate(everyone) if has[index]), None)
            if source is not None:
                recording = given.recording if isinstance(given, Live) else None
                made[index] = broadcast_result(
                    self._ranks, source, lambda index=index: made[index], recording
                )

    def begin_backward(
        self,
        form: Hashable,
        number: int,
        gradients: Sequence[Tensor | None],
        parameters: bool,
        check: Callable[[], None],
    ) -> Hashable:
        """Agree on the backward of a differentiable call; the gradients of the output are those of the last stage.

        Raises:
            RuntimeError: the ranks make different calls.
        """
        what = f"the backward of the output of call {number}"
        what += "" if parameters else " to its input alone"
        layout = self._sync.begin_backward(what, digest(forms(gradients)), check)
        return "backward", parameters, form, layout

    def end_backward(self, step: Step, in_half: bool) -> Sequence[Tensor | None]:
        """Give every rank the gradients of the inputs, which the ranks of the first stage have.

        In float16 gradients that overflow on one rank get an infinity on all: so all scalers skip the step alike.
        """
        gradients = self.part.gradients_to_unscale()
        if in_half or any(one.dtype is torch.float16 for one in self.part.model.parameters()):
            share_overflow(self._ranks, gradients)
        self.collect(step.input_gradients, [None] * len(step.input_gradients))
        found = super().end_backward(step, in_half)
        found = broadcast_result(self._ranks, self._first, lambda: list(found))
        self._ranks.midway = False
        self._links.agree()
        return found

    def from_last(self, make: Callable[[], Any]) -> Any:
        """Return the result of the last stage's rank on every rank."""
        return broadcast_result(self._ranks, self._last, make)

    def meet(self, call: str) -> Ranks | None:
        """Agree on a call that is no run, as :meth:`CallSync.meet`."""
        self._sync.meet(call, lambda: None)
        return self._ranks

    def begin(self, call: Call) -> Agreed:
        """Agree on a call, as :meth:`CallSync.begin`, and give shared parameters their newest values."""

        def checked(args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> MicroBatches:
            if "torch.distributed.fsdp" in sys.modules:
                refuse_wrapped(self.part.model)  # fully_shard changes modules in place
            if self.mesh is not None and torch.is_grad_enabled():
                refuse_copies(self._layers, forward=False, backward=True)
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
            ranks = self._ranks
            self._offset = ranks.run(partial(offset_to_rank_0, ranks.rank, ranks.size, ranks.groups[0]))
        recorder.adopt(self._ranks.gather(recorder.share(self._links.local, self._offset)))


def join(ranks: Ranks | None, plan: Plan, chain: Chain, varying_shapes: bool, strict: bool) -> SingleProcess:
    """Return the coordinator of a pipeline in this process.

    Raises:
        ValueError: the plan needs one process, or another number of them.
    """
    if ranks is None:
        return SingleProcess(plan, chain)
    cluster = plan.cluster
    links = [cluster.link_between(one.name, other.name) for one, other in permutations(plan.workers, 2)]
    if cluster.emulated and any(link.bandwidth or link.latency > cluster.message_seconds for link in links):
        raise InputError(
            "the links of the plan's cluster are emulated, which is done between the threads of one process only: run "
            "without torchrun, or plan for a cluster without link= and latency="
        )
    return MultiProcess(ranks, plan, chain, varying_shapes, strict)


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
