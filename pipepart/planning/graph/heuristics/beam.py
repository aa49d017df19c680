"""Beam search for graphs with too many downsets to keep: improves the cut, then raises the lower bound."""

from __future__ import annotations

from ..exact.capacity import Capacity
from ..exact.decision import Decider, TooMuchWork
from ..exact.downsets import downsets
from ..gap_search import Budget, GapSearch
from ..problem import Problem, Split
from .local_moves import improve_by_moves

# Borders kept by a beam, and that number times the nodes of the graph; pairs of borders checked; number of restarts
# below the cut that was found.
BEAM_SETS = 20_000
BEAM_CELLS = 24_000_000
BEAM_PAIRS = 20_000_000
BEAMS = 2

# A beam stops at a gap of this fraction of the bottleneck.
ENOUGH = 5e-4

# Borders kept by one proof that no cut has a given bottleneck, and the number of such proofs that are tried.
PROOF_SETS = 30_000
PROOFS = 6


def beam(problem: Problem, budget: Budget, split: Split, low: float) -> Split:
    """Return a cut at least as good as ``split``, searched among borders that few tensors cross.

    For each amount of work, only the downsets with the least crossing are kept. A gap search finds the best cut among
    these borders. A better cut allows fewer borders, so the next beam keeps more of the relevant ones.
    """
    most = min(BEAM_SETS, BEAM_CELLS // len(problem))
    for _ in range(BEAMS):
        if budget.spent:
            break
        high = split.bottleneck(problem)
        sets = downsets(problem, Capacity(problem, high), most, thin=True)
        if sets is None:
            return split
        search = GapSearch(problem, split, high, low)
        search.close(Decider(problem, sets, BEAM_PAIRS), budget, ENOUGH)
        split = search.split or split
        if search.high > high * (1 - ENOUGH):
            break
    return split


def raise_bound(problem: Problem, budget: Budget, split: Split, low: float) -> tuple[Split, float]:
    """Raise the lower bound by decisions: a small bottleneck leaves few enough downsets to check all of them.

    Returns:
        The cut and the bound. The cut is a better one if a proof failed because there is one.
    """
    high = split.bottleneck(problem)
    step = (high - low) / 8
    for _ in range(PROOFS):
        ask = min(low + step, high * (1 - 1e-9))
        if budget.spent or ask <= low * (1 + 1e-5):
            break
        found = _decided(problem, ask)
        if found is None:
            step /= 4  # Too many downsets are open.
        elif found:
            split = improve_by_moves(problem, found[0])
            high = split.bottleneck(problem)
            step = (high - low) / 2
        else:
            low = high if ask >= high * (1 - 1e-9) else ask
            if low >= high:
                break
    return split, low


def _decided(problem: Problem, seconds: float) -> list[Split] | None:
    """Return [a cut of at most ``seconds``], [] if there is none, or None if deciding takes too much work."""
    sets = downsets(problem, Capacity(problem, seconds), PROOF_SETS)
    if sets is None:
        return None
    try:
        found = Decider(problem, sets, BEAM_PAIRS).split(seconds)
    except TooMuchWork:
        return None
    return [found] if found else []
