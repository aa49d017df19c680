"""Ownership: the workers, stages, parameters and buffers of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeVar

from torch import Tensor, nn

from ..capture import Chain, state_of
from ..input_error import InputError
from ..planning import Plan

T = TypeVar("T")


class Ownership:
    """The parts of a model that each rank of a pipeline owns.

    The devices of the plan's cluster, in their order, are shared out evenly: with as many processes as devices, process
    i drives device i. A tensor belongs to the rank of the first stage that uses it, and to the first rank if none does.
    Each replica of the model has ranks of its own, and a tensor belongs to one of each.

    With tensor parallelism a device of the plan is a group of consecutive ranks, which own the same stages. Their
    places in the group are the lanes. All ranks below are those of lane 0; :meth:`of_lanes` gives the others.

    Args:
        plan: has the stages and their devices.
        chain: the layers of the model.
        rank: of this process.
        size: the number of processes.

    Attributes:
        tensor: the number of lanes.
        lane: of this process.
        rank_of: of each worker of the plan.
        rank_of_stage: of each stage of the schedule, replica by replica.
        stages: those of the model that this rank runs.
        ranks: of each replica of the model, those of the same stages in the same places.
        replica: that this rank is part of.

    Raises:
        ValueError: the devices of the plan cannot be shared out among the processes, or the schedule needs one process.
    """

    def __init__(self, plan: Plan, chain: Chain, rank: int, size: int) -> None:
        self.tensor = tensor = plan.tensor
        self.rank_of = _rank_of(plan, size)
        self.lane = rank % tensor
        rank -= self.lane
        schedule, count = plan.build_schedule(), len(plan.stages)
        if schedule.replicas != plan.replicas:
            raise InputError(
                f"schedule {plan.schedule!r} runs two copies of the model in one process: run without torchrun, or "
                "plan with another schedule, for example 'dualpipe-v'"
            )
        self.rank_of_stage = owners = [self.rank_of[row] for row in schedule.device_of]
        self.ranks = _by_replica(owners, count)
        self.replica = next(number for number, ranks in enumerate(self.ranks) if rank in ranks)
        self._plan, self._chain = plan, chain
        self._place = self.ranks[self.replica].index(rank)
        ranks_here = self.rank_of_stage[self.replica * count :][:count]
        self.stages = frozenset(stage for stage, owner in enumerate(ranks_here) if owner == rank)

    def plan_of_lane(self) -> Plan:
        """Return the plan in which a group of devices is, under its name, the device of this process's lane."""
        if self.tensor == 1:
            return self._plan
        cluster = self._plan.cluster
        devices = [
            device.model_copy(update={"torch_device": member.torch_device, "threads": member.threads})
            for device, member in zip(
                cluster.devices, (*cluster.devices[self.lane :], *cluster.devices[: self.lane]), strict=True
            )
        ]
        return self._plan.model_copy(
            update={"cluster": cluster.model_copy(update={"devices": tuple(devices)})}
        )

    def of_lanes(self, ranks: Sequence[int]) -> list[list[int]]:
        """Return the ranks in the places of ``ranks`` of lane 0, for each lane."""
        return [[rank + lane for rank in ranks] for lane in range(self.tensor)]

    def of_first_lane(self, values: Sequence[T]) -> Sequence[T]:
        """Return what ranks of lane 0 have given, of what all have given: ranks of other lanes have the same."""
        return values[:: self.tensor]

    def forget(self) -> None:
        """Find the users of tensors anew: layers have other tensors now."""
        for name in ("_users", "shared"):
            vars(self).pop(name, None)

    @cached_property
    def _users(self) -> dict[Tensor, list[int]]:
        """The ranks whose layers use each tensor, those of further replicas apart; the rank that it belongs to first.

        Found at the first use, as making the stages may replace tensors, and again for a tensor that is not among them.
        """
        ends = accumulate((len(stage.layers) for stage in self._plan.stages), initial=0)
        users: dict[Tensor, dict[int, None]] = {}
        for (start, end), owner in zip(pairwise(ends), self.rank_of_stage, strict=False):
            for _, layer in self._chain.layers[start:end]:
                for tensor in state_of(layer):
                    users.setdefault(tensor, {})[owner] = None
        return {tensor: list(ranks) for tensor, ranks in users.items()}

    @cached_property
    def shared(self) -> dict[Tensor, list[int]]:
        """Tensors that layers on several ranks use, with these ranks; the owner comes first."""
        return {tensor: ranks for tensor, ranks in self._users.items() if len(ranks) > 1}

    def owner_of(self, tensor: Tensor) -> int:
        """Return the rank of the first replica that owns a parameter or buffer."""
        if tensor not in self._users:
            del self._users  # a forward may have bound a buffer anew
        return self._users.get(tensor, self.ranks[0])[0]

    def is_mine(self, tensor: Tensor) -> bool:
        """Return True if this rank owns a tensor, within its replica."""
        return self.ranks[0].index(self.owner_of(tensor)) == self._place

    def used_here(self, model: nn.Module) -> set[str]:
        """Return the keys of shared tensors that this rank's stages use and another rank owns."""
        state = model.state_dict(keep_vars=True)
        mine = self.ranks[0][self._place]
        return {key for key, value in state.items() if mine in self.shared.get(value, ())}

    def names(self, model: nn.Module) -> Sequence[str]:
        """Return the keys of the model's state dict that this rank owns."""
        state = model.state_dict(keep_vars=True)
        return [key for key, value in state.items() if not isinstance(value, Tensor) or self.is_mine(value)]


