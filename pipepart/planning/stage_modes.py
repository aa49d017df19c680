"""Stage modes that a request allows: hold the stash on the device, recompute it, or offload it."""

from __future__ import annotations

from ..cluster import Cluster
from ..input_error import InputError
from .costs.stage_memory import MODE_SETS, Mode, ModeChoice, OffloadChoice, RecomputeChoice


def check_modes(recompute: RecomputeChoice, offload: OffloadChoice, asynchronous: bool) -> None:
    """Check that the keywords ``recompute`` and ``offload`` of :func:`pipepart.plan` agree.

    Raises:
        ValueError: they contradict each other or the schedule.
    """
    if offload == "stash" and recompute not in ("auto", "never"):
        raise InputError(
            f"offload='stash' keeps the stashes of all stages on their hosts, and recompute={recompute!r} makes them "
            "again: choose one of the two"
        )
    if offload == "stash" and asynchronous:
        raise InputError(
            "offload='stash' is not possible under asynchronous schedules, whose stages keep versions of their "
            "weights: choose another schedule"
        )


def check_host_links(cluster: Cluster, offload: OffloadChoice) -> None:
    """Check that the seconds of ``offload="stash"`` can be predicted on every device.

    Raises:
        ValueError: the bandwidth between a device and its host is unknown.
    """
    if offload != "stash":
        return
    for device in cluster.devices:
        if device.host_bandwidth is None and device.torch_device != "cpu":
            raise InputError(
                f"offload='stash' needs the bandwidth between {device.name!r} and its host, host_bandwidth of the "
                "device: describe it, as Cluster.parse(..., host_link='25GB/s') does"
            )


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
