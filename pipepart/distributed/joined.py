"""Joined: a pipeline whose stages are on several processes, from its making to its last call."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..capture import Chain
from ..planning import Plan
from ..runtime.observe.recorder import Recorder
from ..runtime.transport.ranks import Links
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

    Raises:
        ValueError: the plan's devices cannot be shared out among the ranks.
    """

    def __init__(self, ranks: Ranks, plan: Plan, chain: Chain) -> None:
        self.ownership = Ownership(plan, chain, ranks.rank, ranks.size)
        self.part = RankPart(chain.model, self.ownership, ranks)
        self.links = Links(ranks, self.ownership.rank_of)
        first, *_, last = (*self.ownership.rank_of_stage, self.ownership.rank_of_stage[-1])
        self.meeting = Meeting(ranks, chain.model, first, last)
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

    def begin(
        self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, make: Make
    ) -> Agreed:
        """Agree on a call, as :meth:`Meeting.begin`, and give shared parameters their newest values."""
        agreed = self.meeting.begin(call, args, kwargs, target, make)
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
