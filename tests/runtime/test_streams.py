"""On devices that run behind the host, a step gives the numbers of the plain model, and every access has its order."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from pipepart.capture import flatten
from tests.support import plain
from tests.support.chains import Offload, Recompute, plan_by_hand
from tests.support.on_devices import (
    AND_BACK,
    CHUNKS,
    SHARED,
    TWO,
    cut_on,
    gradients,
    late,
    on_devices,
    sample,
    state,
)
from tests.support.pieces import WIDTH, Fork, Join, Middle, Noise
from tests.support.replicas import IN_TURN, batch, model_for, summed_step

# The devices are compiled at their first use on a machine.
pytestmark = [pytest.mark.usefixtures("late_devices"), pytest.mark.timeout(600)]


def network(stages: int) -> nn.Sequential:
    """Two layers for each stage, some of which write their buffers."""
    layers: list[nn.Module] = []
    for stage in range(stages):
        layers += [nn.Linear(5, 5), nn.BatchNorm1d(5) if stage % 3 == 1 else nn.Tanh()]
    return plain.in_double(layers)


def check_steps(
    devices: tuple[str, ...], schedule: str, recompute: Recompute = "never", offload: Offload = "never"
) -> None:
    """Two steps with an optimizer, which writes the weights on the caller's streams while steps are queued."""
    stages = len(devices) * CHUNKS[schedule]
    model = network(stages)
    reference = plain.twin(model)
    with cut_on(
        devices,
        model,
        range(2, 2 * stages, 2),
        nn.MSELoss(),
        micro_batches=6,
        schedule=schedule,
        chunks=CHUNKS[schedule],
        recompute=recompute,
        offload=offload,
    ) as pipe:
        ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference))
        losses: list[Tensor] = []
        with late():
            for _ in range(2):
                ours.zero_grad()
                theirs.zero_grad()
                x, y = sample(14, 5)
                loss = pipe.step(x.to(devices[0]), target=y.to(devices[-1]))
                expected = plain.micro_batched_step(reference, x, y, nn.MSELoss(), 6)
                ours.step()
                theirs.step()
                losses[:] = [loss, expected]
            plain.assert_near(losses[0].cpu(), losses[1].double(), 1e-6)
            plain.assert_same(gradients(model), plain.gradients(reference))
            plain.assert_same(state(model), dict(reference.state_dict()))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("devices", "recompute"),
    [
        (TWO, "never"),
        pytest.param(TWO, "always", marks=SLOW),
        *(
            pytest.param(*one, marks=SLOW)
            for one in itertools.product((SHARED, AND_BACK), ("never", "always"))
        ),
    ],
)
@pytest.mark.parametrize("schedule", CHUNKS)
def test_every_schedule_trains_as_the_plain_model(schedule, devices, recompute):
    check_steps(devices, schedule, recompute)


def test_workers_may_share_a_device_and_forwards_run_again():
    check_steps(SHARED, "zb-v", "always")
    check_steps(TWO, "1f1b", "except-last")


@pytest.mark.parametrize(
    ("schedule", "devices"), [("1f1b", TWO), ("interleaved-1f1b", TWO), ("1f1b", SHARED), ("zb-h1", SHARED)]
)
def test_stashes_may_wait_on_the_host(schedule, devices):
    check_steps(devices, schedule, offload="stash")


@pytest.mark.parametrize(
    ("schedule", "copies", "shared"), [("chimera", 1, False), ("1f1b", 2, True), ("zb-h1", 2, False)]
)
def test_gradients_of_copies_of_the_model_are_added_up(schedule, copies, shared):
    model = model_for(1)
    reference = plain.twin(model)
    plan = plan_by_hand(
        [name for name, _ in flatten(model)], [2], replicas=copies, micro_batches=4, schedule=schedule
    )
    devices = [f"vdev:{index % 2 if shared else index}" for index in range(2 * copies)]
    with Pipeline(model, on_devices(plan, devices), nn.MSELoss()) as pipe:
        x, y = batch(8)
        with late():
            loss = pipe.step(x.to("vdev:0"), target=y.to(devices[-1]))
            expected = summed_step(reference, x, y, nn.MSELoss(), IN_TURN)
            plain.assert_near(loss.cpu(), expected)
            plain.assert_same(gradients(model), plain.gradients(reference))


def test_messages_may_be_nests_with_tensors_that_ask_for_no_gradient():
    model = plain.in_double([nn.Linear(WIDTH, WIDTH), Fork(), Middle(), Join(), nn.Linear(WIDTH, 2)])
    reference = plain.twin(model)
    with cut_on(("vdev:0", "vdev:1", "vdev:1", "vdev:2"), model, [2, 3, 4], nn.MSELoss()) as pipe:
        x, y = sample(8, WIDTH, 2)
        with late():
            pipe.step(x.to("vdev:0"), target=y.to("vdev:2"))
            plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
            plain.assert_same(gradients(model), plain.gradients(reference))


class TiedHead(nn.Module):
    """Scores for words by the weight of their embedding."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


@pytest.mark.parametrize(("schedule", "devices"), [("1f1b", SHARED), ("zb-h1", TWO)])
def test_stages_on_other_devices_follow_a_parameter_that_they_share(schedule, devices):
    """The optimizer steps on the first stage's device; the other has a copy, and hands its gradient over."""
    embedding = nn.Embedding(9, 4)
    model = nn.Sequential(embedding, nn.Linear(4, 4), nn.Tanh(), TiedHead(embedding)).double()
    reference = plain.twin(model)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, reference))
    with cut_on(devices, model, [2], nn.CrossEntropyLoss(), schedule=schedule) as pipe:
        words, following = torch.randint(9, (8,)), torch.randint(9, (8,))
        with late():
            for _ in range(2):
                ours.zero_grad()
                theirs.zero_grad()
                pipe.step(words.to(devices[0]), target=following.to(devices[1]))
                plain.micro_batched_step(reference, words, following, nn.CrossEntropyLoss(), 4)
                ours.step()
                theirs.step()
            plain.assert_same(gradients(model), plain.gradients(reference))


def test_random_layers_draw_by_their_place_and_micro_batch():
    first, middle, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
    model = plain.in_double([first, Noise(), middle, nn.RReLU(), Noise(), last])
    reference = plain.twin(model).to("vdev:2")
    x, y = sample(8, WIDTH, 2)
    with cut_on(TWO, model, [3], nn.MSELoss(), recompute="always") as pipe:
        torch.manual_seed(5)
        with late():
            pipe.step(x.to("vdev:0"), target=y.to("vdev:1"))
            found = gradients(model)
        torch.manual_seed(5)
        there = x.to("vdev:2"), y.to("vdev:2")
        plain.micro_batched_step(reference, *there, nn.MSELoss(), 4, drawing=True)
        plain.assert_same(found, gradients(reference))


def test_the_mean_of_the_loss_is_over_all_samples_where_it_comes_as_sum_and_count():
    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        counted = target[:, 0] > 0
        return ((output - target).square().mean(1) * counted).sum(), counted.sum()

    model = plain.in_double([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])
    reference = plain.twin(model)
    x, y = sample(8, 4)
    with cut_on(TWO, model, [1], loss_fn) as pipe, late():
        loss = pipe.step(x.to("vdev:0"), target=y.to("vdev:1"))
        reference.zero_grad()
        total, count = loss_fn(reference(x), y)
        (total / count).backward()
        plain.assert_near(loss.cpu(), (total / count).detach(), 1e-12)
        plain.assert_close(gradients(model), plain.gradients(reference))
