"""On devices that run behind the host, a step gives the numbers of the plain model, and every access has its order."""

import random

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.conformance.runners import (
    AMONG_DEVICES,
    DRAWN,
    LATE,
    SCHEDULES,
    VALUES,
    Mode,
    covering,
    drawn,
)
from tests.pipeline.conformance.test_conformance import check
from tests.support import plain
from tests.support.on_devices import TWO, cut_on, gradients, late, sample
from tests.support.seeds import seeds

# The devices are compiled at their first use on a machine.
pytestmark = [pytest.mark.usefixtures("late_devices"), pytest.mark.timeout(600)]

AMONG = AMONG_DEVICES | {"home": list(LATE)}
MODES = list(covering(random.Random(0), each=1, among=AMONG))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_late_devices_train_as_the_plain_model(mode: Mode):
    """Two steps with an optimizer, which writes the weights on the caller's streams while steps are queued."""
    check(mode)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*SCHEDULES, DRAWN], ids=str)
def test_late_devices_train_as_the_plain_model_in_many_modes(schedule: tuple[str, int]):
    for seed in seeds(4, f"late {schedule}"):
        check(drawn(random.Random(seed), AMONG, schedule=schedule), seed)


def test_the_modes_have_every_home_and_stash_and_the_most_schedules():
    assert {mode.home for mode in MODES} == set(LATE)
    assert {mode.stash for mode in MODES} == set(VALUES["stash"])
    assert len({mode.schedule[0] for mode in MODES}) >= 10


@pytest.mark.parametrize(
    ("schedule", "replicas", "target_on", "devices"),
    [
        ("1f1b", 2, "vdev:0", [*TWO, *TWO[::-1]]),
        ("gpipe", 2, "cpu", [*TWO, *TWO[::-1]]),
        ("1f1b", 2, "vdev:1", [*TWO, "cpu", "cpu"]),
        ("1f1b", 2, "vdev:0", ["cpu", "cpu", *TWO]),
        ("chimera", 1, "vdev:1", TWO),
        ("1f1b", 1, "cpu", TWO),
        ("1f1b", 1, "vdev:0", TWO),
    ],
)
def test_targets_are_counted_wherever_they_are_and_on_the_streams_of_each_replica(
    schedule, replicas, target_on, devices
):
    """A mean over classes with weights, some targets ignored: the counts are tensors of the devices."""
    model = plain.in_double([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)])
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0]).double(), ignore_index=-1)
    reference = plain.twin(model)
    x, y = torch.randn(12, 4).double(), torch.tensor([0, 1, 2, -1, -1, -1, 2, 1, 0, -1, 2, 2])
    expected = plain.whole_step(reference, x, y, loss_fn)
    with cut_on(devices, model, [2], loss_fn, schedule=schedule, replicas=replicas) as pipe, late():
        loss = pipe.step(x.to("vdev:0"), target=y.to(target_on))
        plain.assert_near(loss.cpu(), expected)
        plain.assert_close(gradients(model), plain.gradients(reference))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("by", ["target", "output"])
def test_the_mean_of_the_loss_is_over_all_samples_where_it_comes_as_sum_and_count(by, replicas):
    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        counted = (target if by == "target" else output.detach())[:, 0] > 0
        return ((output - target).square().mean(1) * counted).sum(), counted.sum()

    model = plain.in_double([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])
    reference = plain.twin(model)
    x, y = sample(8, 4)
    total, count = loss_fn(reference(x), y)
    (total / count).backward()
    with cut_on(TWO * replicas, model, [1], loss_fn, replicas=replicas) as pipe, late():
        loss = pipe.step(x.to("vdev:0"), target=y.to("vdev:1"))
        plain.assert_near(loss.cpu(), (total / count).detach(), 1e-12)
        plain.assert_close(gradients(model), plain.gradients(reference))
