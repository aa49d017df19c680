"""Beam search for graphs with too many downsets to keep: improves the cut, then raises the lower bound."""

from __future__ import annotations

from .bracket import RESOLUTION, Bracket
from .exact.capacity import Capacity
from .exact.decision import Decider, TooMuchWork
from .exact.downsets import downsets
from .problem import Split

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


def search_beam(bracket: Bracket) -> None:
    """Improve the cut by a search among borders that few tensors cross.

    For each amount of work, only the downsets with the least crossing are kept. Decisions find the best cut among
    these borders. A better cut allows fewer borders, so the next beam keeps more of the relevant ones.
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


def raise_bound(bracket: Bracket) -> None:
    """Raise the lower bound by decisions: a small bottleneck leaves few enough downsets to check all of them."""
    step = (bracket.high - bracket.low) / 8
    for _ in range(PROOFS):
        ask = min(bracket.low + step, bracket.high * (1 - RESOLUTION))
        if ask <= bracket.low * (1 + 1e-5):
            return
        found = _decided(bracket, ask)
        if found is None:
            step /= 4  # Too many downsets are open.
        elif found:
            bracket.offer(found[0])
            step = (bracket.high - bracket.low) / 2
        else:
            bracket.low = bracket.high if ask >= bracket.high * (1 - RESOLUTION) else ask
            if bracket.is_closed():
                return


def _decided(bracket: Bracket, seconds: float) -> list[Split] | None:
    """Return [a cut of at most ``seconds``], [] if there is none, or None if deciding takes too much work."""
    problem, clock = bracket.problem, bracket.clock
    sets = downsets(problem, Capacity(problem, seconds), PROOF_SETS, clock)
    if sets is None:
        return None
    try:
        found = Decider(problem, sets, clock, BEAM_PAIRS).split(seconds)
    except TooMuchWork:
        return None
    return [found] if found else []
