"""The best cut of a general layer graph over unlike devices, with a proof."""

from .door import cut
from .misfit import CutDoesNotFit
from .result import Cut

__all__ = ["Cut", "CutDoesNotFit", "cut"]
