"""Maps devices to their stages, and formats the names of stages and layers in tables."""

from __future__ import annotations

from collections.abc import Sequence

from ...planning import Plan


def owned_stages(plan: Plan) -> dict[str, list[int]]:
    """Map each device in use to its stages, in pipeline order, the first replica's first."""
    owned: dict[str, list[int]] = {}
    for number, stage in enumerate(plan.all_stages):
        owned.setdefault(stage.device, []).append(number)
    return owned


def loaded_stages(plan: Plan) -> dict[tuple[int, str], list[int]]:
    """Map (replica, device) to the stages that a micro-batch of that replica passes there."""
    loaded: dict[tuple[int, str], list[int]] = {}
    for number, stage in enumerate(plan.all_stages):
        loaded.setdefault((number // len(plan.stages), stage.device), []).append(number)
    return loaded


def stage_numbers(numbers: Sequence[int], stages: int | None = None) -> str:
    """Format stage numbers as in "0, 2"; with ``stages`` per replica, number within the replica."""
    return ", ".join(str(number % stages if stages else number) for number in numbers)


def span(layers: Sequence[str]) -> str:
    """Format a range of layers by the first and the last one."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} – {layers[-1]}"
