"""Comes near the best cut where the downsets are too many to keep: from above by a beam, from below by proofs."""

from __future__ import annotations

from ..bounds.gap_search import Closing
from ..budget import Clock
from ..device_states import Walk
from ..exact.decision import Decider, TooMuchWork
from ..exact.ideals import downsets
from ..exact.spans import Spans
from ..exact.windows import Windows
from ..problem import Problem, Split
from .moves import bettered

# Borders kept by a beam, and that number times the nodes of the graph; pairs of borders it looks at; how often it
# starts anew below the cut that it found.
BEAM_SETS = 20_000
BEAM_CELLS = 24_000_000
BEAM_PAIRS = 20_000_000
BEAMS = 2

# The fraction of a bottleneck that a beam leaves open.
ENOUGH = 5e-4

# The first step that a beam takes below the cut it started with.
STEP = 0.05

# Borders kept by one proof that no cut has a certain bottleneck, and how many such proofs are tried.
PROOF_SETS = 30_000
PROOFS = 6


def beam(problem: Problem, devices: Walk, spans: Spans, clock: Clock, split: Split, low: float) -> Split:
    """A cut as good as ``split`` or better, among borders that few tensors cross.

    Of the downsets of each amount of work only those that the least crosses are kept, and the cut with the smallest
    bottleneck among these borders is found by halving; each better one narrows the windows of the next beam.
    """
    most = min(BEAM_SETS, BEAM_CELLS // len(problem))
    for _ in range(BEAMS):
        if clock.over:
            break
        high = split.bottleneck(problem)
        sets = downsets(problem, Windows(problem, devices, high), most, spans, thin=True)
        if sets is None:
            return split
        closing = Closing(problem, split, high, low, step=STEP)
        closing.close(Decider(problem, devices, sets, BEAM_PAIRS), clock, ENOUGH)
        split = closing.split or split
        if closing.high > high * (1 - ENOUGH):
            break
    return split


def climb(
    problem: Problem, devices: Walk, spans: Spans, clock: Clock, split: Split, low: float
) -> tuple[Split, float]:
    """A bound raised by proofs: a small bottleneck leaves so few downsets open that all can be looked at.

    Returns:
        The cut, or a better one where a proof fails because there is one, and the bound.
    """
    high = split.bottleneck(problem)
    step = (high - low) / 8
    for _ in range(PROOFS):
        ask = min(low + step, high * (1 - 1e-9))
        if clock.over or ask <= low * (1 + 1e-5):
            break
        found = _decided(problem, devices, spans, ask)
        if found is None:
            step /= 4  # Too many downsets are open.
        elif found:
            split = bettered(problem, found[0])
            high = split.bottleneck(problem)
            step = (high - low) / 2
        else:
            low = high if ask >= high * (1 - 1e-9) else ask
            if low >= high:
                break
    return split, low


def _decided(problem: Problem, devices: Walk, spans: Spans, seconds: float) -> list[Split] | None:
    """One cut of at most ``seconds``, none where there is none, and None where it takes too much to know."""
    sets = downsets(problem, Windows(problem, devices, seconds), PROOF_SETS, spans)
    if sets is None:
        return None
    try:
        found = Decider(problem, devices, sets, BEAM_PAIRS).split(seconds)
    except TooMuchWork:
        return None
    return [found] if found else []
