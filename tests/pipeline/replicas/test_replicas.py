"""Several replicas of the model train as one: each sums its micro-batches, and their sums are added in order."""

import threading
import time

import pytest
import torch
from torch import nn

from tests.support import plain
from tests.support.replicas import IN_TURN, batch, cut_in_two, cut_replicas, model_for, summed_step

# Schedules, their chunks, the copies on devices of their own, and the copies that micro-batches take in turn.
KINDS = [
    ("1f1b", 1, 2, (0, 1), "never"),
    ("gpipe", 1, 3, (0, 1, 2), "always"),
    ("zb-h1", 1, 2, (0, 1), "except-last"),
    ("dualpipe-v", 2, 2, (0, 1), "never"),
    ("chimera", 1, 1, (0, 1), "except-last"),
    ("chimera", 1, 2, (0, 2, 1, 3), "always"),
]


@pytest.mark.parametrize(("schedule", "chunks", "copies", "turn", "recompute"), KINDS)
def test_gradients_are_the_sums_of_each_copy_added_up_in_order(schedule, chunks, copies, turn, recompute):
    for micro_batches in (3, 8):
        if micro_batches < copies:
            continue
        model = model_for(chunks)
        reference, whole = plain.twin(model), plain.twin(model)
        loss_fn = nn.MSELoss()
        with cut_replicas(
            model,
            range(2, 4 * chunks, 2),
            copies,
            loss_fn=loss_fn,
            schedule=schedule,
            chunks=chunks,
            micro_batches=micro_batches,
            recompute=recompute,
        ) as pipe:
            for _ in range(2):  # the second step adds to the gradients of the first
                x, y = batch(16)
                loss = pipe.step(x, target=y)
                theirs = summed_step(
                    reference, x, y, loss_fn, [turn[k % len(turn)] for k in range(micro_batches)]
                )
                plain.assert_near(loss, theirs)
                plain.assert_near(loss, plain.whole_step(whole, x, y, loss_fn))
        plain.assert_same(plain.gradients(model), plain.gradients(reference))
        plain.assert_close(plain.gradients(model), plain.gradients(whole))


def test_random_layers_draw_the_same_for_every_number_of_copies():
    outcomes = []
    for copies in (1, 2, 4):
        torch.manual_seed(1)
        model = plain.in_double([nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 4), nn.Dropout(0.3)])
        x, y = batch()
        with cut_in_two(model, copies) as pipe:
            losses = [pipe.step(x, target=y) for _ in range(2)]
            outcomes.append((torch.stack(losses), pipe(x).detach(), plain.gradients(model)))
    assert outcomes[0][0][0] != outcomes[0][0][1]
    for losses, output, gradients in outcomes[1:]:
        plain.assert_near(losses, outcomes[0][0], 0)
        plain.assert_near(output, outcomes[0][1], 0)
        plain.assert_close(gradients, outcomes[0][2])


@pytest.mark.parametrize(("schedule", "copies"), [("1f1b", 2), ("gpipe", 3), ("zb-h1", 2), ("chimera", 1)])
def test_the_pipeline_itself_computes_and_differentiates_in_copies(schedule, copies):
    model = model_for(1)
    reference = plain.twin(model)
    x, _ = batch()
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with cut_in_two(model, copies, schedule=schedule) as pipe:
        with torch.no_grad():
            plain.assert_near(pipe(x).detach(), reference(x).detach())
        output = pipe(ours)
        output.square().sum().backward()
    expected = reference(theirs)
    plain.assert_near(output.detach(), expected.detach())
    expected.square().sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    plain.assert_near(ours.grad, theirs.grad)
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_two_outputs_wait_for_one_backward():
    model = model_for(1)
    reference = plain.twin(model)
    x, other = batch()[0], batch()[0]
    with cut_in_two(model) as pipe:
        (pipe(x).sum() + pipe(other).square().sum()).backward()
    (reference(x).sum() + reference(other).square().sum()).backward()
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_fewer_samples_than_copies_leave_some_idle():
    model = model_for(1)
    reference = plain.twin(model)
    x, y = batch(1)
    with cut_in_two(model, 3) as pipe:
        loss = pipe.step(x, target=y)
    plain.assert_near(loss, plain.whole_step(reference, x, y, nn.MSELoss()))
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_parameters_shared_within_a_stage_are_shared_in_copies():
    model = plain.in_double([nn.Linear(3, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])
    model[3].weight = model[1].weight
    reference = plain.twin(model)
    x, y = batch()
    with cut_replicas(model, [1], 2, loss_fn=nn.MSELoss()) as pipe:
        pipe.step(x, target=y)
    summed_step(reference, x, y, nn.MSELoss(), IN_TURN)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize(("schedule", "copies"), [("1f1b", 2), ("zb-h1", 2), ("chimera", 1)])
def test_parameters_shared_by_stages_are_shared_in_copies(schedule, copies):
    model = plain.in_double([nn.Linear(4, 4), nn.Tanh(), nn.Tanh(), nn.Linear(4, 4)])
    model[3].weight = model[0].weight
    reference = plain.twin(model)
    x, y = torch.randn(8, 4).double(), torch.randn(8, 4).double()
    with cut_in_two(model, copies, schedule=schedule) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
            plain.whole_step(reference, x, y, nn.MSELoss())
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_a_trace_shows_the_gradients_being_summed():
    model = model_for(1)
    x, y = batch()
    with cut_in_two(model, trace=True) as pipe:
        pipe.step(x, target=y)
        trace = pipe.last_trace
        assert trace is not None
        assert [str(row[-1]) for row in trace.schedule.actions] == [
            f"{stage}REDUCE_GRAD" for stage in range(4)
        ]
        last = max(ends[-2] for ends in trace.ends)
        assert max(trace.ends[0][-1], trace.ends[1][-1]) >= last - 1e-9


def test_the_state_is_that_of_the_model():
    model = model_for(1)
    with cut_in_two(model, 3) as pipe:
        assert list(pipe.state_dict()) == list(model.state_dict())
        assert len(list(pipe.parameters())) == len(list(model.parameters()))


class Late(nn.Module):
    """Takes its time in the second copy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name.endswith("virtual:1"):
            time.sleep(0.05)
        return x


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_count_of_what_the_model_gives_is_that_of_all_copies(schedule):
    def mean_of_positive(output: torch.Tensor, target: torch.Tensor):
        chosen = output > 0
        return ((output - target) * chosen).sum(), chosen.sum()

    model = plain.in_double([nn.Linear(3, 4), Late(), nn.Linear(4, 4)])
    reference = plain.twin(model)
    x, y = batch()
    with cut_replicas(model, [], 2, loss_fn=mean_of_positive, schedule=schedule) as pipe:
        loss = pipe.step(x, target=y)
    output = reference(x)
    expected = ((output - y) * (output > 0)).sum() / (output > 0).sum()
    expected.backward()
    plain.assert_near(loss, expected.detach())
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_a_failure_in_the_loss_of_one_copy_ends_the_others():
    def fails_for_large(output: torch.Tensor, target: torch.Tensor):
        if float(target.max()) > 5:
            raise ArithmeticError("large")
        return (output - target).sum(), (output > 0).sum()

    model = plain.in_double([nn.Linear(3, 4), Late(), nn.Linear(4, 4)])
    x, y = batch()
    y[2:4] = 9  # of micro-batch 1, the first of the second copy
    pipe = cut_replicas(model, [], 2, loss_fn=fails_for_large, schedule="gpipe")
    with pipe, pytest.raises(ArithmeticError, match="large"):
        pipe.step(x, target=y)
