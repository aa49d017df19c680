"""Several copies of the model train as one: the sums of their gradients, followed weights, and what is refused."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from tests import plain
from tests.copies import cut_copies, summed_step

# Schedules, their chunks, the copies on devices of their own, and the copies that micro-batches take in turn.
KINDS = [
    ("1f1b", 1, 2, (0, 1)),
    ("gpipe", 1, 3, (0, 1, 2)),
    ("zb-h1", 1, 2, (0, 1)),
    ("interleaved-1f1b", 2, 2, (0, 1)),
    ("dualpipe-v", 2, 2, (0, 1)),
    ("chimera", 1, 1, (0, 1)),
    ("chimera", 1, 2, (0, 2, 1, 3)),
]
IN_TURN = (0, 1, 0, 1)


def batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 3, dtype=torch.double), torch.randn(samples, 4, dtype=torch.double)


def model_for(chunks: int) -> nn.Sequential:
    """Two layers for each of two times so many stages."""
    layers = [nn.Linear(3, 4), nn.Tanh()]
    for _ in range(2 * chunks - 1):
        layers += [nn.Linear(4, 4), nn.GELU()]
    return plain.in_double(layers)


def cut(model: nn.Sequential, copies: int = 2, **how):
    """Two stages, the second from layer 2 on."""
    return cut_copies(model, [2], copies, loss_fn=how.pop("loss_fn", nn.MSELoss()), **how)


@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
@pytest.mark.parametrize(("schedule", "chunks", "copies", "turn"), KINDS)
def test_gradients_are_the_sums_of_each_copy_added_up_in_order(schedule, chunks, copies, turn, recompute):
    for micro_batches in (1, 3, 6, 8):
        if micro_batches < copies:
            continue
        model = model_for(chunks)
        reference, whole = plain.twin(model), plain.twin(model)
        loss_fn = nn.MSELoss()
        with cut_copies(
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


def test_copies_follow_the_optimizer_of_the_user():
    model = model_for(1)
    reference = plain.twin(model)
    ours, theirs = (torch.optim.Adam(one.parameters(), lr=0.1) for one in (model, reference))
    with cut(model) as pipe:
        for _ in range(4):
            x, y = batch()
            ours.zero_grad()
            theirs.zero_grad()
            pipe.step(x, target=y)
            summed_step(reference, x, y, nn.MSELoss(), IN_TURN)
            ours.step()
            theirs.step()
    plain.assert_same(model.state_dict(), reference.state_dict())


def test_copies_follow_a_write_that_leaves_no_trace():
    model = model_for(1)
    x, y = batch()
    with cut(model) as pipe:
        pipe.step(x, target=y)
        weight = next(model.parameters())
        version = weight._version
        weight.data.mul_(3)
        assert weight._version == version
        reference = plain.twin(model)
        plain.assert_near(pipe(x).detach(), reference(x).detach())
        plain.assert_near(pipe.step(x, target=y), summed_step(reference, x, y, nn.MSELoss(), IN_TURN))


def test_copies_follow_which_parameters_are_trained():
    model = model_for(1)
    x, y = batch()
    with cut(model) as pipe:
        model[0].weight.requires_grad_(False)
        pipe.step(x, target=y)
        assert model[0].weight.grad is None
        model[0].weight.requires_grad_(True)
        model.zero_grad()
        reference = plain.twin(model)
        pipe.step(x, target=y)
        summed_step(reference, x, y, nn.MSELoss(), IN_TURN)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_copies_follow_the_mode_and_the_rate_of_a_dropout():
    dropout, last = nn.Dropout(0.5), nn.Linear(4, 4)
    model = plain.in_double([nn.Linear(3, 4), dropout, last])
    x, y = batch()
    with cut(model) as pipe:
        pipe.eval()
        plain.assert_near(pipe.step(x, target=y), nn.MSELoss()(model(x), y).detach())
        pipe.train()
        dropout.p = 0.0
        plain.assert_near(pipe.step(x, target=y), nn.MSELoss()(model(x), y).detach())
        dropout.p = 1.0
        plain.assert_near(pipe.step(x, target=y), (last.bias - y).square().mean().detach())


def test_copies_follow_the_dtype_of_the_model():
    model = model_for(1)
    x, y = (tensor.float() for tensor in batch())
    with cut(model) as pipe:
        model.float()
        reference = plain.twin(model)
        loss = pipe.step(x, target=y)
        assert loss.dtype == torch.float
        summed_step(reference, x, y, nn.MSELoss(), IN_TURN)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_copies_follow_buffers():
    class Scaled(nn.Module):
        scale: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    scaled = Scaled()
    model = plain.in_double([nn.Linear(3, 4), scaled, nn.Linear(4, 4)])
    x, _ = batch()
    with cut(model) as pipe:
        scaled.scale.fill_(2)
        plain.assert_near(pipe(x).detach(), model(x).detach())
        scaled.scale = torch.full((1,), 5.0, dtype=torch.double)  # another tensor, of another shape
        plain.assert_near(pipe(x).detach(), model(x).detach())


def test_copies_follow_a_tensor_that_is_no_buffer():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(4, dtype=torch.double)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    scaled = Scaled()
    model = plain.in_double([nn.Linear(3, 4), scaled, nn.Linear(4, 4)])
    x, _ = batch()
    with cut(model) as pipe:
        scaled.scale = scaled.scale * 2
        plain.assert_near(pipe(x).detach(), model(x).detach())
        scaled.scale.mul_(2)
        plain.assert_near(pipe(x).detach(), model(x).detach())


def test_random_layers_draw_the_same_for_every_number_of_copies():
    outcomes = []
    for copies in (1, 2, 4):
        torch.manual_seed(1)
        model = plain.in_double([nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 4), nn.Dropout(0.3)])
        x, y = batch()
        with cut(model, copies) as pipe:
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
    with cut(model, copies, schedule=schedule) as pipe:
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
    with cut(model) as pipe:
        (pipe(x).sum() + pipe(other).square().sum()).backward()
    (reference(x).sum() + reference(other).square().sum()).backward()
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_fewer_samples_than_copies_leave_some_idle():
    model = model_for(1)
    reference = plain.twin(model)
    x, y = batch(1)
    with cut(model, 3) as pipe:
        loss = pipe.step(x, target=y)
    plain.assert_near(loss, plain.whole_step(reference, x, y, nn.MSELoss()))
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_parameters_shared_within_a_stage_are_shared_in_copies():
    model = plain.in_double([nn.Linear(3, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])
    model[3].weight = model[1].weight
    reference = plain.twin(model)
    x, y = batch()
    with cut_copies(model, [1], 2, loss_fn=nn.MSELoss()) as pipe:
        pipe.step(x, target=y)
    summed_step(reference, x, y, nn.MSELoss(), IN_TURN)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize(("schedule", "copies"), [("1f1b", 2), ("zb-h1", 2), ("chimera", 1)])
def test_parameters_shared_by_stages_are_shared_in_copies(schedule, copies):
    model = plain.in_double([nn.Linear(4, 4), nn.Tanh(), nn.Tanh(), nn.Linear(4, 4)])
    model[3].weight = model[0].weight
    reference = plain.twin(model)
    x, y = torch.randn(8, 4).double(), torch.randn(8, 4).double()
    with cut(model, copies, schedule=schedule) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
            plain.whole_step(reference, x, y, nn.MSELoss())
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_a_batch_norm_in_training_is_refused_before_anything_runs():
    model = plain.in_double([nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4)), nn.Linear(4, 4)])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x, y = batch()
    with cut(model) as pipe:
        with pytest.raises(ValueError, match=r"layer '1.0' writes its buffer 'running_mean' .* replicas=1"):
            pipe.step(x, target=y)
        plain.assert_same(model.state_dict(), before)
        pipe.eval()
        plain.assert_near(pipe.step(x, target=y), nn.MSELoss()(model(x), y).detach())


class Counting(nn.Module):
    """Counts the samples that it has seen in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(x)
        return x


