"""The processes started by torchrun: how they connect, exchange values, and learn of each other's failures."""

from .failure import RankError, attempt, broke
from .ranks import Ranks, join_ranks
from .torchrun import initialize, under_torchrun
from .waiting import waits_in_torch

__all__ = [
    "RankError",
    "Ranks",
    "attempt",
    "broke",
    "initialize",
    "join_ranks",
    "under_torchrun",
    "waits_in_torch",
]
