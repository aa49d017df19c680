"""Link bandwidth and latency between devices: within a host, between hosts, and per device pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from ..document import Value
from ..input_error import InputError
from ..units import counted, parse_bandwidth

# One hand-off between two worker threads: a message through a queue and the wake-up of a sleeping thread.
VIRTUAL_LATENCY_SECONDS = 20e-6


CompressedType = Literal["bf16", "int8"]


class Compression(Value):
    """How messages are compressed on a link.

    Attributes:
        dtype: what floating-point tensors are sent as.
        bytes_left: the part of the bytes of a message that is sent, on average over the layers of a model.
        conversion_seconds: for each byte of a message, to compress it on one end and restore it on the other.
    """

    dtype: CompressedType
    bytes_left: float = Field(gt=0, allow_inf_nan=False)
    conversion_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class Link(Value):
    """A link between two devices: a transfer takes ``latency + bytes / bandwidth`` seconds.

    Attributes:
        bandwidth: bytes per second; None is infinite.
        latency: seconds per message.
        compress: how activations and their gradients are sent in fewer bytes; None if they are not.
            ``pipepart.plan(compress=...)`` sets it.
    """

    bandwidth: float | None = Field(default=None, gt=0)
    latency: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    compress: Compression | None = None

    @property
    def message_bandwidth(self) -> float | None:
        """Bytes per second of messages between stages, counted before they are compressed. None is infinite."""
        if self.compress is None:
            return self.bandwidth
        on_link = self.compress.bytes_left / self.bandwidth if self.bandwidth else 0.0
        seconds = on_link + self.compress.conversion_seconds
        return 1 / seconds if seconds else None

    def seconds(self, size: float) -> float:
        """Return the seconds that a message of ``size`` bytes takes between two stages."""
        bandwidth = self.message_bandwidth
        return self.latency + (size / bandwidth if bandwidth else 0.0)


class PairLink(Link):
    """The link of two devices, by their names, the same in both directions."""

    between: tuple[str, str]


class Network(Link):
    """What joins hosts, or groups of hosts.

    Attributes:
        ports: of each host (or group). Its devices share them evenly; messages of one direction through one port
            follow each other. ``bandwidth`` is that of a port.
    """

    ports: int = Field(default=1, ge=1)


def make_networks(
    given: float | str | Network | Sequence[float | str | Network] | None,
    latency: float,
    hosts: int | Sequence[int],
) -> tuple[Network, ...]:
    """Return the networks that join hosts, one for each tier; arguments as for :meth:`pipepart.Cluster.parse`.

    Raises:
        ValueError: there are more or fewer than tiers, or a bandwidth cannot be parsed.
    """
    one_number = isinstance(given, float | int | str | Network)
    each = [] if given is None else [given] if one_number else given
    sizes = [hosts] if isinstance(hosts, int) else hosts
    tiers = len(sizes) if math.prod(sizes) > 1 else 0
    if len(each) != tiers:
        raise InputError(
            f"hosts={hosts!r} needs {counted(tiers, 'network')}, as in network='25GB/s', got {given!r}"
            if tiers
            else f"network={given!r} joins hosts, and there is one: give hosts="
        )
    return tuple(
        one if isinstance(one, Network) else Network(bandwidth=parse_bandwidth(one), latency=latency)
        for one in each
    )
