"""Compression of messages: marks links of a cluster as compressed, with the compression ratio and its cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from ..cluster import Cluster, CompressedType, Compression
from ..input_error import InputError
from ..profiling import Profile

Tier = Literal["link", "network"]
BLOCK = 256  # values of a tensor that share a scale in int8
_BYTES = {"bf16": 2, "int8": 1}
# Seconds to compress a byte of a message. CPU: measured for float32 on one core. Accelerator: estimated as passes over
# memory of 1 TB/s.
_CONVERSION = {"cpu": {"bf16": 0.2e-9, "int8": 1.4e-9}, "accelerator": {"bf16": 0.01e-9, "int8": 0.04e-9}}


Compress = CompressedType | Mapping[Tier, CompressedType] | None


def compressed_tiers(compress: Any, cluster: Cluster) -> dict[Tier, CompressedType]:
    """Return the compressed type of each tier of a cluster that is compressed.

    Args:
        compress: as in :func:`pipepart.plan`. A type without a tier applies to the links between hosts, or to all links
            if the cluster has one host.
        cluster: has the links.

    Raises:
        InputError: the type or tier is unknown, or the cluster does not have the tier.
    """
    if compress is None:
        return {}
    tiers: Mapping[Any, Any] = (
        compress if isinstance(compress, Mapping) else {"network" if cluster.network else "link": compress}
    )
    for tier, dtype in tiers.items():
        if tier not in get_args(Tier) or not isinstance(dtype, str) or dtype not in _BYTES:
            raise InputError(
                "compress must be None, 'bf16' or 'int8', or one of these for 'link', within a host, and 'network', "
                f"between hosts, as in compress={{'network': 'int8'}}; got {compress!r}"
            )
        if tier == "network" and not cluster.network:
            raise InputError(
                f"compress={compress!r} is for links between hosts, and all devices of the cluster are in one: write "
                f"compress={{'link': {dtype!r}}} for those between its devices"
            )
    return dict(tiers)


def without_compression(cluster: Cluster) -> Cluster:
    """Return the cluster without compression on any link."""
    return _marked(cluster, {"compress": None}, {"compress": None}) if cluster.compressed else cluster


def compress_links(cluster: Cluster, compress: Any, profile: Profile) -> Cluster:
    """Return the cluster with compression on the links that ``compress`` selects, and on no other link.

    Raises:
        InputError: as :func:`compressed_tiers`.
    """
    tiers = compressed_tiers(compress, cluster)
    if not tiers:
        return without_compression(cluster)
    on_cpu = any(device.kind == "cpu" for device in cluster.devices)
    conversion = _CONVERSION["cpu" if on_cpu else "accelerator"]
    marks = {
        tier: {
            "compress": Compression(
                dtype=dtype, bytes_left=_bytes_left(profile, dtype), conversion_seconds=conversion[dtype]
            )
        }
        for tier, dtype in tiers.items()
    }
    none = {"compress": None}
    return _marked(cluster, marks.get("link", none), marks.get("network", none))


def _marked(cluster: Cluster, within: Mapping[str, Any], between: Mapping[str, Any]) -> Cluster:
    """Return the cluster with link fields updated: by ``within`` inside hosts, by ``between`` across hosts."""
    places = cluster.places
    return cluster.model_copy(
        update={
            "link": cluster.link.model_copy(update=within),
            "links": tuple(
                link.model_copy(update=between if places.tier(*link.between) else within)
                for link in cluster.links
            ),
            "network": tuple(tier.model_copy(update=between) for tier in cluster.network),
        }
    )


def is_compressed(dtype: torch.dtype, to: CompressedType) -> bool:
    """Return True if compression to type ``to`` makes values of ``dtype`` smaller."""
    return dtype.is_floating_point and dtype.itemsize > _BYTES[to]


def scale_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the int8 scales for a tensor of type ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def _bytes_left(profile: Profile, to: CompressedType) -> float:
    """Return compressed bytes over bytes for all layer outputs; the ratio of float32 if the outputs are unknown."""
    specs = [spec for info in profile.layers[:-1] for spec in info.outputs]
    pairs = [(getattr(torch, spec.dtype), spec.bytes) for spec in specs]
    before = sum(size for _, size in pairs)
    if not before:
        pairs, before = [(torch.float32, BLOCK * 4)], BLOCK * 4
    return sum(_bytes_after(dtype, size, to) for dtype, size in pairs) / before


def _bytes_after(dtype: torch.dtype, size: int, to: CompressedType) -> int:
    if not is_compressed(dtype, to):
        return size
    count = size // dtype.itemsize
    scales = -(-count // BLOCK) * scale_type(dtype).itemsize if to == "int8" else 0
    return count * _BYTES[to] + scales
