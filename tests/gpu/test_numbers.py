"""Steps on GPUs have the numbers of the plain model on the CPU, up to the order in which kernels sum."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from pipepart.capture import flatten
from tests.gpu.late import Late, borders, cut_late_chain, late_chain
from tests.support import plain
from tests.support.chains import on_devices, plan_by_hand
from tests.support.delayed import DelayedTraining, batches, borders_of
from tests.support.on_devices import CHUNKS, cut_on, gradients, sample, state
from tests.support.pieces import WIDTH, Fails, Fork, Join, Middle
from tests.support.replicas import IN_TURN, batch, model_for

CLOSE = 1e-9


def numbers(model: nn.Module) -> dict[str, Tensor]:
    """Its state, counts too as numbers that may differ by little."""
    return {name: tensor.double() for name, tensor in state(model).items()}


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", CHUNKS)
def test_every_schedule_trains_as_the_plain_model(devices, schedule, recompute):
    """Several steps, between which the optimizer writes the weights on the caller's streams."""
    model = late_chain(len(devices) * CHUNKS[schedule])
    reference = plain.twin(model)
    with cut_late_chain(model, devices, schedule, recompute=recompute) as pipe:
        ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference))
        for _ in range(3):
            x, y = sample(32, 64)
            ours.zero_grad()
            theirs.zero_grad()
            loss = pipe.step(x.to(devices[0]), target=y.to(devices[-1]))
            ours.step()
            expected = plain.micro_batched_step(reference, x, y, nn.MSELoss(), 8)
            theirs.step()
            plain.assert_near(loss.cpu(), expected.double(), CLOSE)
        plain.assert_close(gradients(model), plain.gradients(reference), CLOSE)
        plain.assert_close(numbers(model), numbers(reference), CLOSE)


@pytest.mark.parametrize("schedule", ["chimera", "1f1b", "zb-h1"])
def test_gradients_of_copies_of_the_model_are_added_up(schedule):
    count = 1 if schedule == "chimera" else 2
    model = model_for(1)
    reference = plain.twin(model)
    plan = plan_by_hand(
        [name for name, _ in flatten(model)], [2], replicas=count, micro_batches=4, schedule=schedule
    )
    homes = [f"cuda:{index % torch.cuda.device_count()}" for index in range(2 * count)]
    with Pipeline(model, on_devices(plan, homes), nn.MSELoss()) as pipe:
        for _ in range(3):
            x, y = batch(8)
            pipe.step(x.to(homes[0]), target=y.to(homes[-1]))
            plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4, replica_of=IN_TURN)
        plain.assert_close(gradients(model), plain.gradients(reference), CLOSE)


def test_messages_may_be_nests(devices):
    if len(devices) != 4:
        pytest.skip("for four workers")
    model = plain.in_double([nn.Linear(WIDTH, WIDTH), Fork(), Late(), Join(), nn.Linear(WIDTH, 2)])
    model[2] = Middle()
    reference = plain.twin(model)
    with cut_on(devices, model, [2, 3, 4], nn.MSELoss()) as pipe:
        for _ in range(3):
            x, y = sample(8, WIDTH, 2)
            pipe.step(x.to(devices[0]), target=y.to(devices[-1]))
            plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
        plain.assert_close(gradients(model), plain.gradients(reference), CLOSE)


