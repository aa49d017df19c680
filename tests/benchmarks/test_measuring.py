"""Benchmarks build equal models, time only contenders that are right, in turn and undisturbed; peers are right."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from benchmarks import models, quiet
from benchmarks.contender import Contender, Course, InThisProcess
from benchmarks.overlap import Overlap, overlap, profiled
from benchmarks.peers.distributed import OnRanks, Ranks
from benchmarks.peers.plain import Plain
from benchmarks.peers.torchgpipe_threads import TorchGPipe
from benchmarks.proof import WrongGradientsError, require_equal
from benchmarks.quiet import Measurement, undisturbed
from benchmarks.rounds import Samples, interleave


@pytest.mark.parametrize("name", models.BUILDERS)
def test_two_builds_are_equal_and_leave_the_random_state_alone(name: str):
    before = torch.random.get_rng_state()
    one, other = models.build(name), models.build(name)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.testing.assert_close(one.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)
    assert torch.equal(one.sample, other.sample)
    assert torch.equal(one.target, other.target)
    assert len(one.sample) == len(one.target)
    assert len(one.sample) % 8 == 0  # a batch splits evenly for the peers that take nothing else


REFERENCE = {"weight": torch.tensor([3.0, 4.0]), "bias": torch.tensor([0.0])}


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ({"weight": torch.tensor([1.5, 2.0]), "bias": REFERENCE["bias"]}, "weight is off by"),
        ({"weight": torch.full((2,), float("nan")), "bias": REFERENCE["bias"]}, "weight"),
        ({"weight": REFERENCE["weight"]}, "bias"),
    ],
)
def test_rounding_passes_and_a_wrong_scale_nan_or_a_missing_parameter_is_refused(gradients, message):
    nearly = {"weight": REFERENCE["weight"] * (1 + 1e-6), "bias": REFERENCE["bias"]}
    assert require_equal("x", nearly, REFERENCE) == pytest.approx(1e-6, rel=0.2)
    with pytest.raises(WrongGradientsError, match=message):
        require_equal("x", gradients, REFERENCE)


def test_lanes_overlap_for_as_long_as_they_are_busy_at_once_and_copies_hide_behind_them():
    found = overlap([("a", 0.0, 10.0), ("b", 6.0, 14.0), ("b", 20.0, 21.0)])
    assert found == Overlap(busy=15.0, together=4.0, copying=0.0, hidden=0.0, lanes=2)
    assert overlap([]) == Overlap(0.0, 0.0, 0.0, 0.0, 0)
    assert overlap([("a", 0.0, 10.0), ("a", 2.0, 5.0)]) == Overlap(
        10.0, 0.0, 0.0, 0.0, 1
    )  # one within the other
    found = overlap([("a", 2.0, 6.0)], [("c", 0.0, 3.0), ("d", 5.0, 9.0)])
    assert (found.busy, found.copying, found.hidden) == (4.0, 7.0, 2.0)
    found = profiled(lambda: torch.ones(8) + 1, on_cuda=False)
    assert found.lanes == 1
    assert found.busy > 0


def others_take(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Other programs take so many CPU seconds during the first, second, ... try, and none later."""
    clock = itertools.chain(*((0.0, taken) for taken in seconds), itertools.repeat(0.0))
    monkeypatch.setattr(quiet, "busy_seconds", lambda: next(clock))


@pytest.mark.parametrize(
    ("others", "counts", "disturbed"),
    [
        ((0.0,), 1, False),
        ((quiet.TICK_SECONDS,), 1, False),
        ((1.0, 1.0), 3, False),
        ((900.0, 1.0, 800.0), 2, True),  # on a machine that never rests, the least disturbed try
    ],
)
def test_disturbed_work_is_done_again(others, counts, disturbed, monkeypatch: pytest.MonkeyPatch):
    others_take(monkeypatch, *others)
    calls = itertools.count(1)
    taken = undisturbed(lambda: next(calls), tries=3)
    assert (taken.result, taken.disturbed) == (counts, disturbed)


class Counting(InThisProcess):
    """Calls a function with the number of each step."""

    def __init__(self, name: str, act: Callable[[int], object]) -> None:
        self.name, self._act, self._steps = name, act, itertools.count()

    def step(self) -> None:
        self._act(next(self._steps))

    def gradients(self) -> dict[str, Tensor]:
        return {}


def test_each_round_warms_up_and_times_every_contender_and_turns_the_order(monkeypatch: pytest.MonkeyPatch):
    """Of five steps of a turn, the first three are not timed."""
    others_take(monkeypatch)
    diary: list[str] = []
    interleave([Counting(name, lambda _, name=name: diary.append(name)) for name in "abc"], rounds=3)
    assert "".join(diary) == "aaaaabbbbbccccc" + "bbbbbcccccaaaaa" + "cccccaaaaabbbbb"
    samples = interleave([Counting("a", lambda _: None)], rounds=2)["a"]
    assert len(samples.wall_seconds) == 4  # of ten steps


def test_the_median_ignores_a_disturbed_round_and_steps_that_never_found_quiet_are_counted():
    samples = Samples([Measurement(None, seconds, seconds, 0.0) for seconds in (1.0, 9.0, 2.0)])
    assert samples.wall == samples.cpu == 2.0
    assert Samples([Measurement(None, 1.0, 1.0, 0.9), Measurement(None, 1.0, 1.0, 0.0)]).disturbed == 1


COURSE = Course(models.build("tiny"), (("0", "1", "2"), ("3",)), micro_batches=4)


def assert_steps_like_plain(contender: Contender) -> None:
    reference = Plain(COURSE, micro_batches=4)
    reference.step()
    for _ in range(2):  # the second step shows that the first one's gradients were cleared
        contender.step()
        require_equal(contender.name, contender.gradients(), reference.gradients())


def test_plain_over_micro_batches_equals_plain_over_the_mini_batch():
    assert_steps_like_plain(Plain(COURSE))


@pytest.mark.parametrize("worker_per_device", [False, True])
def test_torchgpipe(worker_per_device: bool):
    assert_steps_like_plain(TorchGPipe(COURSE, worker_per_device=worker_per_device))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.alone
def test_a_failing_rank_says_why_and_goes_on_serving(ranks: Ranks):
    wrong = Course(models.build("tiny"), (("0", "1"), ("no such layer",)), micro_batches=4)
    with pytest.raises(RuntimeError, match="no such layer"):
        OnRanks.of_torch(wrong, ranks, "gpipe")
    assert_steps_like_plain(OnRanks.of_torch(COURSE, ranks, "gpipe"))


def test_threads_of_the_caller_are_left_alone():
    before = torch.get_num_threads()
    TorchGPipe(COURSE, worker_per_device=True).step()
    assert torch.get_num_threads() == before
