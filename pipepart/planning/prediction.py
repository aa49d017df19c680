"""What the stages of a plan cost, from the profile: the figures that a plan shows and its simulation uses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cluster import Cluster
from ..profiling import Profile
from .costs.layer_ranges import ChainCosts
from .costs.stage_memory import PeakCandidates
from .stage_plan import Recompute, StagePlan


@dataclass(frozen=True)
class Piece:
    """One stage as the cut has it: its layers by their indices, its device, and what it makes again."""

    layers: slice
    device: str
    recompute: Recompute = "never"


def stage_plans(
    profile: Profile,
    costs: ChainCosts,
    cluster: Cluster,
    pieces: Sequence[Piece],
    kept: Sequence[PeakCandidates],
    older: Sequence[int],
) -> tuple[StagePlan, ...]:
    """The stages with all their figures.

    Args:
        profile: names the layers.
        costs: of the layers at the plan's micro-batch size.
        cluster: the devices.
        pieces: the stages in pipeline order.
        kept: what each keeps for its backwards at once, see :class:`~pipepart.planning.costs.stage_memory.StashCounts`.
        older: how many versions of its weights each keeps besides the newest.
    """
    crossings = [
        0.0,
        *(_crossing(costs, cluster, *pair) for pair in itertools.pairwise(pieces)),
        0.0,
    ]
    return tuple(
        _stage_plan(profile, costs, cluster, piece, before + behind, moments, versions)
        for piece, before, behind, moments, versions in zip(
            pieces, crossings, crossings[1:], kept, older, strict=False
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
    moments: PeakCandidates,
    older: int,
) -> StagePlan:
    layers, device = piece.layers, cluster.device(piece.device)
    forward = float(costs.forward[layers].sum()) / device.speed
    again = piece.recompute != "never"
    stash, given, deferred_bytes = costs.kept_sizes(layers)
    boundary = given if again else 0
    # Of moments that weigh the same the fullest, so that it is told the same whatever the stage's neighbours do.
    most = np.lexsort((moments[:, 0], moments.sum(axis=1), moments @ (stash, boundary, deferred_bytes)))[-1]
    full, input_only, deferred = moments[most].tolist()
    return StagePlan(
        layers=tuple(info.name for info in profile.layers[layers]),
        device=device.name,
        forward_seconds=forward,
        backward_input_seconds=float(costs.backward_input[layers].sum()) / device.speed,
        backward_weight_seconds=float(costs.backward_weight[layers].sum()) / device.speed,
        split_seconds=None if costs.split is None else float(costs.split[layers].sum()) / device.speed,
        transfer_seconds=transfer_seconds,
        output_bytes=int(costs.output_bytes[layers.stop - 1]),
        static_bytes=costs.held_bytes(layers) + older * costs.version_bytes(layers),
        gradient_bytes=sum(info.gradient_bytes for info in profile.layers[layers]),
        optimizer_bytes=sum(map(profile.optimizer_bytes, profile.layers[layers])),
        stash_bytes=stash,
        recompute=piece.recompute,
        recompute_seconds=forward if again else 0.0,
        boundary_bytes=boundary,
        deferred_bytes=deferred_bytes,
        transient_bytes=int(costs.peak_bytes[layers].max() + costs.arriving_bytes[layers.stop - 1]),
        in_flight=int(moments.sum(axis=1).max()),
        full_stashes=full,
        input_only=input_only,
        deferred_weight_grads=deferred,
    )
