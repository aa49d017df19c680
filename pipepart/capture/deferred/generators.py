"""Finds out which state each random draw of a construction starts from, while nothing is really drawn."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .log import Log, Seeding

_FIRST = 0x7069706570617274  # the seeds of states that stand for others: "pipepart"
_SEED_BYTES = 8  # at the begin of a state


@dataclass(eq=False)
class _Tracked:
    """A generator.

    Attributes:
        before: its state before the construction.
        now: the digest of the state in which the last draw left it.
    """

    generator: torch.Generator
    before: Tensor
    now: bytes = b""


class Generators:
    """The generators of a construction.

    A draw that is logged draws nothing. It leaves its generator in a state of its own, so that a state that no draw has
    left shows that the model was seeded, and one that an earlier draw has left shows that it was set back::

        logged draw      generator here     generator in the plain construction
        (entry)          s0                 s0                Seeding(s0)
        0: normal_       #0                 s1
        manual_seed(3)   u0                 u0
        1: normal_       #1                 u1                Seeding(u0) before it
        set_state(#0)    #0                 s1
        2: normal_       #2                 s2                Seeding(after 0) before it

    Args:
        log: gets a :class:`Seeding` where one is due.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._draws: dict[bytes, int] = {}  # positions of draws, by the digest of the state that each left
        default = torch.default_generator
        self._tracked = [_Tracked(default, default.get_state())]

    def before_draw(self, generator: torch.Generator | None) -> int:
        """Log how the generator got into its state, unless the last draw left it there. Return its number."""
        number = self._number(generator or torch.default_generator)
        tracked = self._tracked[number]
        state = tracked.generator.get_state()
        key = _key(state)
        if key != tracked.now:
            self._log.entries.append(Seeding(number, self._draws.get(key, state)))
        return number

    def after_draw(self, number: int, position: int) -> None:
        """Put the generator into the state that stands for the one after a draw at this position of the log."""
        tracked = self._tracked[number]
        seed = tracked.generator.get_state()[:_SEED_BYTES].clone()
        state = tracked.generator.manual_seed(_FIRST + position).get_state()
        state[:_SEED_BYTES] = seed  # initial_seed() is that of the plain construction
        tracked.generator.set_state(state)
        tracked.now = _key(state)
        self._draws[tracked.now] = position

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
