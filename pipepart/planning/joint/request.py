"""JointRequest: what the joint search chooses from."""

from __future__ import annotations

from dataclasses import dataclass

from ...profiling import Profile
from ..constraints import Constraints
from ..costs.layer_ranges import ChainCosts
from ..costs.stage_memory import Mode
from ..costs.step_bound import step_bound
from ..partition.replica_groups import ReplicaGroups
from ..plans.options import PlanOptions
from ..stage_modes import mode_choices, modes_of


@dataclass(frozen=True)
class JointRequest:
    """What the joint search chooses from: any cut, placement and order that the constraints allow.

    Attributes:
        profile: the layers, with costs at the number of micro-batches only.
        groups: the devices, grouped for the replicas of the model; each replica gets the same order.
        costs: of the layers at the number of micro-batches.
        constraints: of the user, by layer index.
        asked: the keywords of the user, for the plan.
        fingerprint: of the profile.
        stages: their number; None for any.
        chunks: the most stages of a device; None for any number.
    """

    profile: Profile
    groups: ReplicaGroups
    costs: ChainCosts
    constraints: Constraints
    asked: PlanOptions
    fingerprint: str
    stages: int | None = None
    chunks: int | None = None

    @property
    def micro_batches(self) -> int:
        """The most micro-batches of one replica."""
        return -(-self.costs.micro_batches // self.groups.replicas)

    @property
    def fixed_stages(self) -> int | None:
        """The number of stages that was asked for, or that cut points make; None for any."""
        return self.stages if self.stages is not None else self.constraints.stages

    @property
    def modes(self) -> tuple[Mode, ...]:
        """What stages may do with their stashes, the fastest first."""
        return modes_of(
            mode_choices(self.groups.cluster, self.asked.recompute, self.asked.offload, asynchronous=False)
        )

    @property
    def bound(self) -> float:
        """Seconds that no plan can beat."""
        devices = self.groups.all_devices.devices
        return step_bound(
            self.profile.at(self.costs.micro_batches),
            [device.speed for device in devices],
            self.groups.replicas,
            action_seconds=min(device.action_seconds for device in devices),
        )
