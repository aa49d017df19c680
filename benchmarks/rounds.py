"""Times contenders in turns, so that what disturbs the machine disturbs them all alike."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.contender import Contender


@dataclass
class Samples:
    """The steps of one contender, one of each round."""

    wall_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    @property
    def wall(self) -> float:
        return statistics.median(self.wall_seconds)

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpu_seconds)


def interleave(
    contenders: Sequence[Contender], rounds: int, *, progress: Callable[[], object] = lambda: None
) -> dict[str, Samples]:
    """Each round steps every contender twice and times the second: the first finds caches full of other data.

    The order turns by one from round to round, so that nobody always follows the same neighbour.
    """
    samples = {contender.name: Samples() for contender in contenders}
    for turn in range(rounds):
        first = turn % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            contender.step()
            cpu_before, wall_before = contender.cpu_seconds(), time.perf_counter()
            contender.step()
            wall_after, cpu_after = time.perf_counter(), contender.cpu_seconds()
            samples[contender.name].wall_seconds.append(wall_after - wall_before)
            samples[contender.name].cpu_seconds.append(cpu_after - cpu_before)
            progress()
    return samples
