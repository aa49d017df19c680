"""Which stages each device has, and how stages and their layers are called in a table."""

from __future__ import annotations

from collections.abc import Sequence

from ..planning import Plan


def owned_stages(plan: Plan) -> dict[str, list[int]]:
    """The stages of each device in use, in pipeline order."""
    owned: dict[str, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        owned.setdefault(stage.device, []).append(number)
    return owned


def stage_numbers(numbers: Sequence[int]) -> str:
    """As in "0, 2"."""
    return ", ".join(map(str, numbers))


def span(layers: Sequence[str]) -> str:
    """The first and the last layer."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} – {layers[-1]}"
