"""Every benchmark starts and ends with a table; contenders are equal, right, and timed in turn and undisturbed."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner, Result

from benchmarks import models, quiet
from benchmarks.contender import Contender, Course, InThisProcess
from benchmarks.overlap import Overlap, overlap, profiled
from benchmarks.peers.distributed import OnRanks, Ranks
from benchmarks.peers.plain import Plain
from benchmarks.peers.torchgpipe_threads import TorchGPipe
from benchmarks.proof import TOLERANCE, WrongGradientsError, require_equal
from benchmarks.quiet import Measurement, undisturbed
from benchmarks.rounds import Samples, interleave

NAMES = ("cpu", "emulated", "gpu", "planning", "published_layouts", "schedules", "split_backward", "tracing")


def run(name: str, *options: str, status: int = 0) -> Result:
    app = typer.Typer()
    app.command()(importlib.import_module(f"benchmarks.{name}").main)
    ended = CliRunner().invoke(app, list(options), catch_exceptions=False)
    assert ended.exit_code == status, ended.output
    return ended


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_explains_itself(name: str) -> None:
    assert "--help" in run(name, "--help").output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_ends() -> None:
    said = run("gpu", status=1).output.splitlines()
    assert said == ["benchmarks.gpu needs a CUDA device, and torch finds none here."]


QUICK = {
    "emulated": ("--model tiny --micro-batches 4 --rounds 1", "played"),
    "schedules": ("--quick", "search"),
    "split_backward": ("--quick", "quartiles"),
    "tracing": ("--models tiny --rounds 2", "untraced"),
    "planning": ("--quick", "nasnet"),
    "published_layouts": ("--quick", "39.1 B"),
}


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", QUICK)
def test_a_quick_run_ends_with_a_table(name: str) -> None:
    options, heading = QUICK[name]
    assert heading in run(name, *options.split()).output


@pytest.mark.slow
@pytest.mark.alone
def test_a_dry_run_of_the_gpu_benchmark_proves_times_watches_and_reports(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    run("gpu", "--device", "cpu", "--tiny", "--rounds", "1", "--stages", "2,4", "--json", str(file))
    report = json.loads(file.read_text())
    names = ["plain, micro-batches", "2 stages", "4 stages"]
    assert list(report["gpt"]["seconds"]) == names
    assert report["gpt"]["gradient_errors"].keys() == set(names[1:])
    assert report["gpt"]["overlap"]["2 stages"]["lanes"] >= 2
    assert report["gpt"]["planned_and_peak_bytes"]["2 stages"][0]["cpu"] > 0
    assert list(report["small"]["seconds"]) == ["plain, micro-batches", "2 stages"]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_race_times_every_framework_on_proven_gradients(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    shown = run(
        "cpu",
        *["--models", "tiny", "--micro-batches", "4", "--rounds", "1", "--tries", "1"],
        "--json",
        str(file),
    ).output
    race, overhead = json.loads(file.read_text())["races"]
    own = {f"pipepart {name}" for name in ("gpipe", "1f1b", "auto")}
    peers = {"torchgpipe", "torchgpipe, 2 workers", "torch.distributed gpipe", "torch.distributed 1f1b"}
    pipelines = own | {f"{name}, 2 ranks" for name in own} | peers
    assert race["gradient_errors"].keys() == pipelines
    assert max(race["gradient_errors"].values()) <= TOLERANCE
    steps = {name: len(samples["steps"]) for name, samples in race["samples"].items()}
    assert steps == dict.fromkeys({"plain", "plain, micro-batches"} | pipelines, 2)
    assert {name: len(seconds) for name, seconds in race["predicted_seconds"].items()} == dict.fromkeys(
        own, 1
    )
    assert overhead["micro_batches"] == 64
    for heading in ("tiny, 4 micro-batches", "µs per action"):
        assert heading in shown


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
