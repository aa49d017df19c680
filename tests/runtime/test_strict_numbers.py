"""A strict pipeline of a model without faults: nothing is refused, and the numbers are the same to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pipepart import Pipeline, Plan
from tests.support import plain
from tests.support.chains import cut_by_hand, plan_by_hand
from tests.support.mixed import mixed

SCHEDULES = [  # each schedule once, each way of recompute with schedules of one and of two chunks
    ("gpipe", 1, "never"),
    ("1f1b", 1, "except-last"),
    ("interleaved-1f1b", 2, "always"),
    ("zb-h1", 1, "always"),
    ("zb-v", 2, "never"),
    ("hanayo", 2, "except-last"),
    ("dualpipe-v", 2, "always"),
]


NAMES = ["0", "1.0", "1.1", "2", "3", "4", "5", "6.0", "6.1", "7"]


def trained(model: nn.Module, make: Callable[[nn.Module], Pipeline], x: Any, y: Any) -> dict[str, Any]:
    """All that two steps leave."""
    own = plain.twin(model)
    torch.manual_seed(3)
    with make(own) as pipe:
        losses = [pipe.step(x, target=y) for _ in range(2)]
    return {
        **own.state_dict(),
        **plain.gradients(own),
        **{f"loss {k}": loss for k, loss in enumerate(losses)},
    }


def check_same(
    model: nn.Module, plan: Plan, loss_fn: Any = None, x: Any = None, y: Any = None, **options: Any
) -> None:
    x = torch.randn(12, 4) if x is None else x
    y = torch.randn(12, 4) if y is None else y
    loss_fn = loss_fn or nn.MSELoss()
    free, strict = (
        trained(model, lambda own, s=s: Pipeline(own, plan, loss_fn, strict=s, **options), x, y)
        for s in (False, True)
    )
    plain.assert_same(strict, free)


@pytest.mark.parametrize(("schedule", "chunks", "recompute"), SCHEDULES)
def test_all_kinds_of_layers_and_borders(schedule, chunks, recompute):
    model = mixed()
    names = [str(index) for index in range(10)]
    model = nn.Sequential(
        *[layer for one in model for layer in (one if type(one) is nn.Sequential else [one])]
    )
    plan = plan_by_hand(
        names, [2, 5, 8], micro_batches=4, schedule=schedule, chunks=chunks, recompute=recompute
    )
    check_same(model, plan)


def test_deferred_batch_norm():
    plan = plan_by_hand(NAMES, [2, 4, 7], micro_batches=4, recompute="always")
    check_same(mixed(), plan, deferred_batch_norm=True)


def tied() -> nn.Sequential:
    embedding, head = nn.Embedding(16, 4), nn.Linear(4, 16, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(4, 4), nn.Tanh(), head)


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.mark.parametrize(("schedule", "chunks", "recompute"), SCHEDULES[1:5])
def test_tied_parameters(schedule, chunks, recompute):
    plan = plan_by_hand(
        ["0", "1", "2", "3"],
        [1, 2, 3],
        micro_batches=4,
        schedule=schedule,
        chunks=chunks,
        recompute=recompute,
    )
    tokens = torch.randint(16, (8, 5))
    check_same(tied(), plan, token_loss, tokens, tokens)  # one tensor is input and target


def test_a_tied_parameter_follows_an_optimizer_of_the_caller():
    x = torch.randint(16, (8, 5))
    model = tied()
    reference = plain.twin(model)
    ours, theirs = torch.optim.Adam(model.parameters()), torch.optim.Adam(reference.parameters())
    with cut_by_hand(model, [2], loss_fn=token_loss, strict=True, micro_batches=4) as pipe:
        for _ in range(3):
            for optimizer in (ours, theirs):
                optimizer.zero_grad()
            pipe.step(x, target=x)
            plain.micro_batched_step(reference, x, x, token_loss, 4)
            for optimizer in (ours, theirs):
                optimizer.step()
    plain.assert_same(model.state_dict(), reference.state_dict())


def test_a_shared_buffer():
    table = torch.randn(4)

    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", table)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.get_buffer("table")

    model = nn.Sequential(nn.Linear(4, 4), Rotated(), nn.Linear(4, 4), Rotated())
    plan = plan_by_hand(["0", "1", "2", "3"], [2], micro_batches=4)
    check_same(model, plan)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_copies_of_the_model_on_devices_of_their_own(schedule):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 4), nn.Tanh())
    check_same(model, plan_by_hand(["0", "1", "2", "3"], [2], replicas=2, micro_batches=4, schedule=schedule))


def test_a_loss_with_buffers_behind_replicas():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    x, y = torch.randn(12, 4), torch.randint(4, (12,))
    reference = plain.twin(model)
    with Pipeline(
        model, plan_by_hand(["0", "1", "2"], [2], replicas=2, micro_batches=4), loss_fn, strict=True
    ) as pipe:
        loss = pipe.step(x, target=y)
    expected = loss_fn(reference(x), y)
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
    for name, gradient in plain.gradients(reference).items():
        torch.testing.assert_close(plain.gradients(model)[name], gradient)


def test_a_loss_that_writes_its_buffers_behind_replicas():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.get_buffer("calls").add_(1)
            return nn.functional.mse_loss(output, target)

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plan = plan_by_hand(["0", "1", "2"], [2], replicas=2, micro_batches=4)
    with (
        Pipeline(model, plan, Counts(), strict=True) as pipe,
        pytest.raises(ValueError, match="the loss writes its buffer 'calls'"),
    ):
        pipe.step(torch.randn(12, 4), target=torch.randn(12, 4))


def test_copies_in_opposite_directions():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 4), nn.Tanh())
    check_same(model, plan_by_hand(["0", "1", "2", "3"], [2], micro_batches=4, schedule="chimera"))


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw", "1f1b", "zb-h1"])
def test_optimizers_of_stages(schedule):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plan = plan_by_hand([str(index) for index in range(5)], [2, 4], micro_batches=6, schedule=schedule)
    check_same(model, plan, optimizer=torch.optim.Adam)


def test_a_loaded_state_of_the_optimizers_of_stages():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    results = []
    for strict in (False, True):
        own = plain.twin(model)
        with cut_by_hand(own, [1], loss_fn=nn.MSELoss(), strict=strict, optimizer=torch.optim.Adam) as pipe:
            pipe.step(x, target=y)
            pipe.load_optimizer_state_dict(pipe.optimizer_state_dict())
            pipe.step(x, target=y)
        results.append(own.state_dict())
    plain.assert_same(*results)


LOSSES = {
    "weighted": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]), ignore_index=1),
    "of terms": lambda out, y: nn.functional.cross_entropy(out, y) + 0.1 * out.square().sum(1).mean(),
    "sum and count": lambda out, y: ((out[y != 1] ** 2).sum(), (y != 1).sum() * 4),
    "mean in a function": lambda out, y: (out.logsumexp(1) - out[:, 0] * (y == 0)).mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_losses_that_are_looked_into(loss, schedule):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plan = plan_by_hand(["0", "1", "2"], [1], micro_batches=4, schedule=schedule)
    check_same(model, plan, LOSSES[loss], y=torch.randint(4, (12,)))


@pytest.mark.parametrize("micro_batches", [4, 1])
def test_out_of_the_pipeline_as_of_a_model(micro_batches):
    """The caller's loss, backward and all that is behind are the caller's."""
    results = []
    x = torch.randn(12, 4)
    model = mixed()
    for strict in (False, True):
        own, given = plain.twin(model), x.clone().requires_grad_()
        torch.manual_seed(3)
        plan = plan_by_hand(NAMES, [2, 5, 8], micro_batches=micro_batches)
        with Pipeline(own, plan, strict=strict) as pipe:
            for _ in range(2):
                out = pipe(given * 2)
                (out * x).sum().backward()
        results.append({**own.state_dict(), **plain.gradients(own), "x": given.grad})
    plain.assert_same(*results)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode):
    model = mixed()
    x = torch.randn(8, 4)
    with cut_by_hand(model, [2, 5, 8], strict=True) as pipe, mode():
        pipe.eval()
        assert pipe(x).equal(torch.cat([model(part) for part in x.tensor_split(3)]))
        assert pipe(pipe(x)).shape == (8, 4)


def test_gradients_that_the_caller_has_changed():
    """They are the host's when the next step adds to them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    results = []
    for strict in (False, True):
        own = plain.twin(model)
        with cut_by_hand(own, [1], loss_fn=nn.MSELoss(), strict=strict) as pipe:
            pipe.step(x, target=y)
            for parameter in own.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad * 0.5
            pipe.step(x, target=y)
            pipe.clip_grad_norm_(0.1)
        results.append(plain.gradients(own))
    plain.assert_same(*results)


