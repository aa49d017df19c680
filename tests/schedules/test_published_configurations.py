"""Bubbles of published training runs on thousands of GPUs."""

import pytest

from schedules import StageCosts, build, simulate

# Megatron-Turing NLG 530B, Smith et al. 2022, arXiv 2201.11990, section 2: 35 pipeline stages of 8-way tensor
# parallelism, a batch of 1,920 sequences, one sequence a micro-batch: DGX A100 servers, seconds of an iteration.
SERVERS = {280: 60.1, 350: 50.2, 420: 44.4}


def micro_batches_of(servers: int) -> int:
    return 1920 * 35 // servers  # a server is one stage of one replica


@pytest.mark.parametrize(("servers", "bubble"), [(280, 34 / 274), (350, 34 / 226), (420, 34 / 194)])
def test_the_bubble_of_530b_parameters_grows_with_the_replicas(servers, bubble):
    costs = StageCosts([1.0] * 35, [1.0] * 35, [1.0] * 35)
    assert simulate(build("1f1b", 35, micro_batches_of(servers)), costs).bubble == pytest.approx(bubble)


@pytest.mark.parametrize(("servers", "within"), [(350, 0.015), (420, 0.045)])
def test_the_published_iterations_of_530b_parameters_follow_from_one_of_them(servers, within):
    def step(count, seconds=1.0):
        third = [seconds / 3] * 35
        return simulate(build("1f1b", 35, micro_batches_of(count)), StageCosts(third, third, third)).makespan

    seconds = SERVERS[280] / step(280)
    simulated = step(servers, seconds)
    assert (
        SERVERS[servers] * (1 - within) < simulated < SERVERS[servers]
    )  # the gradient all-reduce is left out


@pytest.mark.parametrize(("f", "i", "w"), [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 3.0, 1.0)])
def test_the_bubbles_of_deepseek_v3(f, i, w):
    """Table 2 of the DeepSeek-V3 report, arXiv 2412.19437, for its 16 pipeline stages: B is I and W."""
    micro_batches, b = 64, i + w

    def idle(name, devices):
        schedule = build(name, devices, micro_batches)
        stages = schedule.stages
        timeline = simulate(schedule, StageCosts([f] * stages, [i] * stages, [w] * stages))
        return timeline.makespan - micro_batches * (f + b) * stages / devices

    assert idle("1f1b", 16) == pytest.approx(15 * (f + b))
    assert idle("zb-h1", 16) == pytest.approx(15 * (f + b - 2 * w))
    assert idle("dualpipe-v", 8) <= (16 / 2 - 1) * ((f + b) + b - 3 * w)  # F&B takes as long as F and B
