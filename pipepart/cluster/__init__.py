"""The devices that a pipeline runs on, and the links between them."""

from .cluster import Cluster, as_cluster
from .devices import Device
from .links import VIRTUAL_LATENCY_SECONDS, CompressedType, Compression, Link, Network, PairLink

__all__ = [
    "VIRTUAL_LATENCY_SECONDS",
    "Cluster",
    "CompressedType",
    "Compression",
    "Device",
    "Link",
    "Network",
    "PairLink",
    "as_cluster",
]
