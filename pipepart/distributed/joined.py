"""Joined: a pipeline whose stages are on several processes, from its making to its last call."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..capture import Chain
from ..loss import LossError
from ..planning import Plan
from ..runtime.loss_sink import LossSink
from ..runtime.observe.recorder import Recorder
from ..runtime.replay.randomness import RngKeys
from ..runtime.step_gradients import StepGradients
from ..runtime.transport.ranks import Links
from ..runtime.transport.reductions import Reductions
from ..workers.ranks import RankError, Ranks, join_ranks
from .meeting import Agreed, Make, Meeting
from .ownership import Ownership
from .rank_part import RankPart


class Joined:
    """One rank's side of a pipeline.

    Args:
        ranks: the processes.
        plan: has the stages.
        chain: the layers of the model.

    Attributes:
        part: of the model, that this rank has.
        links: to the other ranks.
        meeting: what the ranks agree on.
        mesh: the ranks by replica ("dp") and place in it ("pp"), once they are connected; None without replicas.

    Raises:
        ValueError: the plan's devices cannot be shared out among the ranks.
    """

    def __init__(self, ranks: Ranks, plan: Plan, chain: Chain) -> None:
        self.ownership = Ownership(plan, chain, ranks.rank, ranks.size)
        self.part = RankPart(chain.model, self.ownership, ranks)
        self.links = Links(ranks, self.ownership.rank_of)
        owners, count = self.ownership.rank_of_stage, len(plan.stages)
        self.meeting = Meeting(ranks, chain.model, owners[::count], owners[count - 1 :: count])
        self.mesh: DeviceMesh | None = None
        self._ranks = ranks
        self._offset: float | None = None
        self._plan = plan

    @contextmanager
    def making(self) -> Iterator[None]:
        """Around the making of the pipeline: it fails on all ranks if it fails on one, or if their plans differ.

        Raises:
            RankError: it fails on another rank.
            ValueError: the ranks have different plans.
        """
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        plan = self._plan.model_dump_json(exclude={"alternatives", "profile"})
        mine = (
            failure and f"{type(failure).__name__}: {failure}",
            hashlib.blake2b(plan.encode()).hexdigest(),
        )
        everyone = self._ranks.gather(mine)
        if failure is not None:
            raise failure
        for rank, (text, found) in enumerate(everyone):
            if text:
                raise RankError(f"rank {rank} cannot make the pipeline: {text}")
            if found != everyone[0][1]:
                raise ValueError(
                    f"rank {rank} has another plan than rank 0: make it on one rank and read it on all (plan.save, "
                    "Plan.load), or use Pipeline.auto, which does so"
                )

    def connect(self) -> None:
        """Connect the replicas, and give all of them the parameters and buffers of the first. Behind the making."""
        replicas = self.ownership.ranks
        if len(replicas) == 1:
            return
        columns = list(zip(*replicas, strict=True))
        groups = {worker: self._group(columns) for worker in self.links.local}  # each adds up by itself
        first = next(iter(groups.values()))
        self.mesh = DeviceMesh.from_group(
            [first, self._group(replicas)], "cpu", replicas, mesh_dim_names=("dp", "pp")
        )
        self.links.reductions = Reductions(self._ranks, self.ownership.replica, groups)
        self.part.connect(first)

    def _group(self, rows: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Return the group of this rank, of those that all ranks make now: one for each row."""
        made = [dist.new_group(list(row), backend="gloo") for row in rows]
        mine = next(group for group, row in zip(made, rows, strict=True) if self._ranks.rank in row)
        assert isinstance(mine, dist.ProcessGroup)
        return mine

    def begin_backward(
        self, gradients: StepGradients, with_optimizers: bool, certain: bool, leaves: Iterable[Tensor]
    ) -> None:
        """Before the first backward, on a rank of a last stage.

        Args:
            gradients: of the step.
            with_optimizers: whether the optimizers of stages step within the step.
            certain: whether the gradients need no correction.
            leaves: of the loss.

        Raises:
            LossError: several replicas cannot share the loss out.
        """
        gradients.add(leaves := list(leaves))
        if len(self.ownership.ranks) == 1:
            return
        if leaves:
            raise LossError(
                "the loss has tensors of its own that get a gradient, of which each replica of the model would see "
                "its own micro-batches only: make the loss a part of the model, or plan with replicas=1"
            )
        if with_optimizers and not certain:
            raise LossError(
                "what the loss is divided by depends on the output of all replicas, and optimizers of the stages step "
                "before it is known: return (sum, count) with a count of the target alone, or make the pipeline "
                "without optimizer="
            )

    def end(self, sink: LossSink, keys: RngKeys, scaled: Sequence[Tensor]) -> None:
        """Share the loss, as :meth:`Meeting.end`, and what the layers of the first replica have written."""
        self.meeting.end(sink, keys, scaled)
        self.part.share_written()

    def begin(
        self,
        call: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        make: Make,
        options: str = "",
    ) -> Agreed:
        """Agree on a call, as :meth:`Meeting.begin`, and give shared parameters their newest values."""
        agreed = self.meeting.begin(call, args, kwargs, target, make, options)
        self.part.share_tied()
        return agreed

    def complete(self, recorder: Recorder) -> None:
        """Give every rank the times of all workers, on the clock of rank 0. All ranks call this after a traced run."""
        if self._offset is None:
            self._offset = self._ranks.clock_offset()
        recorder.adopt(self._ranks.gather(recorder.share(self.links.local, self._offset)))


def join(plan: Plan, chain: Chain, timeout: float | None, strict: bool) -> Joined | None:
    """Return this process's side of a pipeline on several processes; None in one process.

    Raises:
        ValueError: the plan or ``strict`` needs one process.
    """
    if (ranks := join_ranks(timeout)) is None:
        return None
    if strict or plan.cluster.emulated:
        what = "strict=True checks" if strict else "the plan's cluster emulates"
        raise ValueError(
            f"{what} virtual devices of one process: run without torchrun, or plan for devices without emulated speed, "
            "links and memory"
        )
    return Joined(ranks, plan, chain)


def planned_once(make: Callable[[], Plan], timeout: float | None) -> Plan:
    """Return the plan that rank 0 makes, on every rank; in one process just make it.

    Raises:
        Exception: what ``make`` raises, on rank 0.
        RankError: it has raised there, on the others.
    """
    ranks = join_ranks(timeout)
    if ranks is None:
        return make()
    text, failure = "", None
    if ranks.rank == 0:
        try:
            text = make().model_dump_json()
        except Exception as error:
            failure = error
    found, why = ranks.gather((text, failure and f"{type(failure).__name__}: {failure}"))[0]
    ranks.close("the plan is made")
    if failure is not None:
        raise failure
    if why:
        raise RankError(f"rank 0 cannot plan: {why}")
    return Plan.model_validate_json(found)