def test_parameters_that_the_caller_has_replaced():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    other = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    reference = plain.twin(other)
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), strict=True) as pipe:
        pipe.step(x, target=y)
        pipe.zero_grad()
        model.load_state_dict(other.state_dict(), assign=True)
        pipe.step(x, target=y)
        pipe.zero_grad()
        weight = model[2].get_parameter("weight")
        weight.data = weight.data.clone()
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_a_model_that_was_cut_elsewhere_before():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    for border in (1, 3, 2):
        with cut_by_hand(model, [border], loss_fn=nn.MSELoss(), strict=True) as pipe:
            pipe.step(x, target=y)
            assert pipe.memory()["virtual:0"].by_category["parameters"] == border * 80


def test_a_second_pipeline_of_a_model_with_a_shared_parameter():
    """The layers that share it, with their other parameters, were on other devices before."""
    tokens = torch.randint(16, (6, 5))
    model = nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 16))
    model[3].weight = model[0].weight
    reference = plain.twin(model)
    for borders in ([1], [2, 3], [1]):
        with cut_by_hand(model, borders, loss_fn=token_loss, strict=True) as pipe:
            pipe.zero_grad()
            pipe.step(tokens, target=tokens)
    plain.micro_batched_step(reference, tokens, tokens, token_loss, 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_prefetched_mini_batches_and_a_scaler():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    loader = DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12, 4)), batch_size=6)
    results = []
    for strict in (False, True):
        own, scaler = plain.twin(model), torch.amp.GradScaler("cpu")
        with cut_by_hand(own, [1], loss_fn=nn.MSELoss(), strict=strict) as pipe:
            for x, y in pipe.prefetch(loader):
                pipe.step(x, target=y, scaler=scaler)
        results.append(plain.gradients(own))
    plain.assert_same(*results)


def test_autocast():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plan = plan_by_hand(["0", "1", "2"], [1], micro_batches=3)
    with torch.autocast("cpu", torch.bfloat16):
        check_same(model, plan)


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4))
    x, y = torch.randint(9, (6,)), torch.randn(6, 4)
    reference = plain.twin(model)
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), strict=True) as pipe:
        pipe.step(x, target=y)
        pipe.step(x, target=y)
    for _ in range(2):
        plain.micro_batched_step(reference, x, y, nn.MSELoss(), 3)
    ours, theirs = plain.gradients(model)["0.weight"], plain.gradients(reference)["0.weight"]
    assert ours is not None
    assert theirs is not None
    assert ours.to_dense().equal(theirs.to_dense())


def test_layers_of_torchscript():
    model = nn.Sequential(
        nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 4)
    )
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), strict=True) as pipe:
        strict = pipe.step(x, target=y)
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        assert strict.equal(pipe.step(x, target=y))
