"""One race: every framework on the same model, cut and micro-batches, proven right, then timed in turns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks import models
from benchmarks.contender import Contender, Course, Cut
from benchmarks.peers.distributed import DistributedPipelining, Ranks
from benchmarks.peers.distributed_rank import SCHEDULES as DISTRIBUTED_SCHEDULES
from benchmarks.peers.pipepart_threads import PipepartThreads, cut_of, make_plans, name_of
from benchmarks.peers.plain import Plain
from benchmarks.peers.torchgpipe_threads import TorchGPipe
from benchmarks.proof import require_equal
from benchmarks.quiet import TRIES, undisturbed
from benchmarks.rounds import Samples, interleave
from pipepart import Plan

PLAIN = "plain"
PLAIN_LOOP = "plain, micro-batches"


@dataclass(frozen=True)
class Result:
    """What one race showed; the dictionaries go by the contenders' names.

    `predicted_seconds` holds what pipepart predicted from a profile taken at the start of each round: were
    there only one from before the race, its error would be that of a machine that has changed its pace since.
    """

    model: str
    micro_batches: int
    cut: Cut
    samples: dict[str, Samples]
    predicted_seconds: dict[str, list[float]]
    gradient_errors: dict[str, float]


def run(
    model: str,
    micro_batches: int,
    ranks: Ranks,
    *,
    rounds: int,
    tries: int = TRIES,
    progress: Callable[[str], object] = lambda _: None,
) -> Result:
    """Profiles and plans `model`, lets every framework run the plan's cut, and times them."""
    workload = models.build(model)
    progress("profiling")

    def forecast() -> dict[str, Plan]:
        return undisturbed(lambda: make_plans(workload, micro_batches), tries=tries).result

    plans = forecast()
    course = Course(workload, cut_of(plans), micro_batches)
    progress("starting")
    with _contenders(course, plans, ranks) as contenders:
        errors = _prove(contenders)
        progress("racing")
        predicted: dict[str, list[float]] = {name_of(plan): [] for plan in plans.values()}

        def predict() -> None:
            for plan in forecast().values():
                predicted[name_of(plan)].append(plan.predicted.step_seconds)

        samples = interleave(contenders, rounds, tries=tries, before_round=predict)
    return Result(model, micro_batches, course.cut, samples, predicted, errors)


@contextmanager
def _contenders(course: Course, plans: dict[str, Plan], ranks: Ranks) -> Iterator[list[Contender]]:
    contenders: list[Contender] = [
        Plain(course),
        Plain(course, micro_batches=course.micro_batches),
        *(PipepartThreads(course, plan) for plan in plans.values()),
        TorchGPipe(course, worker_per_device=False),
        TorchGPipe(course, worker_per_device=True),
        *(DistributedPipelining(course, ranks, schedule) for schedule in DISTRIBUTED_SCHEDULES),
    ]
    try:
        yield contenders
    finally:
        for contender in contenders:
            contender.close()


def _prove(contenders: list[Contender]) -> dict[str, float]:
    """Holds every pipeline's gradients against those of the plain model over the same micro-batches.

    Over micro-batches, because BatchNorm's statistics, and so its gradients, are those of a micro-batch.
    """
    reference = next(contender for contender in contenders if contender.name == PLAIN_LOOP)
    reference.step()
    expected = reference.gradients()
    errors = {}
    for contender in contenders:
        if contender.name not in (PLAIN, PLAIN_LOOP):
            contender.step()
            errors[contender.name] = require_equal(contender.name, contender.gradients(), expected)
    return errors
