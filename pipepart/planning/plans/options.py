"""PlanOptions: the keywords of ``plan``, used by a request and stored in the plan."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from ...cluster import Cluster
from ..compression import Compress
from ..costs.stage_memory import ModeChoice, OffloadChoice, RecomputeChoice


@dataclass(frozen=True)
class PlanOptions:
    """The keywords of :func:`pipepart.plan` with their defaults; :func:`~pipepart.replan` reuses those of a plan."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    schedule: str = "auto"
    micro_batches: int | Literal["auto"] = "auto"
    recompute: RecomputeChoice = "auto"
    offload: OffloadChoice = "auto"
    stages: int | Literal["auto"] = "auto"
    chunks: int | None = None
    replicas: int | Literal["auto"] = 1
    tensor: int = 1
    shard: bool = False
    colocate: tuple[tuple[str, ...], ...] = ()
    cut_before: tuple[str, ...] | None = None
    allow_split_ties: bool = False
    reduction: Literal["mean", "sum", "batch"] | None = None
    compress: Compress = None
    seconds: Annotated[float, Field(gt=0)] | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The keywords that differ from their defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    @property
    def inside(self) -> bool:
        """True if the stages are parallel inside: their layers or parameters are shared by several processes."""
        return self.shard or self.tensor != 1

    def mode_choices(self, cluster: Cluster, asynchronous: bool = False) -> tuple[ModeChoice, ...]:
        """Return the sets of stage modes to plan with; the fastest plan over all sets is returned to the user.

        ``offload="stash"`` allows only the set with offload. Otherwise the first set is that of the ``recompute``
        keyword. With ``offload="auto"``, the set with offload follows if the memory of a device is limited and the
        bandwidth between every device and its host is known.
        """
        if self.offload == "stash":
            return ("stash",)
        bound = any(device.memory_bytes is not None for device in cluster.devices)
        known = all(device.host_bandwidth is not None for device in cluster.devices)
        may_offload = self.offload == "auto" and self.recompute in ("auto", "never")
        may_offload = may_offload and not asynchronous and not self.inside
        return (self.recompute, "offload") if may_offload and bound and known else (self.recompute,)


def in_order(value: Any) -> Any:
    """Convert lists and sets to tuples, recursively; sets are sorted so that equal sets give equal plans."""
    if not isinstance(value, list | tuple | Set):
        return value
    inner = tuple(map(in_order, value))
    return tuple(sorted(inner, key=str)) if isinstance(value, Set) else inner
