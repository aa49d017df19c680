"""DoesNotFit: why no plan fits, and what would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import Plan
    from .remedies import Remedy


@dataclass(frozen=True)
class Misfit:
    """Why one setting has no plan.

    Attributes:
        text: in words.
        draft: the plan that comes nearest, None where no cut is possible.
        stage: the stage of it that is short.
        short_bytes: what its device lacks; 0 where no memory would do.
    """

    text: str
    draft: Plan | None
    stage: int
    short_bytes: int


class DoesNotFit(ValueError):
    """No cut of the model fits the devices.

    Attributes:
        stage: the stage that is short in the best cut there is.
        short_bytes: bytes that its device lacks.
        remedies: changes that would make it fit, each planned and found to fit, the cheapest first.
    """

    def __init__(self, message: str, stage: int, short_bytes: int, remedies: Sequence[Remedy] = ()) -> None:
        super().__init__(message)
        self.stage = stage
        self.short_bytes = short_bytes
        self.remedies = tuple(remedies)
