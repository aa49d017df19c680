"""Stages that a command is given as numbers instead of a plan."""

from __future__ import annotations

from dataclasses import dataclass, fields

from schedules import StageCosts

from ..units import parse_bytes
from .errors import Mistake
from .numbers import parse_numbers


@dataclass(frozen=True)
class DescribedStages:
    """The options that describe stages, as they were given."""

    forward: str | None = None
    backward_input: str | None = None
    backward_weight: str | None = None
    latency: float | None = None
    stash: str | None = None

    def given(self) -> list[str]:
        """The options that were set."""
        return [
            f"--{field.name.replace('_', '-')}"
            for field in fields(self)
            if getattr(self, field.name) is not None
        ]

    def costs(self, stages: int) -> StageCosts:
        """Of so many stages; without sizes the stash of each is 1, which counts the micro-batches in flight.

        Raises:
            Mistake: a text that is no number, or another number of numbers than stages.
            ValueError: a text that is no size.
        """
        return StageCosts(
            forward=parse_numbers("--forward", self.forward or "1", stages),
            backward_input=parse_numbers("--backward-input", self.backward_input or "1", stages),
            backward_weight=parse_numbers("--backward-weight", self.backward_weight or "1", stages),
            latency=self.latency or 0.0,
            stash_bytes=[1.0] * stages if self.stash is None else _sizes(self.stash, stages),
        )


def _sizes(text: str, stages: int) -> list[float]:
    sizes = [float(parse_bytes(part)) for part in text.split(",")]
    if len(sizes) not in (1, stages):
        raise Mistake(f"--stash {text!r} has {len(sizes)} sizes for {stages} stages: give 1 or {stages}")
    return sizes * stages if len(sizes) == 1 else sizes