class TiedHead(nn.Module):
    """Scores for words by the weight of their embedding."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stages_follow_a_parameter_that_they_share(devices, schedule):
    if len(devices) != 2:
        pytest.skip("for two workers")
    embedding = nn.Embedding(9, 4)
    model = nn.Sequential(embedding, Late(), nn.Linear(4, 4), Late(), TiedHead(embedding)).double()
    reference = plain.twin(model)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, reference))
    with cut_on(devices, model, [3], nn.CrossEntropyLoss(), schedule=schedule) as pipe:
        for _ in range(4):
            words, following = torch.randint(9, (8,)), torch.randint(9, (8,))
            ours.zero_grad()
            theirs.zero_grad()
            pipe.step(words.to(devices[0]), target=following.to(devices[1]))
            plain.micro_batched_step(reference, words, following, nn.CrossEntropyLoss(), 4)
            ours.step()
            theirs.step()
        plain.assert_close(gradients(model), plain.gradients(reference), CLOSE)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_random_layers_draw_by_their_place_and_micro_batch(devices, recompute):
    layers = [nn.Linear(64, 64), nn.Dropout(0.4), nn.Linear(64, 64), nn.Dropout(0.4), nn.Linear(64, 64)]
    model = plain.in_double(layers)
    reference = plain.twin(model).to("cuda:0")
    x, y = sample(16, 64)
    with cut_on(devices, model, range(1, len(devices)), nn.MSELoss(), recompute=recompute) as pipe:
        torch.manual_seed(3)
        pipe.step(x.to(devices[0]), target=y.to(devices[-1]))
    torch.manual_seed(3)
    plain.micro_batched_step(reference, x.cuda(), y.cuda(), nn.MSELoss(), 4, drawing=True)
    plain.assert_close(gradients(model), gradients(reference), CLOSE)


def test_an_output_is_differentiated_in_the_graph_that_it_is_in(devices):
    model, before, behind = late_chain(len(devices)), nn.Linear(64, 64).double(), nn.Linear(64, 1).double()
    whole = nn.ModuleList([before, model, behind])
    reference = plain.twin(whole)
    before.to(devices[0])
    behind.to(devices[-1])
    first, middle, last = reference.children()
    with cut_on(devices, model, borders(len(devices))) as pipe:
        for aside in (False, True):
            x, _ = sample(16, 64)
            with torch.cuda.stream(torch.cuda.Stream()) if aside else torch.cuda.stream(None):
                behind(pipe(before(x.to(devices[0])))).square().sum().backward()
            torch.cuda.synchronize()
            given = first(x)
            last(torch.cat([middle(one) for one in given.split(4)])).square().sum().backward()
        plain.assert_close(gradients(whole), plain.gradients(reference), CLOSE)


def test_pinned_mini_batches_are_there_when_a_step_reads_them(devices):
    model = late_chain(len(devices))
    reference = plain.twin(model)
    given = [sample(16, 64) for _ in range(6)]
    with cut_on(devices, model, borders(len(devices)), nn.MSELoss()) as pipe:
        for x, y in given:
            pipe.step(x.pin_memory(), target=y.pin_memory())
    for x, y in given:
        plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_close(gradients(model), plain.gradients(reference), CLOSE)


def test_optimizers_of_stages_step_behind_the_gradients_of_their_stage(devices):
    def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    model = late_chain(len(devices))
    reference = plain.twin(model)
    one = sgd(list(reference.parameters()))
    with cut_on(devices, model, borders(len(devices)), nn.MSELoss(), optimizer=sgd) as pipe:
        for _ in range(4):
            x, y = sample(16, 64)
            pipe.step(x.to(devices[0]), target=y.to(devices[-1]))
            one.zero_grad()
            plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
            one.step()
        plain.assert_close(numbers(model), numbers(reference), CLOSE)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_asynchronous_schedules_keep_the_weights_of_each_micro_batch(devices, schedule):
    if len(devices) < 2:
        pytest.skip("for several workers")

    def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.01)

    stages = len(devices)
    model = plain.in_double([part for _ in range(stages) for part in (nn.Linear(5, 5), nn.LayerNorm(5))])
    oracle = DelayedTraining(copy.deepcopy(model), stages, schedule, adam)
    names = [name for name, _ in flatten(model)]
    plan = plan_by_hand(names, borders_of(stages), micro_batches=12, schedule=schedule)
    with Pipeline(model, on_devices(plan, devices), nn.MSELoss(), optimizer=adam) as pipe:
        for x, y in batches(4, samples=24):
            ours = pipe.step(x.to(devices[0]), target=y.to(devices[-1]))
            plain.assert_near(ours.cpu(), oracle.step(x, y, nn.MSELoss(), 12), CLOSE)
    theirs = [parameter for stage in oracle.stages for parameter in stage.parameters()]
    for parameter, expected in zip(model.parameters(), theirs, strict=True):
        plain.assert_near(parameter.detach().cpu(), expected.detach(), 1e-6)


def test_the_step_after_one_that_failed_gives_the_right_numbers(devices):
    chain, fails = late_chain(len(devices)), Fails()
    model = nn.Sequential(*chain, fails)
    reference = plain.twin(chain)
    x, y = sample(16, 64)
    with cut_on(devices, model, borders(len(devices)), nn.MSELoss()) as pipe:
        start = state(model)
        with pytest.raises(ArithmeticError, match="third call"):
            pipe.step(x.to(devices[0]), target=y.to(devices[-1]))
        model.load_state_dict(start)
        pipe.zero_grad()
        pipe.step(x.to(devices[0]), target=y.to(devices[-1]))
        plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
        plain.assert_close(gradients(chain), plain.gradients(reference), CLOSE)
