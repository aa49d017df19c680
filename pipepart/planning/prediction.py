"""The figures of a plan's stages, computed from the profile: seconds, bytes, and stash counts at the memory peak."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cluster import Cluster
from ..profiling import Profile
from .costs.layer_ranges import ChainCosts
from .costs.stage_memory import Ints
from .stage_plan import Recompute, StagePlan


@dataclass(frozen=True)
class Piece:
    """One stage of a cut: its layers by index, its device, and its recompute mode."""

    layers: slice
    device: str
    recompute: Recompute = "never"


def stage_plans(
    profile: Profile,
    costs: ChainCosts,
    cluster: Cluster,
    pieces: Sequence[Piece],
    counts: Sequence[Ints],
    older: Sequence[int],
) -> tuple[StagePlan, ...]:
    """Compute the figures of all stages.

    Args:
        profile: names the layers.
        costs: of the layers at the plan's micro-batch size.
        cluster: the devices.
        pieces: the stages in pipeline order.
        counts: per stage [moments, 3], see :class:`~pipepart.planning.costs.stage_memory.StashCounts`.
        older: per stage, the versions of its weights besides the newest.
    """
    inner = (_crossing(costs, cluster, *pair) for pair in itertools.pairwise(pieces))
    crossings = [0.0, *inner, 0.0]
    return tuple(
        _stage_plan(profile, costs, cluster, piece, before + behind, own, versions)
        for piece, before, behind, own, versions in zip(
            pieces, crossings, crossings[1:], counts, older, strict=False
        )
    )


def _crossing(costs: ChainCosts, cluster: Cluster, before: Piece, behind: Piece) -> float:
    if before.device == behind.device:
        return 0.0
    return costs.crossing_seconds(behind.layers.start, cluster.link_between(before.device, behind.device))


def _stage_plan(
    profile: Profile,
    costs: ChainCosts,
    cluster: Cluster,
    piece: Piece,
    transfer_seconds: float,
    counts: Ints,
    older: int,
) -> StagePlan:
    layers, device = piece.layers, cluster.device(piece.device)
    infos = profile.layers[layers]
    forward = float(costs.forward[layers].sum()) / device.speed
    recomputes = piece.recompute != "never"
    sizes = costs.sizes(layers)
    stash, boundary, deferred = map(int, sizes.per_micro_batch[0, 0])
    boundary = boundary if recomputes else 0
    # Of moments with equal bytes the one with the most micro-batches, so that neighbours do not change the choice.
    most = np.lexsort((counts[:, 0], counts.sum(axis=1), counts @ (stash, boundary, deferred)))[-1]
    full_stashes, input_only, deferred_weight_grads = counts[most].tolist()
    return StagePlan(
        layers=tuple(info.name for info in infos),
        device=device.name,
        forward_seconds=forward,
        backward_input_seconds=float(costs.backward_input[layers].sum()) / device.speed,
        backward_weight_seconds=float(costs.backward_weight[layers].sum()) / device.speed,
        split_seconds=None if costs.split is None else float(costs.split[layers].sum()) / device.speed,
        transfer_seconds=transfer_seconds,
        output_bytes=int(costs.output_bytes[layers.stop - 1]),
        static_bytes=int(sizes.static[0, 0] + older * sizes.version[0, 0]),
        gradient_bytes=sum(info.gradient_bytes for info in infos),
        optimizer_bytes=sum(map(profile.optimizer_bytes, infos)),
        buffer_bytes=sum(info.buffer_bytes for info in infos),
        stash_bytes=stash,
        recompute=piece.recompute,
        recompute_seconds=forward if recomputes else 0.0,
        boundary_bytes=boundary,
        deferred_bytes=deferred,
        transient_bytes=int(sizes.transient[0, 0]),
        in_flight=int(counts.sum(axis=1).max()),
        full_stashes=full_stashes,
        input_only=input_only,
        deferred_weight_grads=deferred_weight_grads,
    )
