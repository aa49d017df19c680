"""Moves: random changes of a layout that respect the constraints of the request."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from random import Random

from ..costs.stage_memory import Mode
from ..search.parts import Part
from .layout import Layout
from .pricing import Pricing


class Moves:
    """Draws random neighbours of layouts.

    Args:
        part: has the constraints.
        pricing: gives the costs of layouts.
        random: the generator of the search.
    """

    def __init__(self, part: Part, pricing: Pricing, random: Random) -> None:
        self._pricing, self._random = pricing, random
        self._borders: list[int] = part.costs.allowed_borders.tolist()
        self._fixed_stages = part.fixed_stages
        self._chunks = part.request.chunks or math.inf
        self._choices = (
            [self._shift] * 8 + [self._change_device] * 3 + [self._exchange] * 3 + [self._change_rule] * 2
        )
        if self._fixed_stages is None:
            self._choices += [self._split] * 2 + [self._merge] * 2
        self._choices += [self._toggle_whole] * (2 * pricing.whole_helps)

    def neighbour(self, layout: Layout) -> Layout | None:
        """Return a random neighbour; None if the drawn move is not possible."""
        changed = self._random.choice(self._choices)(layout)
        return changed if changed is not None and self.allows(changed) else None

    def allows(self, layout: Layout) -> bool:
        """Return True if a layout, a start too, meets the number of stages and the limit of stages per device."""
        if self._fixed_stages is not None and layout.stages != self._fixed_stages:
            return False
        return max(Counter(layout.devices).values()) <= self._chunks

    def _shift(self, layout: Layout) -> Layout | None:
        """Move one border, or two, to the next allowed layer."""
        borders = layout.borders
        for _ in range(2 if self._random.random() < 0.3 else 1):
            if not borders:
                return None
            at = self._random.randrange(len(borders))
            index = bisect_left(self._borders, borders[at]) + self._random.choice((1, -1))
            if not 0 <= index < len(self._borders):
                return None
            moved = self._borders[index]
            if (at and moved <= borders[at - 1]) or (at + 1 < len(borders) and moved >= borders[at + 1]):
                return None
            borders = (*borders[:at], moved, *borders[at + 1 :])
        return replace(layout, borders=borders)

    def _change_device(self, layout: Layout) -> Layout | None:
        """Move a stage to another device."""
        at, device = self._random.randrange(layout.stages), self._random.randrange(self._pricing.devices)
        if layout.devices[at] == device:
            return None
        return replace(layout, devices=(*layout.devices[:at], device, *layout.devices[at + 1 :]))

    def _exchange(self, layout: Layout) -> Layout | None:
        """Exchange the devices of two stages."""
        first, second = (self._random.randrange(layout.stages) for _ in range(2))
        if layout.devices[first] == layout.devices[second]:
            return None
        devices = list(layout.devices)
        devices[first], devices[second] = devices[second], devices[first]
        return replace(layout, devices=tuple(devices))

    def _split(self, layout: Layout) -> Layout | None:
        """Split a stage in two and put one of them on a random device."""
        if not self._borders:
            return None
        border = self._random.choice(self._borders)
        at = bisect_left(layout.borders, border)
        if at < len(layout.borders) and layout.borders[at] == border:
            return None
        device = self._random.randrange(self._pricing.devices)
        pair = (device, layout.devices[at]) if self._random.random() < 0.5 else (layout.devices[at], device)
        return replace(
            layout,
            borders=(*layout.borders[:at], border, *layout.borders[at:]),
            devices=(*layout.devices[:at], *pair, *layout.devices[at + 1 :]),
            whole=(*layout.whole[: at + 1], *layout.whole[at:]),
            modes=self._trained(
                (*layout.borders[:at], border, *layout.borders[at:]),
                (*layout.modes[: at + 1], *layout.modes[at:]),
            ),
        )

    def _merge(self, layout: Layout) -> Layout | None:
        """Merge two adjacent stages on the device of one of them."""
        if layout.stages < 2:
            return None
        at = self._random.randrange(layout.stages - 1)
        gone = at + self._random.randrange(2)
        joined = layout.joined(at, gone)
        return replace(joined, modes=self._trained(joined.borders, joined.modes))

    def _trained(self, borders: tuple[int, ...], modes: tuple[Mode, ...]) -> tuple[Mode, ...]:
        """Return the modes, with "never" for stages without a backward."""
        ends = (*borders, self._pricing.layers)
        return tuple(
            mode if self._pricing.trains(end) else "never" for end, mode in zip(ends, modes, strict=True)
        )

    def _change_rule(self, layout: Layout) -> Layout:
        """Vary the dispatching rule."""
        return replace(layout, rule=layout.rule.varied(self._random, self._pricing.limited))

    def _toggle_whole(self, layout: Layout) -> Layout:
        """Switch a stage between whole backwards and separate I and W."""
        at = self._random.randrange(layout.stages)
        return replace(layout, whole=(*layout.whole[:at], not layout.whole[at], *layout.whole[at + 1 :]))
