"""MultiProcess: one rank's part in the calls of a pipeline over several processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain as chained
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..autograd import graph_cut
from ..capture import Chain, Live
from ..data.split import MicroBatches
from ..input_error import InputError
from ..loss import LossError
from ..planning import Plan
from ..profiling import Parallelize
from ..ranks import Ranks
from ..runtime.observe.recorder import Recorder
from ..runtime.sinks import BeforeBackward, LossSink, Share
from ..runtime.stage import Stage
from ..runtime.state.replicas import refuse_copies
from ..runtime.step import Step
from ..runtime.step_gradients import StepGradients
from ..runtime.transport.links import Links
from ..runtime.transport.reductions import Reductions
from .broadcast import broadcast_result
from .call_sync import CallSync
from .inside_stage import StageShards, parallelize_layers
from .mini_batches import digest, forms
from .ownership import Ownership
from .rank_part import RankPart
from .single_process import Agreed, Call, SingleProcess
from .wrapped import refuse_wrapped


class MultiProcess(SingleProcess):
    """One rank's part in the calls of a pipeline.

    Args:
        strict: whether calls compare values of the mini-batches of the ranks.
        parallelize: the user's function for the layers of this rank; None if there is none.

    Attributes:
        mesh: the ranks by replica ("dp"), place in it ("pp") and, with ``plan.tensor``, place in the group of a device
            ("tp"), once they are connected; None without replicas and ``parallelize``.

    Raises:
        ValueError: the plan's devices cannot be shared out among the ranks.
    """

    def __init__(
        self,
        ranks: Ranks,
        plan: Plan,
        chain: Chain,
        strict: bool,
        parallelize: Parallelize | None = None,
    ) -> None:
        super().__init__(plan, chain)
        self._ownership = ownership = Ownership(plan, chain, ranks.rank, ranks.size)
        self.stages, self.replica = ownership.stages, ownership.replica
        self.has_whole = len(ownership.stages) == len(plan.stages)
        self.shares_out = len(ownership.rank_of_stage) > len(plan.stages)
        self.plan = plan = ownership.plan_of_lane()
        homes = [torch.device(device.torch_device or "cpu") for device in plan.workers]
        lane = ownership.of_lanes(ownership.rank_of)[ownership.lane]
        self.links = self._links = Links(ranks, lane, homes, ownership.tensor)
        owners, count = ownership.rank_of_stage, len(plan.stages)
        firsts, lasts = owners[::count], owners[count - 1 :: count]
        self._first, self._last = firsts[0], lasts[0]
        self._sync = CallSync(ranks, chain.model, [*chained(*ownership.of_lanes(lasts))], strict)
        self.part: RankPart = RankPart(chain.model, ownership, ranks, self._sync.meet)
        self._ranks = ranks
        self._chain = chain
        self._parallelize = parallelize
        self._shards: StageShards | None = None
        self._home = homes[self._links.local[0]]
        if parallelize is not None and len(self._links.local) > 1:
            raise InputError(
                f"rank {ranks.rank} drives {len(self._links.local)} devices of the plan, and under parallelize= a rank "
                f"drives one: start {len(plan.cluster)} processes"
            )
        # By number of micro-batches: whether the gradients of the last such step needed no correction, whatever came.
        self._certain: dict[int, bool] = {}

    def connect(self, stages: Sequence[Stage]) -> None:
        """Connect the replicas, copy parameters and buffers of the first to all others, and parallelize."""
        ownership = self._ownership
        if len(ownership.ranks) == 1 and self._parallelize is None:
            return
        # Each worker adds up by itself.
        columns = [
            lane for column in zip(*ownership.ranks, strict=True) for lane in ownership.of_lanes(column)
        ]
        groups = {worker: self._new_group(columns) for worker in self._links.local}
        first = next(iter(groups.values()))
        self.mesh = self._made_mesh(first)
        if self.shares_out:
            self._links.reductions = Reductions(self._ranks, ownership.replica, groups)
            self.part.connect(first)
        if self._parallelize is not None:
            self._ranks.exchange(None)  # no rank calls code that may fail while others still make groups
            self._run_parallelize(self._parallelize, stages, groups)

    def _new_group(self, rows: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Make a group of each row, in which layers send as well, if they are parallelized."""
        inside = self._parallelize is not None
        backend = "cpu:gloo,cuda:nccl" if inside and self._home.type == "cuda" else "gloo"
        return self._ranks.new_group(rows, backend, lasting=inside)

    def _made_mesh(self, replicas: dist.ProcessGroup) -> DeviceMesh:
        ownership = self._ownership
        inside = self._parallelize is not None
        rows = [lane for ranks in ownership.ranks for lane in ownership.of_lanes(ranks)]
        groups, ranks, names = [replicas, self._new_group(rows)], torch.tensor(ownership.ranks), ("dp", "pp")
        if ownership.tensor > 1:
            ranks = ranks[..., None] + torch.arange(ownership.tensor)
            groups.append(self._new_group(ranks.flatten(0, 1).tolist()))
            names = ("dp", "pp", "tp")
        kind = self._home.type if inside else "cpu"
        return DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=names)

    def _run_parallelize(
        self, parallelize: Parallelize, stages: Sequence[Stage], groups: Mapping[int, dist.ProcessGroup]
    ) -> None:
        """Parallelize the layers of this rank, and wait until all ranks have."""
        ranks, ownership, mesh = self._ranks, self._ownership, self.mesh
        assert mesh is not None
        device_of = self.plan.build_schedule().device_of
        here = [stage.shared for stage in stages if device_of[stage.index] in self._links.local]
        inside = mesh["dp", "tp"] if ownership.tensor > 1 else mesh["dp"]
        try:
            units = parallelize_layers(
                parallelize, self._chain, here, inside, ownership.shared, ranks, self._sync.meet
            )
        except BaseException:
            ranks.close("the pipeline could not be made")
            raise
        ownership.forget()
        self._shards = StageShards(ranks, ownership.replica, groups, units)
        self._links.reductions = self._shards

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
        """Before the first backward, on a rank of a last stage: see :class:`MicroBatchLossSink`.

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

        Raises:
            LossError: on all ranks, if the loss of the mini-batch does not reduce.
        """
        sink, keys = step.sink, step.keys
        if scaled:
            self.part.share_overflow(self.part.gradients_to_unscale())
        refusal = self._share_taken(sink) if self.shares_out else ""
        share = sink.share(is_last=self._ranks.rank == self._last).as_plain()
        everyone = self._ranks.exchange((share, keys.drawn))
        self._ranks.midway = False
        everyone = self._ownership.of_first_lane(everyone)
        shares = [Share.from_plain(share) for share, _ in everyone]
        last = self._last // self._ownership.tensor
        keys.drawn = any(drawn for _, drawn in everyone)
        keys.finish()
        if refusal := refusal or shares[last].refusal:
            raise LossError(refusal)
        sink.adopt(shares, last)
        if sink.trains:
            self._certain[len(sink.outputs)] = sink.certain
        self.part.share_written()
        self._links.agree()
        if step.recorder is not None:
            self._complete(step.recorder)

    def _share_taken(self, sink: LossSink) -> str:
        """Give every rank the losses of the micro-batches of all replicas; return why they do not fit, if so."""
        try:
            for taken in self._ownership.of_first_lane(self._ranks.gather(sink.taken())):
                sink.adopt_taken(taken)
        except LossError as error:
            return str(error)
        return ""

    def input_gradients(self, step: Step, batch: MicroBatches, factor: float) -> Sequence[Tensor | None]:
        """Give every rank the gradients of the inputs, which the ranks of the first stage have, if any is asked for."""
        if not any(graph_cut.leaves(each) for each in batch.inputs):
            return []
        self.collect(step.input_gradients, batch.inputs)
        gradients = super().input_gradients(step, batch, factor)
        return broadcast_result(self._ranks, self._first, lambda: gradients)

    def collect(self, outputs: list[Any], inputs: Sequence[Any], always: bool = False) -> None:
        """Collect the results of other ranks on every rank; with one replica only with ``always``."""
        if not self.shares_out and not always:
            return
        everyone = self._ranks.gather(
            [output is not None and type(output) is not tuple for output in outputs]
        )
        for index, value in enumerate(inputs):
            source = next((rank for rank, has in enumerate(everyone) if has[index]), None)
            if source is not None:
                recording = value.recording if isinstance(value, Live) else None
                outputs[index] = broadcast_result(
                    self._ranks, source, lambda index=index: outputs[index], recording
                )

    def begin_backward(
        self,
        form: Hashable,
        number: int,
        gradients: Sequence[Tensor | None],
        parameters: bool,
        check: Callable[[], None],
    ) -> Hashable:
        what = f"the backward of the output of call {number}"
        what += "" if parameters else " to its input alone"
        layout = self._sync.begin_backward(what, digest(forms(gradients)), check)
        return "backward", parameters, form, layout

    def end_backward(self, step: Step, in_half: bool) -> Sequence[Tensor | None]:
        """Give every rank the gradients of the inputs, which the ranks of the first stage have.

        In float16 gradients that overflow on one rank get an infinity on all: so all scalers skip the step alike.
        """
        gradients = self.part.gradients_to_unscale()
        if in_half or any(parameter.dtype is torch.float16 for parameter in self.part.model.parameters()):
            self.part.share_overflow(gradients)
        self.collect(step.input_gradients, [None] * len(step.input_gradients))
        of_inputs = super().end_backward(step, in_half)
        of_inputs = broadcast_result(self._ranks, self._first, lambda: list(of_inputs))
        self._ranks.midway = False
        self._links.agree()
        return of_inputs

    def from_last(self, make: Callable[[], Any]) -> Any:
        return broadcast_result(self._ranks, self._last, make)

    def meet(self, call: str) -> Ranks | None:
        self._sync.meet(call, lambda: None)
        return self._ranks

    def begin(self, call: Call) -> Agreed:
        """Agree on a call, as :meth:`CallSync.begin`, and give shared parameters their newest values."""

        def checked() -> MicroBatches:
            if self._shards is None and "torch.distributed.fsdp" in sys.modules:
                refuse_wrapped(self.part.model)  # fully_shard changes modules in place
            if self.shares_out and torch.is_grad_enabled():
                refuse_copies(self._chain.layers, forward=False, backward=True)
            batch = call.split()
            if self._shards is not None and self._shards.reshards:
                _check_even(len(batch.inputs), len(self._ownership.ranks))
            return batch

        agreed = self._sync.begin(call._replace(split=checked))
        self.part.share_tied()
        return agreed

    def _complete(self, recorder: Recorder) -> None:
        """Give every rank the times of all workers, on the clock of the day, which hosts keep alike."""
        offset = time.time() - time.perf_counter()
        shares = self._ranks.gather(recorder.share(self._links.local, offset))
        recorder.adopt(self._ownership.of_first_lane(shares))


def join(
    ranks: Ranks | None,
    plan: Plan,
    chain: Chain,
    strict: bool,
    parallelize: Parallelize | None = None,
) -> SingleProcess:
    """Return the coordinator of a pipeline in this process.

    Raises:
        ValueError: the plan needs one process, or another number of them.
    """
    if ranks is None:
        return SingleProcess(plan, chain)
    cluster = plan.cluster
    links = [
        cluster.link_between(sender.name, receiver.name) for sender, receiver in permutations(plan.workers, 2)
    ]
    if cluster.emulated and any(link.bandwidth or link.latency > cluster.message_seconds for link in links):
        raise InputError(
            "the links of the plan's cluster are emulated, which is done between the threads of one process only: run "
            "without torchrun, or plan for a cluster without link= and latency="
        )
    return MultiProcess(ranks, plan, chain, strict, parallelize)


def _check_even(micro_batches: int, replicas: int) -> None:
    if micro_batches % replicas:
        raise InputError(
            f"a part of a stage gathers its parameters for each micro-batch (reshard_after_forward=True), and "
            f"{micro_batches} micro-batches are not equally many for each of {replicas} replicas: leave "
            "reshard_after_forward= out, or give a mini-batch and a plan with a multiple"
        )