def _by_replica(rank_of_stage: Sequence[int], count: int) -> list[list[int]]:
    """Return the ranks of each replica, of ``count`` stages each, in the order of their first stages.

    Raises:
        ValueError: a rank has stages of several replicas, or replicas are shared out in different ways.
    """
    owners = [rank_of_stage[start : start + count] for start in range(0, len(rank_of_stage), count)]
    distinct = [list(dict.fromkeys(ranks_of_replica)) for ranks_of_replica in owners]
    taken = [rank for ranks in distinct for rank in ranks]
    alike = [
        [ranks.index(rank) for rank in ranks_of_replica]
        for ranks, ranks_of_replica in zip(distinct, owners, strict=True)
    ]
    if len(set(taken)) < len(taken) or any(order != alike[0] for order in alike):
        shown = "; ".join(f"replica {number}: ranks {ranks}" for number, ranks in enumerate(distinct))
        raise InputError(
            f"each of the {len(distinct)} replicas needs processes of its own, which share its stages out alike, and "
            f"the plan gives {shown}: start one process a device, or plan with replicas=1"
        )
    return distinct


def _rank_of(plan: Plan, size: int) -> list[int]:
    """Return the rank that drives each worker of the plan, or the first of ``plan.tensor`` ranks that do.

    Raises:
        ValueError: the devices cannot be shared out, or a rank would have none with a stage.
    """
    count, tensor = len(plan.cluster), plan.tensor
    if tensor > 1 and size != count:
        raise InputError(
            f"the plan was made with tensor={tensor} for {count} devices, each of which needs a process, and torchrun "
            f"started {size}: start {count} (torchrun --nproc-per-node {count})"
        )
    if count % size:
        raise InputError(
            f"the plan's cluster has {count} devices and torchrun started {size} processes, of which each drives "
            f"equally many: start {count} (torchrun --nproc-per-node {count}), or plan for another cluster"
        )
    places = {device.name: place for place, device in enumerate(plan.cluster.devices)}
    rank_of = [places[device.name] * size // count for device in plan.workers]
    idle = sorted(set(range(size)) - {first + lane for first in rank_of for lane in range(tensor)})
    if idle:
        raise InputError(
            f"no stage is on a device of rank {idle[0]}: the plan leaves out {', '.join(plan.unused_devices)}, as the "
            f"step would not be shorter. Plan with stages={count}, schedule='1f1b' to use them all, or for fewer "
            "devices, and start fewer processes"
        )
    return rank_of
