"""Assigns each call of a module to a layer, if a forward calls the modules of a chain more or less often."""

from __future__ import annotations

from collections.abc import Sequence

from ..refusal import CaptureError


def layers_of(called: Sequence[str], layers: Sequence[Sequence[str]]) -> list[int]:
    """Return the layer of each call of a module, in order: a layer never comes before that of an earlier call.

    A call takes the next layer that was made for a call of its module. If there are more calls than that, as when a
    loop goes over a longer sequence, calls of one module share a layer.

    Raises:
        CaptureError: the layers do not have these modules in this order.
    """
    homes: dict[str, list[int]] = {}
    for index, modules in enumerate(layers):
        for path in modules:
            homes.setdefault(path, []).append(index)
    latest = [len(layers) - 1] * (len(called) + 1)
    for number in reversed(range(len(called))):
        path = called[number]
        within = [home for home in homes.get(path, []) if home <= latest[number + 1]]
        if not within:
            raise CaptureError(_other_calls(path, called.count(path), len(homes.get(path, []))))
        latest[number] = within[-1]
    left = {path: list(calls) for path, calls in homes.items()}
    order: list[int] = []
    for path, most in zip(called, latest, strict=False):
        least = order[-1] if order else 0
        unused = [home for home in left[path] if least <= home <= most]
        if unused:
            left[path].remove(unused[0])
        order.append(min(unused or [home for home in homes[path] if home >= least]))
    return order


def _other_calls(path: str, calls: int, planned: int) -> str:
    """Say why the calls of a module do not go with the layers that were planned."""
    text = "with these arguments or in this mode the model calls module "
    if calls > planned > 0:
        return (
            f"{text}{path!r} {calls} times, and {planned} times in the plan, as in a loop over a longer sequence: make "
            "the plan with a sample of the greatest length, or keep the module around the loop whole, layers=[...]"
        )
    return (
        f"{text}{path!r} where its layers do not: make the plan with a sample for which it does. "
        "If arguments decide about the order, keep the module that chooses whole, layers=[...]"
    )
