"""Recomputation changes what is kept, and no number: gradients, buffers and loss are those of one forward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support import plain
from tests.support.chains import Recompute, cut_by_hand
from tests.support.recomputed import MODES, check_all_modes


class Steps(nn.Module):
    """Counts its forwards, by whether they are to be differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(torch.is_grad_enabled())
        return x * 1


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 6),
        nn.BatchNorm1d(6, momentum=None),
        nn.Dropout(0.4),
        nn.Linear(6, 6),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.BatchNorm1d(6),
        nn.Linear(6, 3),
    )


@pytest.mark.parametrize(
    ("schedule", "chunks", "borders"),
    [("1f1b", 1, (3, 4)), ("gpipe", 1, (1,)), ("zb-h1", 1, (4, 5, 7)), ("zb-v", 2, (2, 4, 5))],
)
def test_numbers_buffers_and_random_state_are_those_of_one_forward(schedule, chunks, borders):
    """With dropout, BatchNorms and layers in place at the borders and elsewhere."""
    check_all_modes(network(), schedule=schedule, chunks=chunks, borders=borders)


@pytest.mark.parametrize(("mode", "forwards"), [("never", 4), ("except-last", 7), ("always", 8)])
def test_how_often_a_layer_runs_and_the_loss_runs_once(mode, forwards):
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if output.device.type == "cpu":  # else it is called on no values, to see what its mean is of
            losses.append(len(output))
        return functional.mse_loss(output, target)

    losses: list[int] = []
    steps = Steps()
    model = nn.Sequential(nn.Linear(3, 3), steps, nn.Linear(3, 3))
    with cut_by_hand(model, [1], loss_fn=loss_fn, micro_batches=4, recompute=mode, reduction="mean") as pipe:
        pipe.step(torch.randn(8, 3), target=torch.randn(8, 3))
        steps.calls.clear()
        losses.clear()
        pipe.step(torch.randn(8, 3), target=torch.randn(8, 3))
    assert steps.calls == [True] * forwards
    assert losses == [2] * 4


@pytest.mark.parametrize("mode", MODES)
def test_hooks_on_gradients_fire_once(mode):
    class Hooked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            y.register_hook(lambda gradient: fired.append("tensor"))
            return y

    fired: list[str] = []
    model = nn.Sequential(nn.Linear(3, 3), Hooked(), nn.Linear(3, 3))
    weight = model[0].weight
    assert isinstance(weight, Tensor)
    weight.register_hook(lambda gradient: fired.append("parameter"))
    model[2].register_full_backward_hook(lambda *_: fired.append("module"))
    weight.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), micro_batches=4, recompute=mode) as pipe:
        pipe.step(torch.randn(8, 3), target=torch.randn(8, 3))
    assert {what: fired.count(what) for what in fired} == dict.fromkeys(
        ("tensor", "parameter", "module", "accumulated"), 4
    )


@pytest.mark.parametrize("mode", MODES)
def test_nothing_runs_twice_where_no_backward_is_needed(mode):
    first, second = Steps(), Steps()
    model = nn.Sequential(nn.Linear(3, 3), first, nn.Linear(3, 3), second)
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), micro_batches=4, recompute=mode) as pipe:
        model[0].requires_grad_(False)
        pipe.step(torch.randn(8, 3), target=torch.randn(8, 3))
        assert len(first.calls) == 4
        assert len(second.calls) == (7 if mode == "except-last" else 8)
        model.requires_grad_(False)
        second.calls.clear()
        pipe.step(torch.randn(8, 3), target=torch.randn(8, 3))
        assert len(second.calls) == 4
        first.calls.clear()
        model.requires_grad_(True)
        with torch.no_grad():
            pipe(torch.randn(8, 3))
        assert first.calls == [False] * 4


