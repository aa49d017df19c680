"""Makes the cluster from command line options: a number of devices, a file, or a description of each device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ..cluster import Cluster, as_cluster
from .errors import UsageError
from .files import read

_FORMS = "give a number of at least 1, or torch devices as in cuda:0,cuda:1"


def make_cluster(
    devices: str | None,
    cluster: Path | None = None,
    described: Sequence[str] = (),
    bandwidth: str | None = None,
) -> Cluster:
    """Make the cluster from the options of these names; ``described`` are those of ``--device``.

    Raises:
        UsageError: not exactly one of the first three is given, or ``bandwidth`` does not go with it.
        InputError: a size, speed or bandwidth cannot be parsed.
    """
    if sum(map(bool, (devices, cluster, described))) != 1:
        raise UsageError(
            "give the devices in one way: --devices 2, --cluster FILE, or --device 24GiB for each device"
        )
    if bandwidth is not None and not described:
        raise UsageError(f"--bandwidth {bandwidth!r} goes with devices described by --device")
    if described:
        return Cluster.parse(list(described), link=bandwidth)
    if cluster:
        return read(Cluster, cluster)
    text = devices or ""
    if text.isdecimal():
        return as_cluster(int(text))
    if text.lstrip("-").isdecimal():
        raise UsageError(f"--devices {text!r}: {_FORMS}")
    return as_cluster([torch_device("--devices", name, _FORMS) for name in text.split(",")])


def torch_device(option: str, text: str, forms: str = "give one as cpu or cuda:0") -> torch.device:
    """Return a device of this machine by torch's name for it.

    Raises:
        UsageError: torch or this machine does not know it.
    """
    try:
        device = torch.device(text.strip())
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{option} {text!r}: torch has no such device here: {forms} ({reason})") from None
    return device
