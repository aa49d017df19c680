"""Constraints on a cut: converts the layer names in the keywords of ``plan`` to layer indices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..input_error import InputError
from ..profiling import Profile


@dataclass(frozen=True)
class Constraints:
    """Constraints on a cut, which do not contradict each other.

    Attributes:
        colocate: pairs of layers that must be in one stage.
        no_border: layers that no stage may begin with.
        stages: number of stages if ``cut_before`` sets it; None for any.
    """

    colocate: tuple[tuple[int, int], ...]
    no_border: tuple[int, ...]
    stages: int | None


def read_constraints(
    profile: Profile, colocate: Sequence[Collection[str]], cut_before: Sequence[str] | None
) -> Constraints:
    """Read the constraint keywords of :func:`pipepart.plan`.

    Raises:
        ValueError: a layer is not in the profile, or constraints contradict each other.
    """
    index = {info.name: position for position, info in enumerate(profile.layers)}

    def find(name: str, what: str) -> int:
        if name not in index:
            near = ", ".join(map(repr, list(index)[:8])) + (", ..." if len(index) > 8 else "")
            raise InputError(f"{what} names layer {name!r}, which is none of the profile's: {near}")
        return index[name]

    ties = []
    for group in colocate:
        if isinstance(group, str):
            raise InputError(f"colocate is a list of groups of layers, got the text {group!r} as one")
        places = sorted(find(name, "colocate") for name in group)
        ties += [(places[0], place) for place in places[1:]]
    if cut_before is None:
        return Constraints(tuple(ties), (), None)
    if isinstance(cut_before, str):
        raise InputError(f"cut_before is a list of layers, got {cut_before!r}")
    wanted = {find(name, "cut_before") for name in cut_before}
    _check_cut_points(profile, wanted, ties)
    forbidden = set(range(1, len(profile.layers))) - wanted
    return Constraints(tuple(ties), tuple(sorted(forbidden)), len(wanted) + 1)


def _check_cut_points(profile: Profile, wanted: Collection[int], ties: Sequence[tuple[int, int]]) -> None:
    for layer in sorted(wanted):
        name = profile.layers[layer].name
        if layer == 0:
            raise InputError(f"cut_before has {name!r}, the first layer: nothing comes before it")
        for first, last in ties:
            if first < layer <= last:
                raise InputError(
                    f"a cut before {name!r} parts layers {profile.layers[first].name!r} and "
                    f"{profile.layers[last].name!r}, which are to stay together"
                )
