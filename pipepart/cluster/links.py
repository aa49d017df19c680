"""Links: what a message between two devices takes, within a host, between hosts, and between single pairs."""

from __future__ import annotations

from pydantic import Field

from ..document import Value
from ..units import parse_bandwidth

# One hand-off between two worker threads: a message through a queue and the wake-up of a sleeping thread.
VIRTUAL_LATENCY_SECONDS = 20e-6


class Link(Value):
    """A link between two devices: a transfer takes ``latency + bytes / bandwidth`` seconds."""

    bandwidth: float | None = Field(default=None, gt=0)
    latency: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def seconds(self, size: float) -> float:
        """Return the seconds to move ``size`` bytes once; a bandwidth of None is infinite."""
        return self.latency + (size / self.bandwidth if self.bandwidth else 0.0)


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


def make_network(given: float | str | Network, latency: float) -> Network:
    """Return a network of this bandwidth and latency; a Network as it is."""
    if isinstance(given, Network):
        return given
    return Network(bandwidth=parse_bandwidth(given), latency=latency)
