"""Ownership: which rank runs which worker and stage, and has which parameters and buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise

from torch import Tensor, nn

from ..capture import Chain, state_of
from ..planning import Plan


class Ownership:
    """The parts of a model that the ranks of a pipeline have.

    The devices of the plan's cluster, in their order, are shared out evenly: with as many processes as devices, process
    i drives device i. A tensor belongs to the rank of the first stage that uses it, and to rank 0 if none does.

    Args:
        plan: has the stages and their devices.
        chain: the layers of the model.
        rank: of this process.
        size: the number of processes.

    Attributes:
        rank_of: of each worker of the plan.
        stages: those of this rank.

    Raises:
        ValueError: the devices of the plan cannot be shared out among the processes.
    """

    def __init__(self, plan: Plan, chain: Chain, rank: int, size: int) -> None:
        self.rank_of = _rank_of(plan, size)
        if plan.replicas > 1 or plan.build_schedule().replicas > 1:
            raise ValueError(
                f"the plan has {plan.build_schedule().replicas} replicas of the model, which run in one process only: "
                "plan with replicas=1"
            )
        self._plan, self._chain, self._rank = plan, chain, rank
        device_of = plan.build_schedule().device_of
        self.rank_of_stage = [self.rank_of[device_of[stage]] for stage in range(len(plan.stages))]
        self.stages = frozenset(stage for stage, own in enumerate(self.rank_of_stage) if own == rank)

    @cached_property
    def _users(self) -> dict[Tensor, list[int]]:
        """The ranks whose layers use each tensor; found at the first use, as making the stages may replace tensors."""
        ends = accumulate((len(stage.layers) for stage in self._plan.stages), initial=0)
        found: dict[Tensor, dict[int, None]] = {}
        for (start, end), owner in zip(pairwise(ends), self.rank_of_stage, strict=True):
            for _, layer in self._chain.layers[start:end]:
                for tensor in state_of(layer):
                    found.setdefault(tensor, {})[owner] = None
        return {tensor: list(ranks) for tensor, ranks in found.items()}

    @cached_property
    def shared(self) -> dict[Tensor, list[int]]:
        """The tensors that layers on several ranks use, with these ranks, the owner first."""
        return {tensor: ranks for tensor, ranks in self._users.items() if len(ranks) > 1}

    def owner_of(self, tensor: Tensor) -> int:
        """Return the rank that a parameter or buffer belongs to."""
        return self._users.get(tensor, [0])[0]

    def is_mine(self, tensor: Tensor) -> bool:
        """Return whether a parameter or buffer belongs to this rank."""
        return self.owner_of(tensor) == self._rank

    def used_here(self, model: nn.Module) -> set[str]:
        """Return the keys of shared tensors that stages of this rank use and that belong to another."""
        state = model.state_dict(keep_vars=True)
        return {key for key, value in state.items() if self._rank in self.shared.get(value, ())}

    def names(self, model: nn.Module) -> Sequence[str]:
        """Return the keys of the model's state dict that belong to this rank."""
        state = model.state_dict(keep_vars=True)
        return [key for key, value in state.items() if not isinstance(value, Tensor) or self.is_mine(value)]


def _rank_of(plan: Plan, size: int) -> list[int]:
    """Return the rank that drives each worker of the plan.

    Raises:
        ValueError: the devices cannot be shared out, or a rank would have none with a stage.
    """
    count = len(plan.cluster)
    if count % size:
        raise ValueError(
            f"the plan's cluster has {count} devices and torchrun started {size} processes, of which each drives "
            f"equally many: start {count} (torchrun --nproc-per-node {count}), or plan for another cluster"
        )
    places = {device.name: place for place, device in enumerate(plan.cluster.devices)}
    found = [places[device.name] * size // count for device in plan.workers]
    idle = sorted(set(range(size)) - set(found))
    if idle:
        raise ValueError(
            f"no stage is on a device of rank {idle[0]}: the plan leaves out {', '.join(plan.unused_devices)}, as the "
            f"step would not be shorter. Plan with stages={size} to use them all, or for fewer devices, and start "
            "fewer processes"
        )
    return found
