"""The processes that torchrun started: how they find each other, and how each learns of a failure of another."""

from .failure import RankError
from .leaving import waits_in_torch
from .ranks import Ranks, join_ranks
from .torchrun import initialize, under_torchrun

__all__ = ["RankError", "Ranks", "initialize", "join_ranks", "under_torchrun", "waits_in_torch"]
