"""Constraints on a cut: converts the layer names in the keywords of ``plan`` to layer indices."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..input_error import InputError
from ..profiling import Profile


@dataclass(frozen=True)
class Constraints:
    """Constraints on a cut, which do not contradict each other.

    Attributes:
        colocate: pairs of layers that must be in one stage.
        no_border: layers that no stage may begin with.
        pins: stage of each pinned layer.
        stages: number of stages if ``cut_before`` sets it; None for any.
        layers: number of layers.
    """

    colocate: tuple[tuple[int, int], ...]
    no_border: tuple[int, ...]
    pins: Mapping[int, int]
    stages: int | None
    layers: int

    def stage_ranges(self, stages: int) -> list[tuple[range, range]] | None:
        """Return [stages]: (range of allowed first layers, range of allowed ends); None without pins.

        The end of a stage is its last layer + 1.
        """
        if not self.pins:
            return None
        ranges = []
        for stage in range(stages):
            pinned = [layer for layer, at in self.pins.items() if at == stage]
            before = [layer for layer, at in self.pins.items() if at < stage]
            behind = [layer for layer, at in self.pins.items() if at > stage]
            begin = range(max(before, default=-1) + 1, min(pinned, default=self.layers - 1) + 1)
            end = range(max(pinned, default=0) + 1, min(behind, default=self.layers) + 1)
            ranges.append((begin, end))
        return ranges

    def moved_to_pins(self, borders: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the borders of one cut, each moved by the smallest distance that meets the pins of its two stages."""
        ranges = self.stage_ranges(len(borders) + 1)
        if ranges is None:
            return borders
        limits = [
            (max(end.start, begin.start), min(end.stop, begin.stop) - 1)
            for (_, end), (begin, _) in itertools.pairwise(ranges)
        ]
        return np.clip(borders, *np.array(limits, dtype=np.int64).reshape(-1, 2).T)

    def keep_pins(self, borders: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return [cuts]: True if the cut has every pinned layer in its stage. ``borders``: [cuts, stages - 1]."""
        keep = np.ones(len(borders), dtype=bool)
        for layer, stage in self.pins.items():
            keep &= (borders <= layer).sum(axis=1) == stage
        return keep


def read_constraints(
    profile: Profile,
    pin: Mapping[str, int] | None,
    colocate: Sequence[Collection[str]],
    no_cut_before: Collection[str],
    cut_before: Sequence[str] | None,
) -> Constraints:
    """Read the constraint keywords of :func:`pipepart.plan`.

    Raises:
        ValueError: a layer is not in the profile, a stage is not an integer >= 0, or constraints contradict each other.
    """
    index = {info.name: position for position, info in enumerate(profile.layers)}

    def find(name: str, what: str) -> int:
        if name not in index:
            near = ", ".join(map(repr, list(index)[:8])) + (", ..." if len(index) > 8 else "")
            raise InputError(f"{what} names layer {name!r}, which is none of the profile's: {near}")
        return index[name]

    for option, names in (("no_cut_before", no_cut_before), ("cut_before", cut_before)):
        if isinstance(names, str):
            raise InputError(f"{option} is a list of layers, got {names!r}")
    pins = {find(name, "pin"): _stage(name, stage) for name, stage in (pin or {}).items()}
    ordered = sorted(pins.items())
    for (layer, stage), (later, later_stage) in itertools.pairwise(ordered):
        if later_stage < stage:
            raise InputError(
                f"pin has layer {profile.layers[layer].name!r} in stage {stage} and {profile.layers[later].name!r}, "
                f"which runs after it, in stage {later_stage}"
            )
    ties = []
    for group in colocate:
        if isinstance(group, str):
            raise InputError(f"colocate is a list of groups of layers, got the text {group!r} as one")
        places = sorted(find(name, "colocate") for name in group)
        ties += [(places[0], place) for place in places[1:]]
    forbidden = {find(name, "no_cut_before") for name in no_cut_before}
    stages = None
    if cut_before is not None:
        wanted = {find(name, "cut_before") for name in cut_before}
        _check_cut_points(profile, wanted, forbidden, ties)
        forbidden |= set(range(1, len(profile.layers))) - wanted
        stages = len(wanted) + 1
    return Constraints(tuple(ties), tuple(sorted(forbidden)), pins, stages, len(profile.layers))


def _stage(name: str, stage: int) -> int:
    if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
        raise InputError(f"pin has layer {name!r} in stage {stage!r}: stages count from 0")
    return stage


def _check_cut_points(
    profile: Profile, wanted: Collection[int], forbidden: Collection[int], ties: Sequence[tuple[int, int]]
) -> None:
    for layer in sorted(wanted):
        name = profile.layers[layer].name
        if layer == 0:
            raise InputError(f"cut_before has {name!r}, the first layer: nothing comes before it")
        if layer in forbidden:
            raise InputError(f"cut_before and no_cut_before both have layer {name!r}")
        for first, last in ties:
            if first < layer <= last:
                raise InputError(
                    f"a cut before {name!r} parts layers {profile.layers[first].name!r} and "
                    f"{profile.layers[last].name!r}, which are to stay together"
                )
