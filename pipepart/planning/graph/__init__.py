"""Partitions any layer graph over devices of several types, with a proof of optimality or a lower bound."""

from .infeasible import CutDoesNotFit
from .partition import Cut, cut

__all__ = ["Cut", "CutDoesNotFit", "cut"]
