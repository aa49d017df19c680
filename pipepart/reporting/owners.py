"""Which stages each device has, and how stages and their layers are called in a table."""

from __future__ import annotations

from collections.abc import Sequence

from ..planning import Plan


def owned_stages(plan: Plan) -> dict[str, list[int]]:
    """The stages of each device in use, in pipeline order; those of copies of the model behind those of the first."""
    owned: dict[str, list[int]] = {}
    for number, stage in enumerate(plan.all_stages):
        owned.setdefault(stage.device, []).append(number)
    return owned


def loaded_stages(plan: Plan) -> dict[tuple[int, str], list[int]]:
    """The stages that a micro-batch passes on each device, by copy of the model and device."""
    loaded: dict[tuple[int, str], list[int]] = {}
    for number, stage in enumerate(plan.all_stages):
        loaded.setdefault((number // len(plan.stages), stage.device), []).append(number)
    return loaded


def copies(plan: Plan) -> int:
    """How many copies of the model there are."""
    return len(plan.all_stages) // len(plan.stages)


def stage_numbers(numbers: Sequence[int], stages: int | None = None) -> str:
    """As in "0, 2"; with the number of ``stages`` of one copy of the model, those of others by their numbers in it."""
    return ", ".join(str(number % stages if stages else number) for number in numbers)


def span(layers: Sequence[str]) -> str:
    """The first and the last layer."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} – {layers[-1]}"