def test_any_layer_that_writes_a_buffer_is_refused():
    model = plain.in_double([nn.Linear(3, 4), Counting(), nn.Linear(4, 4)])
    x, y = batch()
    with cut(model) as pipe:
        with pytest.raises(ValueError, match=r"layer '1' writes its buffer 'seen' .* replicas=1"):
            pipe.step(x, target=y)
        pipe.eval()
        plain.assert_near(pipe.step(x, target=y), nn.MSELoss()(model(x), y).detach())


def test_hooks_on_parameters_are_refused_as_they_would_see_one_copy():
    x, y = batch()
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = model_for(1)
        with cut(model) as pipe:
            handle = getattr(model[2].weight, register)(lambda *_: None)
            with pytest.raises(ValueError, match=r"parameter '2.weight' has a hook"):
                pipe.step(x, target=y)
            assert model[0].weight.grad is None
            pipe.eval()
            with torch.no_grad():
                pipe(x)
            handle.remove()
            pipe.step(x, target=y)


def test_a_layer_that_is_changed_after_it_was_copied_is_refused():
    x, y = batch()
    model = model_for(1)
    with cut(model) as pipe:
        model[2].weight = nn.Parameter(torch.zeros(4, 4).double())
        with pytest.raises(ValueError, match=r"layer '2' \(Linear\) has other modules or parameters"):
            pipe.step(x, target=y)
    tanh = nn.Tanh()
    with cut(plain.in_double([nn.Linear(3, 4), tanh, nn.Linear(4, 4)])) as pipe:
        tanh.more = nn.Linear(1, 1)
        with pytest.raises(ValueError, match=r"layer '1' \(Tanh\) has other modules"):
            pipe.step(x, target=y)


