"""Optimizers, clipping and accumulation around steps: afterwards the parameters of plain training."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support import plain
from tests.support.chains import cut_by_hand

Make = Callable[[nn.Module], list[torch.optim.Optimizer]]
LOSS = nn.CrossEntropyLoss()


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Train the matrices with Muon and the rest with AdamW."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


# Each with whether gradients are set to None or zeroed, and after how many mini-batches.
OPTIMIZERS: dict[str, tuple[Make, bool, int]] = {
    "Adam": (lambda model: [torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)], True, 1),
    "SGD": (lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)], False, 2),
    "Muon": (muon, True, 2),
}


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8 + step % 3, 6), torch.randint(3, (8 + step % 3,))) for step in range(count)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_those_of_plain_training(name: str, schedule: str) -> None:
    make, set_to_none, every = OPTIMIZERS[name]
    model = network()
    reference = plain.twin(model)
    with cut_by_hand(model, [2, 4], loss_fn=LOSS, micro_batches=4, schedule=schedule) as pipe:
        ours, theirs = make(model), make(reference)
        for step, (x, y) in enumerate(batches(3 * every), 1):
            loss = pipe.step(x, target=y)
            plain.assert_near(loss, plain.micro_batched_step(reference, x, y, LOSS, 4), 1e-6)
            if step % every:
                continue
            norm = pipe.clip_grad_norm_(0.5)
            assert norm.equal(nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
            for optimizer in (*ours, *theirs):
                optimizer.step()
            pipe.zero_grad(set_to_none)
            assert all((p.grad is None) if set_to_none else not p.grad.any() for p in model.parameters())  # type: ignore[union-attr]
            for optimizer in theirs:
                optimizer.zero_grad(set_to_none)
    plain.assert_same(model.state_dict(), reference.state_dict())


def test_lbfgs_calls_a_step_as_its_closure() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    reference = plain.twin(model)
    ((x, y),) = batches(1)
    x = x.double()
    with cut_by_hand(model, [1], loss_fn=LOSS) as pipe:

        def own() -> Tensor:
            return pipe.step(x, target=y)

        def plainly() -> Tensor:
            return plain.micro_batched_step(reference, x, y, LOSS, 3)

        for module, step in ((model, own), (reference, plainly)):
            optimizer = torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=5)

            def closure(module: nn.Module = module, step: Callable[[], Tensor] = step) -> float:
                module.zero_grad()
                return float(step())

            for _ in range(2):
                optimizer.step(closure)
    plain.assert_close(model.state_dict(), reference.state_dict(), 1e-9)


X, Y = torch.linspace(-2, 2, 42).reshape(7, 6), torch.arange(7) % 3


@pytest.mark.parametrize(("norm_type", "foreach"), [(1.0, None), (3.5, True), (float("inf"), False)])
def test_the_norm_is_that_of_the_plain_model(norm_type: float, foreach: bool | None) -> None:
    model = network()
    reference = plain.twin(model)
    with cut_by_hand(model, [1, 3], loss_fn=LOSS) as pipe:
        pipe.step(X, target=Y)
        norm = pipe.clip_grad_norm_(0.1, norm_type, foreach=foreach)
    plain.micro_batched_step(reference, X, Y, LOSS, 3)
    assert norm.equal(nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type, foreach=foreach))
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_other_ways_to_clip() -> None:
    """By value; without gradients; and a norm that is not finite, which is an error where that is asked for."""
    model = network()
    reference = plain.twin(model)
    with cut_by_hand(model, [1, 3], loss_fn=LOSS) as pipe:
        assert pipe.clip_grad_norm_(1.0) == 0
        pipe.step(X, target=Y)
        pipe.clip_grad_value_(0.01)
        plain.micro_batched_step(reference, X, Y, LOSS, 3)
        nn.utils.clip_grad_value_(reference.parameters(), 0.01)
        plain.assert_same(plain.gradients(model), plain.gradients(reference))
        pipe.step(X * float("inf"), target=Y)
        assert not pipe.clip_grad_norm_(1.0).isfinite()
        with pytest.raises(RuntimeError, match=r"non-finite"):
            pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