def test_a_micro_batch_whose_targets_are_all_ignored():
    """Its loss is 0/0 and counts for nothing."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4))
    reference = plain.twin(model)
    x, y = torch.randn(6, 3), torch.tensor([1, 2, -100, -100, 3, 0])
    with cut_by_hand(model, [1], loss_fn=nn.CrossEntropyLoss(), micro_batches=3, recompute="always") as pipe:
        loss = pipe.step(x, target=y)
    plain.assert_near(loss, plain.whole_step(reference, x, y, nn.CrossEntropyLoss()), 1e-6)
    plain.assert_close(plain.gradients(model), plain.gradients(reference), 1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_drop_in_form(mode, chunks):
    """As many layers run twice as in a step; dropout draws once; a second call draws other numbers."""

    def outcome(recompute: Recompute) -> dict[str, Any]:
        ours = plain.twin(model)
        torch.manual_seed(3)
        found: dict[str, Any] = {}
        with cut_by_hand(
            ours,
            (2, 4, 5),
            micro_batches=4,
            recompute=recompute,
            chunks=chunks,
            schedule="interleaved-1f1b",
        ) as pipe:
            for call in range(2):
                x = torch.randn(11, 6).requires_grad_()
                output = pipe(x)
                output.sin().sum().backward()
                found |= {f"output {call}": output.detach(), f"input {call}": x.grad}
        state = torch.get_rng_state().float()
        return found | plain.gradients(ours) | dict(ours.named_buffers()) | {"random": state}

    model = network()
    plain.assert_same(outcome(mode), outcome("never"))
    steps = Steps()
    with cut_by_hand(nn.Sequential(nn.Linear(3, 3), steps), [1], micro_batches=4, recompute=mode) as pipe:
        pipe(torch.randn(8, 3)).sum().backward()
    assert len(steps.calls) == (7 if mode == "except-last" else 8)


@pytest.mark.parametrize("mode", MODES)
def test_both_forwards_have_the_callers_autocast(mode):
    class Ask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((x.dtype, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            return x

    def run(recompute: Recompute) -> dict[str, Any]:
        ours = plain.twin(model)
        with cut_by_hand(ours, [2], loss_fn=nn.MSELoss(), recompute=recompute) as pipe:
            with torch.autocast("cpu", torch.bfloat16):
                pipe.step(x, target=y)
                output = pipe(x)
            output.float().sum().backward()
        return plain.gradients(ours)

    seen: list[Any] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Ask(), nn.Linear(4, 2))
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    plain.assert_same(run(mode), run("never"))
    assert set(seen) == {(torch.bfloat16, True, torch.bfloat16)}


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_computes_its_own_loss(mode):
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().mean()

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), Loss())
    reference = plain.twin(model)
    x = torch.randn(8, 3)
    with cut_by_hand(model, [2], micro_batches=4, recompute=mode, reduction="mean") as pipe:
        loss = pipe.step(x)
    expected = plain.micro_batched_step(reference, x, torch.zeros(8, 1), lambda output, _: output, 4)
    plain.assert_near(loss, expected, 1e-6)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_a_loss_with_parameters_of_its_own_that_writes_into_the_output():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (output.sub_(target) * self.scale).square().mean()

    found = []
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    x, y = torch.randn(8, 3), torch.randn(8, 3)
    for mode in ("never", *MODES):
        ours, loss_fn = plain.twin(model), Scaled()
        with cut_by_hand(ours, [1], loss_fn=loss_fn, recompute=mode, reduction="mean") as pipe:
            pipe.step(x, target=y)
        found.append(plain.gradients(ours) | {"scale": loss_fn.scale.grad})
    plain.assert_same(found[1], found[0])
    plain.assert_same(found[2], found[0])


def test_evaluation_with_gradients():
    """Attention takes another way through its kernel where nothing is to be differentiated."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(layer, nn.BatchNorm1d(5), nn.Flatten(), nn.Linear(40, 3)).eval()
    check_all_modes(
        model, borders=(1, 2), data=lambda: (torch.randn(11, 5, 8), torch.randint(3, (11,))), steps=1
    )


class Double(nn.Module):
    """Writes over its input, and has no flag that says so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


@pytest.mark.parametrize("layer", [nn.Identity, lambda: nn.Flatten(0, -1), nn.Dropout])
def test_an_input_that_a_stage_passes_on_and_the_next_one_writes_into(layer):
    """The memory of both inputs is the same; each second forward must find it as the first did."""
    shape = nn.Unflatten(0, (-1, 6))
    passing = [nn.Sequential(layer(), shape)] if layer not in (nn.Identity, nn.Dropout) else [layer()]
    model = nn.Sequential(nn.Linear(6, 6), *passing, Double(), nn.Linear(6, 6), Double(), nn.Linear(6, 3))
    last = len(passing[0]) if isinstance(passing[0], nn.Sequential) else 1
    check_all_modes(model, borders=(1, 1 + last, 3 + last))
    check_all_modes(model.eval(), borders=(1, 1 + last, 3 + last))


def test_the_callers_input_is_left_alone():
    model = nn.Sequential(Double(), nn.Linear(6, 3))
    x = torch.ones(8, 6)
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), recompute="always") as pipe:
        for _ in range(2):
            pipe.step(x, target=torch.zeros(8, 3))
    assert x.eq(1).all()


@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
def test_a_layer_with_a_generator_of_its_own(recompute: Recompute):
    """Its draws are those of one forward a micro-batch, several in a forward, and the generator is as far on."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(7)

        def forward(self, x: Tensor) -> Tensor:
            scale = torch.rand(x.shape, generator=self.generator)
            mask = torch.empty_like(x).bernoulli_(0.5, generator=self.generator)
            return x * scale * mask

    noisy, theirs = Noisy(), Noisy()
    model = nn.Sequential(nn.Linear(6, 6), noisy, nn.Linear(6, 3))
    reference = nn.Sequential(plain.twin(model[0]), theirs, plain.twin(model[2]))
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    with cut_by_hand(
        model, [1], loss_fn=nn.MSELoss(), micro_batches=4, schedule="gpipe", recompute=recompute
    ) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
    assert noisy.generator.get_state().equal(theirs.generator.get_state())


def test_a_hook_that_a_layer_puts_on_its_input_runs_once():
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 1.5)
            return x * 2

    model = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 3))
    check_all_modes(model, borders=(1, 2), data=lambda: (torch.randn(8, 4), torch.randint(3, (8,))))
