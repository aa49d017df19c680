"""Agreed: what every process of a pipeline knows of a call before it runs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from ..data.split import MicroBatches


class Agreed(NamedTuple):
    """What all processes know before a call runs. One process alone knows the micro-batches, and needs no more.

    Attributes:
        batch: the micro-batches.
        form: equal for calls whose stages exchange equal messages.
        seed: of the random numbers; None for the caller's generator.
        number: of the call.
    """

    batch: MicroBatches
    form: Hashable = None
    seed: int | None = None
    number: int = 0
