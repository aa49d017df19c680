"""Link bandwidth and latency between devices: within a host, between hosts, and for single pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from ..document import Value
from ..input_error import InputError
from ..units import counted, parse_bandwidth

# Latency of a message between two worker threads: a queue and the wake-up of a sleeping thread.
VIRTUAL_LATENCY_SECONDS = 20e-6


CompressedType = Literal["bf16", "int8"]


class Compression(Value):
    """Compression of the messages on a link.

    Attributes:
        dtype: dtype that floating-point tensors are sent as.
        bytes_left: compressed bytes over original bytes, on average over the layers of a model.
        conversion_seconds: seconds per original byte to compress a message at one end and restore it at the other.
    """

    dtype: CompressedType
    bytes_left: float = Field(gt=0, allow_inf_nan=False)
    conversion_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class Link(Value):
    """A link between two devices: a transfer takes ``latency + bytes / bandwidth`` seconds.

    Attributes:
        bandwidth: bytes per second; None for no limit.
        latency: seconds per message.
        compress: compression of activations and their gradients; None for no compression.
            ``pipepart.plan(compress=...)`` sets it.
    """

    bandwidth: float | None = Field(default=None, gt=0)
    latency: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    compress: Compression | None = None

    @classmethod
    def from_seconds(cls, size: int, short_seconds: float, long_seconds: float) -> Link:
        """Return the link that takes ``short_seconds`` for a short message, and ``long_seconds`` for ``size`` bytes."""
        return Link(bandwidth=size / max(long_seconds - short_seconds, 1e-9), latency=short_seconds)

    @property
    def seconds_per_byte(self) -> float:
        """Seconds for an uncompressed byte of a message between stages, with compression; 0 for no limit."""
        per_byte = 1 / self.bandwidth if self.bandwidth else 0.0
        if self.compress is None:
            return per_byte
        return self.compress.bytes_left * per_byte + self.compress.conversion_seconds

    def seconds(self, size: float) -> float:
        """Return the transfer seconds of a message of ``size`` bytes (uncompressed) between two stages."""
        return self.latency + size * self.seconds_per_byte


class PairLink(Link):
    """The link between two devices, given by their names. It is the same in both directions."""

    between: tuple[str, str]


class Network(Link):
    """The network between hosts, or between groups of hosts.

    Attributes:
        ports: number of ports of each host (or group), shared evenly by its devices. Messages in one direction through
            one port are sent one after the other. ``bandwidth`` is that of a port.
    """

    ports: int = Field(default=1, ge=1)


def make_networks(
    network: float | str | Network | Sequence[float | str | Network] | None,
    latency: float,
    hosts: int | Sequence[int],
) -> tuple[Network, ...]:
    """Return the networks between hosts, one per tier; arguments as for :meth:`pipepart.Cluster.parse`.

    Raises:
        ValueError: the number of networks is not that of the tiers, or a bandwidth cannot be parsed.
    """
    single = isinstance(network, float | int | str | Network)
    networks = [] if network is None else [network] if single else network
    sizes = [hosts] if isinstance(hosts, int) else hosts
    tiers = len(sizes) if math.prod(sizes) > 1 else 0
    if not tiers and networks:
        raise InputError(f"network={network!r} joins hosts, and there is one: give hosts=")
    if len(networks) != tiers:
        needed = counted(tiers, "network")
        raise InputError(f"hosts={hosts!r} needs {needed}, as in network='25GB/s', got {network!r}")
    return tuple(
        entry if isinstance(entry, Network) else Network(bandwidth=parse_bandwidth(entry), latency=latency)
        for entry in networks
    )
