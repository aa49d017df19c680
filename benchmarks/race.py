"""One race: checks every framework on the same model, cut and micro-batches, then times them in turns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks import models
from benchmarks.contender import Contender, Course, Cut
from benchmarks.peers.distributed import OnRanks, Ranks
from benchmarks.peers.distributed_rank import SCHEDULES as DISTRIBUTED_SCHEDULES
from benchmarks.peers.pipepart_threads import AUTO, PipepartThreads, make_plans, predicted_seconds, profiled
from benchmarks.peers.plain import Plain
from benchmarks.peers.torchgpipe_threads import TorchGPipe
from benchmarks.proof import require_equal
from benchmarks.quiet import TRIES, undisturbed
from benchmarks.rounds import Samples, interleave
from pipepart import Plan, Profile

PLAIN = "plain"
PLAIN_LOOP = "plain, micro-batches"


@dataclass(frozen=True)
class Result:
    """What one race showed; the dictionaries go by the contenders' names.

    `cut` is that of all pipelines but auto, `auto` says what pipepart chose there. `predicted_seconds` holds what
    pipepart predicted from a profile taken at the start of each round: were there only one from before the race,
    its error would be that of a machine that has changed its pace since.
    """

    model: str
    micro_batches: int
    cut: Cut
    auto: str
    samples: dict[str, Samples]
    predicted_seconds: dict[str, list[float]]
    gradient_errors: dict[str, float]


def run(
    model: str,
    micro_batches: int,
    ranks: Ranks | None,
    *,
    rounds: int,
    tries: int = TRIES,
    progress: Callable[[str], object] = lambda _: None,
) -> Result:
    """Profiles and plans `model`, lets every framework run the plan's cut, and times them.

    Without `ranks`, only the plain model and pipepart in one process run.
    """
    workload = models.build(model)
    progress("profiling")

    def profile() -> Profile:
        return undisturbed(lambda: profiled(workload, micro_batches), tries=tries).result

    plans = make_plans(profile())
    shared = next(plan for name, plan in plans.items() if name != AUTO)
    course = Course(workload, tuple(stage.layers for stage in shared.stages), micro_batches)
    progress("starting")
    with _contenders(course, plans, ranks) as contenders:
        errors = _prove(contenders)
        progress("racing")
        predicted: dict[str, list[float]] = {name: [] for name in plans}

        def predict() -> None:
            fresh = profile()
            for name, plan in plans.items():
                predicted[name].append(predicted_seconds(plan, fresh))

        samples = interleave(contenders, rounds, tries=tries, before_round=predict)
    return Result(model, micro_batches, course.cut, _described(plans[AUTO]), samples, predicted, errors)


def _described(plan: Plan) -> str:
    """The schedule, and the number of layers of each stage with its device."""
    order = {device.name: number for number, device in enumerate(plan.cluster.devices)}
    stages = ", ".join(f"{len(stage.layers)} on {order[stage.device]}" for stage in plan.stages)
    return f"{plan.schedule}, {stages}"


@contextmanager
def _contenders(course: Course, plans: dict[str, Plan], ranks: Ranks | None) -> Iterator[list[Contender]]:
    contenders: list[Contender] = [
        Plain(course),
        Plain(course, micro_batches=course.micro_batches),
        *(PipepartThreads(name, course.workload, plan) for name, plan in plans.items()),
    ]
    if ranks is not None:
        contenders += [
            TorchGPipe(course, worker_per_device=False),
            TorchGPipe(course, worker_per_device=True),
            *(OnRanks.of_pipepart(course, ranks, name, plan) for name, plan in plans.items()),
            *(OnRanks.of_torch(course, ranks, schedule) for schedule in DISTRIBUTED_SCHEDULES),
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
