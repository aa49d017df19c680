"""Partitions any layer graph over unlike devices, with a proof of optimality or a bound."""

from .infeasible import CutDoesNotFit
from .partition import cut
from .result import Cut

__all__ = ["Cut", "CutDoesNotFit", "cut"]
