"""Times contenders in turns, so that what disturbs the machine disturbs them all alike."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.contender import Contender
from benchmarks.quiet import busy_seconds

TRIES = 5
# Of one core. A clock tick, the finest that the kernel tells, is 10 % of a step of 100 ms.
TOLERATED_SHARE = 0.1
TICK_SECONDS = 0.01


@dataclass
class Samples:
    """The steps of one contender, one of each round.

    `foreign_seconds` is the CPU time that other programs took while the step ran.
    """

    wall_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    foreign_seconds: list[float] = field(default_factory=list)

    @property
    def wall(self) -> float:
        return statistics.median(self.wall_seconds)

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpu_seconds)

    @property
    def disturbed(self) -> int:
        """Steps that never found the machine to themselves."""
        pairs = zip(self.foreign_seconds, self.wall_seconds, strict=True)
        return sum(_is_disturbed(foreign, wall) for foreign, wall in pairs)


def interleave(
    contenders: Sequence[Contender], rounds: int, *, before_round: Callable[[], object] = lambda: None
) -> dict[str, Samples]:
    """Each round gives every contender a turn: a step that is not timed, as it finds caches full of other data,
    and one that is. A step that other programs disturbed is taken again, a few times at most.

    The order turns by one from round to round, so that nobody always follows the same neighbour.
    `before_round` is for what has to be measured under the same disturbances, but is no step.
    """
    samples = {contender.name: Samples() for contender in contenders}
    for turn in range(rounds):
        before_round()
        first = turn % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            contender.step()
            wall, cpu, foreign = _least_disturbed(contender)
            found = samples[contender.name]
            found.wall_seconds.append(wall)
            found.cpu_seconds.append(cpu)
            found.foreign_seconds.append(foreign)
    return samples


def _least_disturbed(contender: Contender) -> tuple[float, float, float]:
    tries: list[tuple[float, float, float]] = []
    for _ in range(TRIES):
        tries.append(_timed(contender))
        wall, _, foreign = tries[-1]
        if not _is_disturbed(foreign, wall):
            return tries[-1]
    return min(tries, key=lambda taken: taken[2] / taken[0])


def _timed(contender: Contender) -> tuple[float, float, float]:
    """Wall and CPU seconds of one step, and the CPU seconds of everybody else."""
    busy, cpu, start = busy_seconds(), contender.cpu_seconds(), time.perf_counter()
    contender.step()
    wall = time.perf_counter() - start
    cpu = contender.cpu_seconds() - cpu
    return wall, cpu, max(0.0, busy_seconds() - busy - cpu)


def _is_disturbed(foreign_seconds: float, wall_seconds: float) -> bool:
    return foreign_seconds > max(2 * TICK_SECONDS, TOLERATED_SHARE * wall_seconds)
