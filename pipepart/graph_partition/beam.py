"""Beam search for graphs with too many downsets to store: improves the cut."""

from __future__ import annotations

from .bracket import Bracket
from .exact.capacity import Capacity
from .exact.decision import Decider
from .exact.downsets import downsets

BEAM_SETS = 20_000  # maximum number of borders of a beam
BEAM_CELLS = 24_000_000  # maximum of borders times nodes
BEAM_PAIRS = 20_000_000  # maximum number of pairs of borders that a decision checks
BEAMS = 2  # maximum number of beams, each below the cut of the beam before
ENOUGH = 5e-4  # a beam stops at a gap of this fraction of the bottleneck


def search_beam(bracket: Bracket) -> None:
    """Improve the cut by a search among borders that few tensors cross.

    For each amount of work, a beam stores only the downsets with the smallest crossing seconds. Decisions find the best
    cut among these borders. A better cut rules out more borders, so the next beam stores more of the useful borders.
    """
    problem, clock = bracket.problem, bracket.clock
    most = min(BEAM_SETS, BEAM_CELLS // len(problem))
    for _ in range(BEAMS):
        high = bracket.high
        sets = downsets(problem, Capacity(problem, high), most, clock, thin=True)
        if sets is None:
            return
        bracket.close(Decider(problem, sets, clock, BEAM_PAIRS), ENOUGH, complete=False)
        if bracket.high > high * (1 - ENOUGH):
            return