def test_a_generator_of_its_own_is_refused():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source = torch.Generator()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(x.shape, generator=self.source)

    with pytest.raises(ValueError, match=r"layer '1' \(Noisy\) has a random generator of its own, 'source'"):
        cut(plain.in_double([nn.Linear(3, 4), Noisy(), nn.Linear(4, 4)]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_layer_is_refused():
    scripted: Any = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"layer '1' .* is TorchScript.*replicas=1"):
        cut(nn.Sequential(nn.Linear(3, 4), scripted, nn.Linear(4, 4)))


def test_a_layer_that_cannot_be_copied_is_named():
    class Locked(nn.Identity):
        def __deepcopy__(self, memo: object) -> nn.Module:
            raise RuntimeError("one of a kind")

    with pytest.raises(
        ValueError, match=r"layer '1' \(Locked\) cannot be copied \(one of a kind\): .*replicas=1"
    ):
        cut(nn.Sequential(nn.Linear(3, 4), Locked(), nn.Linear(4, 4)))


class Failing(nn.Module):
    """Fails on inputs that hold a negative first number, forward or backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Fail.apply(x, self.where)


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:
        ctx.fails = where == "backward" and x[0, 0] < 0
        if where == "forward" and x[0, 0] < 0:
            raise ArithmeticError("negative")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.fails:
            raise ArithmeticError("negative")
        return gradients[0], None


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failure_in_a_copy_is_placed_and_leaves_the_next_step_right(where):
    first = nn.Linear(3, 4, bias=False)
    nn.init.ones_(first.weight)
    model = plain.in_double([first, nn.Identity(), Failing(where), nn.Linear(4, 4)])
    reference = plain.twin(model)
    x, y = batch()
    x = x.abs()
    bad = x.clone()
    bad[6:8] *= -1  # micro-batch 3, the second of copy 1, which has gradients of the first by then
    with cut(model) as pipe:
        with pytest.raises(ArithmeticError) as caught:
            pipe.step(bad, target=y)
        assert "stage 1 of 2 of copy 1 on virtual:3, micro-batch 3 of 4" in caught.value.__notes__[-1]
        model.zero_grad()
        pipe.step(x, target=y)
    summed_step(reference, x, y, nn.MSELoss(), IN_TURN)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_a_trace_shows_the_gradients_being_summed():
    model = model_for(1)
    x, y = batch()
    with cut(model, trace=True) as pipe:
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
    with cut(model, 3) as pipe:
        assert list(pipe.state_dict()) == list(model.state_dict())
        assert len(list(pipe.parameters())) == len(list(model.parameters()))


class Late(nn.Module):
    """Takes its time in the second copy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name.endswith("virtual:1"):
            time.sleep(0.05)
        return x


def test_a_weight_that_hangs_on_all_losses_waits_for_those_of_other_copies():
    def mean_of_positive(output: torch.Tensor, target: torch.Tensor):
        chosen = output > 0
        return ((output - target) * chosen).sum(), chosen.sum()

    model = plain.in_double([nn.Linear(3, 4), Late(), nn.Linear(4, 4)])
    reference = plain.twin(model)
    x, y = batch()
    with cut_copies(model, [], 2, loss_fn=mean_of_positive, schedule="gpipe") as pipe:
        loss = pipe.step(x, target=y)
    output = reference(x)
    expected = ((output - y) * (output > 0)).sum() / (output > 0).sum()
    expected.backward()
    plain.assert_near(loss, expected.detach())
    plain.assert_close(plain.gradients(model), plain.gradients(reference))
    early = cut_copies(model, [], 2, loss_fn=mean_of_positive, schedule="1f1b")
    with early, pytest.raises(ValueError, match="schedule='gpipe'"):
        early.step(x, target=y)


def test_a_failure_ends_the_wait_for_other_copies():
    def fails_for_large(output: torch.Tensor, target: torch.Tensor):
        if float(target.max()) > 5:
            raise ArithmeticError("large")
        return (output - target).sum(), (output > 0).sum()

    model = plain.in_double([nn.Linear(3, 4), Late(), nn.Linear(4, 4)])
    x, y = batch()
    y[2:4] = 9  # of micro-batch 1, the first of the second copy
    pipe = cut_copies(model, [], 2, loss_fn=fails_for_large, schedule="gpipe")
    with pipe, pytest.raises(ArithmeticError, match="large"):
        pipe.step(x, target=y)
