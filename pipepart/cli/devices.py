"""The cluster that a command is given: a number of devices, a file, or a description of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..cluster import Cluster, as_cluster
from ..units import parse_bytes
from .errors import Mistake


@dataclass(frozen=True)
class DeviceOptions:
    """The options that describe the devices; exactly one of the first three is to be set."""

    devices: str | None = None
    cluster: Path | None = None
    described: tuple[str, ...] = ()
    link: str | None = None
    memory: str | None = None

    def make_cluster(self) -> Cluster:
        """The devices.

        Raises:
            Mistake: none or several of the ways to name devices were used, or one was used wrongly.
            ValueError: a size, speed or bandwidth that is none.
        """
        ways = [way for way in (self.devices, self.cluster, self.described) if way]
        if len(ways) != 1:
            raise Mistake(
                f"{'no devices are given' if not ways else 'the devices are given in more than one way'}: give one of "
                "--devices 2, --cluster FILE, or --device 24GiB for each device"
            )
        if self.link is not None and not self.described:
            raise Mistake(f"--link {self.link!r} goes with devices described by --device")
        if self.described:
            if self.memory is not None:
                raise Mistake(f"--memory {self.memory!r}: each --device has its memory already")
            return Cluster.parse(self.described, link=self.link)
        return self._limited(_load(self.cluster) if self.cluster else _of(self.devices or ""))

    def _limited(self, cluster: Cluster) -> Cluster:
        if self.memory is None:
            return cluster
        limit = parse_bytes(self.memory)
        devices = [device.model_copy(update={"memory_bytes": limit}) for device in cluster.devices]
        return cluster.model_copy(update={"devices": tuple(devices)})


def _load(path: Path) -> Cluster:
    try:
        return Cluster.load(path)
    except OSError as error:
        raise Mistake(f"cannot read the cluster {str(path)!r}: {error.strerror or error}") from None


def _of(text: str) -> Cluster:
    if text.isdecimal():
        return as_cluster(int(text))
    try:
        return as_cluster([torch.device(name.strip()) for name in text.split(",")])
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # an unknown name; a device that this torch or box has not
        raise Mistake(
            f"--devices {text!r}: give a number, or torch devices as in cuda:0,cuda:1 ({_first_line(error)})"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
