"""The best cut of a general layer graph over unlike devices, with a proof."""

from .infeasible import CutDoesNotFit
from .partition import cut
from .result import Cut

__all__ = ["Cut", "CutDoesNotFit", "cut"]
