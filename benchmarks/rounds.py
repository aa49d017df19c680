"""Runs the steps of contenders in turns, so that other load on the machine affects all of them equally."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.contender import Contender
from benchmarks.quiet import TRIES, Measurement, undisturbed

# After other contenders have run, the first steps of a turn are up to a third slower than those of a training loop.
WARM_UP_STEPS, TIMED_STEPS = 3, 2


@dataclass
class Samples:
    """The timed steps of one contender, ``TIMED_STEPS`` of each round."""

    steps: list[Measurement[None]] = field(default_factory=list)

    @property
    def wall_seconds(self) -> list[float]:
        return [step.wall_seconds for step in self.steps]

    @property
    def wall(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.wall_seconds)

    @property
    def cpu(self) -> float:
        """The median, in seconds of all threads and processes."""
        return statistics.median(step.cpu_seconds for step in self.steps)

    @property
    def disturbed(self) -> int:
        """Steps that never found the machine to themselves."""
        return sum(step.disturbed for step in self.steps)


def interleave(
    contenders: Sequence[Contender],
    rounds: int,
    *,
    tries: int = TRIES,
    before_round: Callable[[], object] = lambda: None,
) -> dict[str, Samples]:
    """Each round gives every contender a turn: steps that are not timed, then steps that are, each of them again
    and again while other programs disturb it, `tries` times at most.

    The order turns by one from round to round, so that nobody always follows the same neighbour.
    `before_round` is for what has to be measured at the same pace, but is no step.
    """
    samples = {contender.name: Samples() for contender in contenders}
    for turn in range(rounds):
        before_round()
        first = turn % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            for _ in range(WARM_UP_STEPS):
                contender.step()
            for _ in range(TIMED_STEPS):
                taken = undisturbed(contender.step, cpu_seconds=contender.cpu_seconds, tries=tries)
                samples[contender.name].steps.append(taken)
    return samples
