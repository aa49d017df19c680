"""Stage modes that a request allows: hold the stash on the device, recompute it, or offload it."""

from __future__ import annotations

from ..cluster import Cluster
from .costs.stage_memory import MODE_SETS, Mode, ModeChoice, OffloadChoice, RecomputeChoice


def mode_choices(
    cluster: Cluster, recompute: RecomputeChoice, offload: OffloadChoice, asynchronous: bool
) -> tuple[ModeChoice, ...]:
    """Return the sets of stage modes to plan with; the fastest plan over all sets is returned to the user.

    ``offload="stash"`` allows only the set with offload. Otherwise the first set is that of the ``recompute`` keyword.
    With ``offload="auto"``, the set with offload follows if the memory of a device is limited and the bandwidth between
    every device and its host is known.
    """
    if offload == "stash":
        return ("stash",)
    bound = any(device.memory_bytes is not None for device in cluster.devices)
    known = all(device.host_bandwidth is not None for device in cluster.devices)
    if offload == "auto" and recompute in ("auto", "never") and bound and known and not asynchronous:
        return recompute, "offload"
    return (recompute,)


def modes_of(choices: tuple[ModeChoice, ...]) -> tuple[Mode, ...]:
    """Return all modes that a stage may use."""
    return tuple(dict.fromkeys(mode for choice in choices for mode in MODE_SETS[choice]))
