"""Converts the argument ``devices=`` (a number, a list or a cluster) to a cluster."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..input_error import InputTypeError
from .cluster import Cluster
from .real_devices import find_accelerators


def as_cluster(devices: int | Sequence[torch.device | str] | Cluster) -> Cluster:
    """Return the cluster for the argument ``devices``: a number, a list of torch devices, or a cluster.

    A number means accelerators of this machine if there are enough, otherwise virtual devices.

    Raises:
        TypeError: ``devices`` has another type.
        ValueError: the number is below 1.
    """
    if isinstance(devices, Cluster):
        return devices
    if isinstance(devices, int) and not isinstance(devices, bool):
        local = 1 <= devices <= len(find_accelerators())
        return Cluster.local(devices) if local else Cluster.virtual(devices)
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        return Cluster.of(devices)
    raise InputTypeError(f"devices must be a number, a list of torch devices or a Cluster, got {devices!r}")
