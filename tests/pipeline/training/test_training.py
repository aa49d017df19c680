"""Training for a while ends where plain micro-batched training ends."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import pipepart
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.seeds import seeds

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
}


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


@pytest.mark.parametrize(
    ("optimizer", "schedule"), [("sgd", "1f1b"), ("adam", "gpipe"), ("adamw", "sequential")]
)
def test_parameters_after_twenty_steps_equal_those_of_plain_training(optimizer, schedule):
    """Batches of every size, gradients clipped: all parameters and buffers bit for bit."""
    model = network()
    reference = plain.twin(model)
    loss_fn = nn.CrossEntropyLoss()
    theirs = OPTIMIZERS[optimizer](reference.parameters())
    with cut_by_hand(model, [2, 4], loss_fn=loss_fn, micro_batches=4, schedule=schedule) as pipe:
        ours = OPTIMIZERS[optimizer](pipe.parameters())
        for step in range(20):
            x, y = torch.randn(8 + step % 5, 6), torch.randint(3, (8 + step % 5,))
            pipe.zero_grad()
            loss = pipe.step(x, target=y)
            norm = pipe.clip_grad_norm_(0.5)
            ours.step()

            theirs.zero_grad()
            expected = plain.micro_batched_step(reference, x, y, loss_fn, 4)
            expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            theirs.step()
            plain.assert_near(loss, expected, 1e-6)
            assert norm.equal(expected_norm)
    plain.assert_same(model.state_dict(), reference.state_dict())


def test_gradients_gather_over_steps_until_they_are_cleared():
    model = network()
    reference = plain.twin(model)
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    with cut_by_hand(model, [3], loss_fn=nn.CrossEntropyLoss(), micro_batches=2) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, nn.CrossEntropyLoss(), 2)
        plain.assert_same(plain.gradients(model), plain.gradients(reference))
        pipe.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        pipe.step(x, target=y)
        pipe.zero_grad(set_to_none=False)
        assert all(
            parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters()
        )


def test_the_gradient_norm_is_that_of_all_stages():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        pipe.step(torch.randn(6, 2), target=torch.randn(6, 2))
        gradients = torch.cat(
            [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        )
        assert float(pipe.clip_grad_norm_(1e-3)) == pytest.approx(float(gradients.norm()), rel=1e-6)
        clipped = torch.cat(
            [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        )
    assert float(clipped.norm()) == pytest.approx(1e-3, rel=1e-3)


def test_optimizers_that_step_inside_the_backward_follow_each_micro_batch():
    """Hooks on the accumulation of gradients fire as in plain micro-batched training."""
    calls: dict[str, int] = {}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: calls.__setitem__(name, calls.get(name, 0) + 1)
        )
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), micro_batches=3) as pipe:
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
    assert calls == dict.fromkeys(["0.weight", "0.bias", "1.weight", "1.bias"], 3)


def test_hooks_of_layers_see_each_micro_batch_in_order():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    reference = plain.twin(model)

    def record(target: nn.Module, into: list[torch.Tensor]) -> None:
        layer = target.get_submodule("1")
        layer.register_forward_pre_hook(lambda _, inputs: into.append(inputs[0].detach().clone()))
        layer.register_forward_hook(lambda _, inputs, output: into.append(output.detach().clone()))
        layer.register_full_backward_hook(lambda _, incoming, outgoing: into.append(incoming[0].clone()))

    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    record(model, ours)
    record(reference, theirs)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    with cut_by_hand(model, [1, 2], loss_fn=nn.MSELoss(), schedule="sequential") as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 3)
    assert len(ours) == len(theirs) == 9
    assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


def test_several_pipelines_in_turn_keep_apart():
    models = [network() for _ in range(3)]
    references = [plain.twin(model) for model in models]
    pipes = [
        cut_by_hand(model, borders, loss_fn=nn.CrossEntropyLoss())
        for model, borders in zip(models, ([1], [2, 4], [5]), strict=True)
    ]
    for _ in range(3):
        for pipe, reference in zip(pipes, references, strict=True):
            x, y = torch.randn(7, 6), torch.randint(3, (7,))
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, nn.CrossEntropyLoss(), 3)
    for pipe, model, reference in zip(pipes, models, references, strict=True):
        pipe.close()
        plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_one_model_can_be_cut_anew():
    model = network()
    x, y = torch.randn(7, 6), torch.randint(3, (7,))
    reference = plain.twin(model)
    for borders in ([1], [3, 4], []):
        with cut_by_hand(model, borders, loss_fn=nn.CrossEntropyLoss()) as pipe:
            pipe.step(x, target=y)
        plain.micro_batched_step(reference, x, y, nn.CrossEntropyLoss(), 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
    plain.assert_same(model.state_dict(), reference.state_dict())


def test_one_line_profiles_plans_and_trains():
    model = network()
    reference = plain.twin(model)
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    with pipepart.Pipeline.auto(
        model, x, target=y, loss_fn=nn.CrossEntropyLoss(), devices=2, micro_batches=4
    ) as pipe:
        assert pipe.plan.micro_batches == 4
        assert sum(len(stage.layers) for stage in pipe.plan.stages) == 6
        plain.assert_same(model.state_dict(), reference.state_dict())
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.CrossEntropyLoss(), 4)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(6, "long training"))
def test_long_training_of_a_deep_chain_stays_equal(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()))
    )
    reference = plain.twin(model)
    theirs = torch.optim.Adam(reference.parameters(), lr=1e-3)
    with cut_by_hand(model, [3, 8, 11, 15], loss_fn=nn.MSELoss(), micro_batches=6) as pipe:
        ours = torch.optim.Adam(pipe.parameters(), lr=1e-3)
        for _ in range(300):
            x, y = torch.randn(13, 16), torch.randn(13, 16)
            ours.zero_grad()
            theirs.zero_grad()
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, nn.MSELoss(), 6)
            ours.step()
            theirs.step()
    plain.assert_same(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
def test_auto_hands_the_choice_of_recompute_to_the_planner(recompute):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    reference = plain.twin(model)
    x, y = torch.randn(12, 4), torch.randn(12, 2)
    with pipepart.Pipeline.auto(
        model, x, target=y, loss_fn=nn.MSELoss(), devices=2, micro_batches=3, recompute=recompute
    ) as pipe:
        assert {stage.recompute for stage in pipe.plan.stages} == {recompute}
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_auto_recomputes_where_memory_does_not_do_else():
    """Wide activations, few parameters; each device has room for the inputs of all micro-batches and one stash."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 256), nn.Linear(256, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x).tanh().exp())

    model = nn.Sequential(*[Wide() for _ in range(4)])
    reference = plain.twin(model)
    x, y = torch.randn(512, 4), torch.randn(512, 4)
    options: dict[str, Any] = {"target": y, "loss_fn": nn.MSELoss(), "micro_batches": 8, "schedule": "gpipe"}
    with pipepart.Pipeline.auto(model, x, recompute="never", **options) as pipe:
        unlimited = max(pipe.plan.predicted.memory_bytes)
    cluster = pipepart.Cluster.virtual(2, memory=unlimited * 3 // 4)
    with pipepart.Pipeline.auto(model, x, devices=cluster, **options) as pipe:
        assert {stage.recompute for stage in pipe.plan.stages} & {"except-last", "always"}
        model.zero_grad()
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 8)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
