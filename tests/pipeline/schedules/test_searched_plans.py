"""Plans with free placement and an order of their own train as the plain model does, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipepart import Arguments, Pipeline, Plan
from tests.capture import handwritten
from tests.pipeline.conformance.kinds import KINDS
from tests.support import plain
from tests.support.pieces import WIDTH
from tests.support.recorded import chain_for, differing, plainly
from tests.support.searched import (
    drawn_plan,
    names_of,
    network,
    random_order,
    random_placement,
    searched_plan,
)
from tests.support.seeds import seeds
from tests.support.skipping import Hourglass, Woven
from tests.support.tied import language_model, loss_fn, words


def parts_of(plan: Plan, samples: int) -> int:
    """Micro-batches of a mini-batch, of two samples at least, as a BatchNorm needs."""
    return min(plan.micro_batches, samples // 2)


# Placements that looped and V-shaped schedules do not have.
PLACEMENTS: dict[str, Sequence[int]] = {
    "one stage between two of another device": (0, 1, 0),
    "one and four": (0, 0, 1, 0, 0),
    "neighbours on one device": (0, 0, 1, 1, 2),
    "wave": (0, 1, 2, 2, 1, 0, 0, 1, 2),
    "looped with a stage left over": (0, 1, 0, 1, 0),
    "all on one": (0, 0, 0, 0),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_has_exact_numbers(placement):
    homes = PLACEMENTS[placement]
    for seed in range(2):
        choose = random.Random(seed)
        order = random_order(choose, homes, 4)
        borders = sorted(choose.sample(range(1, 10), len(homes) - 1))
        check(searched_plan(names_of(network()), borders, order, spare=seed), seed, strict=seed == 1)


@pytest.mark.parametrize("seed", range(12))
def test_drawn_plans_have_exact_numbers(seed):
    check(drawn_plan(random.Random(seed), names_of(network())), seed, strict=seed % 3 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_hundreds_of_drawn_plans_have_exact_numbers(block):
    for seed in seeds(60, f"searched plans {block}"):
        check(drawn_plan(random.Random(seed), names_of(network())), seed, strict=seed % 3 == 0)


def check(plan: Plan, seed: int, strict: bool) -> None:
    """A full mini-batch, an uneven one, one of fewer micro-batches than planned; between these two an evaluation."""
    torch.manual_seed(seed)
    model = network()
    reference = plain.twin(model)
    samples = 2 * plan.micro_batches
    with Pipeline(model, plan, nn.MSELoss(), strict=strict) as pipe:
        for step, count in enumerate((samples, samples + 1, max(samples - 2, 2))):
            x, y = torch.randn(count, WIDTH), torch.randn(count, WIDTH)
            ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            torch.manual_seed(step)
            loss = pipe.step(ours, target=y)
            torch.manual_seed(step)
            parts = parts_of(plan, count)
            expected = plain.micro_batched_step(reference, theirs, y, nn.MSELoss(), parts, drawing=True)
            plain.assert_near(loss, expected, 1e-6, "loss")
            plain.assert_same(plain.gradients(model), plain.gradients(reference))
            plain.assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))
            plain.assert_same({"input": ours.grad}, {"input": theirs.grad})
            if step == 1:
                value, output = pipe.evaluate(x, target=y, return_outputs=True)
                with torch.no_grad():
                    wanted = reference.eval()(x)
                reference.train()
                torch.testing.assert_close(output, wanted)
                torch.testing.assert_close(value, F.mse_loss(wanted, y))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer(kind):
    """In drawn plans; in float64, as micro-batches may be added up in any order."""
    made = KINDS[kind]
    torch.manual_seed(0)
    model = made.chain().double()
    reference = plain.twin(model)
    # Statistics depend on the order of the micro-batches.
    plan = drawn_plan(random.Random(kind), names_of(model), in_turn=made.writes)
    samples = 2 * plan.micro_batches
    x, y = torch.randn(samples, WIDTH).double(), torch.randn(samples, WIDTH).double()
    torch.manual_seed(1)
    with Pipeline(model, plan, nn.MSELoss()) as pipe:
        pipe.step(x, target=y)
    torch.manual_seed(1)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), plan.micro_batches, drawing=made.draws)
    found, wanted = (
        {name: one.to_dense() if one is not None and one.is_sparse else one for name, one in own.items()}
        for own in (plain.gradients(model), plain.gradients(reference))
    )
    plain.assert_close(found, wanted)
    plain.assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))


@pytest.mark.parametrize("seed", range(6))
def test_a_weight_that_three_stages_share(seed):
    torch.manual_seed(seed)
    model = language_model()
    reference = plain.twin(model)
    choose = random.Random(seed)
    stages = choose.randint(4, 6)
    order = random_order(choose, random_placement(choose, stages, choose.randint(1, 3)), 3)
    borders = sorted(choose.sample(range(1, 6), stages - 1))
    plan = searched_plan(names_of(model), borders, order, spare=seed % 2)
    x, y = words()
    with Pipeline(model, plan, loss_fn, strict=seed % 2 == 0) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, loss_fn, 3)
        norm = pipe.clip_grad_norm_(0.1)
    assert norm.equal(nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def _noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


MASK = torch.randint(3, (8, WIDTH), generator=torch.Generator().manual_seed(3))
SKIPPING: dict[str, tuple[Any, Any, Tensor]] = {
    "hourglass": (Hourglass, _noise(8, 3, WIDTH), _noise(8, 3, WIDTH, seed=2)),
    "woven": (Woven, Arguments(_noise(8, WIDTH), MASK), _noise(8, WIDTH, seed=4)),
    "u-net": (handwritten.UNet, _noise(8, 3, 8, 8), _noise(8, 2, 8, 8, seed=3)),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", SKIPPING)
def test_values_that_skip_stages(name, seed):
    """Also to a stage of the device that made them, and past stages of that device."""
    make, sample, target = SKIPPING[name]
    torch.manual_seed(seed)
    model, choose = make(), random.Random(f"{name} {seed}")
    reference = plain.twin(model)
    chain = chain_for(model, sample, loss_fn=F.mse_loss, parts=1)
    plan = drawn_plan(choose, [layer for layer, _ in chain.layers])
    with Pipeline(chain, plan, F.mse_loss, strict=seed % 2 == 0) as pipe:  # type: ignore[arg-type]
        pipe.step(Arguments.of(sample), target=target)
    plainly(reference, sample, target=target, loss_fn=F.mse_loss, parts=plan.micro_batches)
    assert differing(model, reference) == []


@pytest.mark.parametrize("seed", range(4))
def test_called_like_the_model(seed):
    torch.manual_seed(seed)
    model, x = Hourglass(), _noise(6, 3, WIDTH)
    reference = plain.twin(model)
    chain = chain_for(model, x, loss_fn=F.mse_loss, parts=1)
    plan = drawn_plan(random.Random(seed), [layer for layer, _ in chain.layers])
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with Pipeline(chain, plan, F.mse_loss) as pipe:  # type: ignore[arg-type]
        output = pipe(ours)
        output.sin().sum().backward()
    outputs = [reference(part) for part in theirs.tensor_split(plan.micro_batches)]
    assert torch.equal(output, torch.cat(outputs))
    for part in outputs:
        part.sin().sum().backward()
    assert differing(model, reference) == []
    plain.assert_same({"input": ours.grad}, {"input": theirs.grad})


@pytest.mark.parametrize("seed", range(4))
def test_an_optimizer_of_each_stage_over_batches_that_are_loaded_ahead(seed):
    torch.manual_seed(seed)
    model = plain.in_double(nn.Linear(WIDTH, WIDTH) for _ in range(6))
    reference = plain.twin(model)

    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    plan = drawn_plan(random.Random(seed), names_of(model))
    samples = plan.micro_batches
    batches = [(torch.randn(samples, WIDTH).double(), torch.randn(samples, WIDTH).double()) for _ in range(3)]
    theirs = momentum(reference.parameters())
    with Pipeline(model, plan, nn.MSELoss(), optimizer=momentum) as pipe:
        for (x, y), wanted in zip(pipe.prefetch(batches), batches, strict=True):
            pipe.step(x, target=y)
            theirs.zero_grad()
            plain.micro_batched_step(reference, *wanted, nn.MSELoss(), plan.micro_batches)
            theirs.step()
    plain.assert_same(model.state_dict(), reference.state_dict())
