"""The other frameworks of the benchmark compute the gradients of the plain model."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks import models
from benchmarks.contender import Contender, Course
from benchmarks.peers.distributed import OnRanks, Ranks
from benchmarks.peers.plain import Plain
from benchmarks.peers.torchgpipe_threads import TorchGPipe
from benchmarks.proof import require_equal

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
