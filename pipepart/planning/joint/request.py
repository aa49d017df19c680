"""JointRequest: the input of the joint search."""

from __future__ import annotations

from dataclasses import dataclass

from ...profiling import Profile
from ..constraints import Constraints
from ..costs.layer_ranges import ChainCosts
from ..costs.stage_memory import MODE_SETS, Mode
from ..costs.step_bound import step_bound
from ..partition.replica_groups import ReplicaGroups
from ..plans.options import PlanOptions


@dataclass(frozen=True)
class JointRequest:
    """Input of the joint search, which may use any cut, placement and order that the constraints allow.

    Attributes:
        profile: the layers, with costs for one number of micro-batches.
        groups: the devices, grouped for the replicas of the model; each replica gets the same order.
        costs: of the layers for this number of micro-batches.
        constraints: of the user, by layer index.
        asked: keywords of the user, stored in the plan.
        stages: number of stages; None for any.
        chunks: limit of stages per device; None for no limit.
    """

    profile: Profile
    groups: ReplicaGroups
    costs: ChainCosts
    constraints: Constraints
    asked: PlanOptions
    stages: int | None = None
    chunks: int | None = None

    @property
    def micro_batches(self) -> int:
        """Largest number of micro-batches of a replica."""
        return -(-self.costs.micro_batches // self.groups.replicas)

    @property
    def fixed_stages(self) -> int | None:
        """Number of stages that ``stages`` or ``cut_before`` demands; None for any."""
        return self.stages if self.stages is not None else self.constraints.stages

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Modes that stages may use, fastest first."""
        choices = self.asked.mode_choices(self.groups.cluster)
        return tuple(dict.fromkeys(mode for choice in choices for mode in MODE_SETS[choice]))

    @property
    def bound(self) -> float:
        """Lower bound of the step in seconds."""
        devices = self.groups.all_devices.devices
        return step_bound(
            self.profile.at(self.costs.micro_batches),
            [device.speed for device in devices],
            self.groups.replicas,
            action_seconds=min(device.action_seconds for device in devices),
        )
