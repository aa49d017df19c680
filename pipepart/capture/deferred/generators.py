"""Finds out which state each random draw of a construction starts from, while nothing is really drawn."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .log import Log, Seeding


@dataclass(eq=False)
class _Tracked:
    """A generator.

    Attributes:
        before: its state before the construction.
        now: the digest of the state in which the last draw left it.
        draws: for the digest of each state in which a draw left it, the position of this draw in the log.
    """

    generator: torch.Generator
    before: Tensor
    now: bytes = b""
    draws: dict[bytes, int] = field(default_factory=dict)


class Generators:
    """The generators of a construction.

    A draw that is logged moves its generator by one number only. So the states after different draws differ, and a
    state that no draw has left shows that the model was seeded::

        logged draw      generator here     generator in the plain construction
        (entry)          s0                 s0                Seeding(s0)
        0: normal_       s1                 t1
        manual_seed(3)   u0                 u0
        1: normal_       u1                 v1                Seeding(u0) before it
        set_state(s1)    s1                 t1
        2: normal_       s2                 t2                Seeding(after 0) before it

    Args:
        log: gets a :class:`Seeding` where one is due.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        default = torch.default_generator
        self._tracked = [_Tracked(default, default.get_state())]

    def before_draw(self, generator: torch.Generator | None) -> int:
        """Log how the generator got into its state, unless the last draw left it there. Return its number."""
        number = self._number(generator or torch.default_generator)
        tracked = self._tracked[number]
        state = tracked.generator.get_state()
        key = _key(state)
        if key != tracked.now:
            self._log.entries.append(Seeding(number, tracked.draws.get(key, state)))
        return number

    def after_draw(self, number: int, position: int) -> None:
        """Move the generator on after a draw at this position of the log."""
        tracked = self._tracked[number]
        torch.empty(1).random_(generator=tracked.generator)
        tracked.now = _key(tracked.generator.get_state())
        tracked.draws[tracked.now] = position

    def restore(self) -> None:
        """Set all generators back to their states before the construction."""
        for tracked in self._tracked:
            tracked.generator.set_state(tracked.before)

    def _number(self, generator: torch.Generator) -> int:
        for number, tracked in enumerate(self._tracked):
            if tracked.generator is generator:
                return number
        self._tracked.append(_Tracked(generator, generator.get_state()))
        self._log.generators.append(generator)
        return len(self._tracked) - 1


def _key(state: Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()  # of 5 kB a draw
