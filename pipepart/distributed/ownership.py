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

    A tensor belongs to the rank of the first stage that uses it, and to rank 0 if none does.

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
        workers = len(plan.workers)
        if workers % size:
            raise ValueError(
                f"the plan has {workers} devices and torchrun started {size} processes, of which each drives equally "
                f"many: start {workers} (torchrun --nproc-per-node {workers}), or plan with another number of stages"
            )
        if plan.replicas > 1 or plan.build_schedule().replicas > 1:
            raise ValueError(
                f"the plan has {plan.build_schedule().replicas} replicas of the model, which run in one process only: "
                "plan with replicas=1"
            )
        self.rank_of = [worker * size // workers for worker in range(workers)]
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
