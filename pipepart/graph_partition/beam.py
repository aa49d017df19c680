"""Beam search for graphs with too many downsets to store: improves the cut, and raises the lower bound."""

from __future__ import annotations

from .bracket import RESOLUTION, Bracket
from .exact.capacity import Capacity
from .exact.decision import Decider, TooMuchWork
from .exact.downsets import downsets
from .problem import Split

BEAM_SETS = 20_000  # maximum number of borders of a beam
BEAM_CELLS = 24_000_000  # maximum of borders times nodes
BEAM_PAIRS = 20_000_000  # maximum number of pairs of borders that a decision checks
BEAMS = 2  # maximum number of beams, each below the cut of the beam before
ENOUGH = 5e-4  # a beam stops at a gap of this fraction of the bottleneck
PROOF_SETS = 30_000  # maximum number of borders of a proof that no cut has a given bottleneck
PROOFS = 6  # maximum number of such proofs


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


def raise_bound(bracket: Bracket) -> None:
    """Raise the lower bound by decisions at small bottlenecks, which leave few enough downsets to check all."""
    step = (bracket.high - bracket.low) / 8
    for _ in range(PROOFS):
        ask = min(bracket.low + step, bracket.high * (1 - RESOLUTION))
        if ask <= bracket.low * (1 + 1e-5):
            return
        answer = _decided(bracket, ask)
        if answer is None:
            step /= 4  # Too many downsets are open.
        elif answer:
            bracket.offer(answer[0])
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
        split = Decider(problem, sets, clock, BEAM_PAIRS).split(seconds)
    except TooMuchWork:
        return None
    return [split] if split else []
