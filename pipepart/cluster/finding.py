"""Makes the cluster that a user means by a number of devices or a list of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..input_error import InputTypeError
from .cluster import Cluster
from .real_devices import find_accelerators


def as_cluster(devices: int | Sequence[torch.device | str] | Cluster) -> Cluster:
    """Return a cluster for a number of accelerators (or virtual devices), a list of torch devices, or a cluster.

    Raises:
        TypeError: something else.
        ValueError: a number below 1.
    """
    if isinstance(devices, Cluster):
        return devices
    if isinstance(devices, bool) or not isinstance(devices, int | Sequence) or isinstance(devices, str):
        raise InputTypeError(
            f"devices must be a number, a list of torch devices or a Cluster, got {devices!r}"
        )
    if not isinstance(devices, int):
        return Cluster.of(devices)
    if 1 <= devices <= len(find_accelerators()):
        return Cluster.local(devices)
    return Cluster.virtual(devices)
