"""What callers do beside plain steps: losses of their own, and values only where they are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pipepart
from pipepart.ranks import under_torchrun
from tests.distributed.cases.registry import on
from tests.distributed.training import TIMEOUT, adam, drawn_batches, gradients, rank, small, trained
from tests.support.chains import cut_by_hand
from tests.support.pieces import WIDTH, Balanced, linear
from tests.support.ranks import Own
from tests.support.recorded import piped
from tests.support.two_parts import Calls

X, Y = drawn_batches([6])[0]


class OwnLoss(nn.Module):
    """Scores words, by the weights of their embedding, and computes the loss of its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(linear(), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        return {"loss": functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}


@on(3)
def of_a_model_with_a_loss_of_its_own() -> dict[str, Any]:
    """Every rank computes the loss of the model from its labels."""
    ids = torch.randint(9, (6, 7), generator=torch.Generator().manual_seed(4))
    sample = {"ids": ids, "labels": ids}
    with piped(OwnLoss().double(), sample, stages=3, parts=3, timeout=TIMEOUT) as pipe:
        out = pipe(**sample)
        (out["loss"] + out["scores"].pow(2).mean()).backward()
        return {**out, "gradients": gradients(pipe)}


@on(2)
def of_some_outputs() -> dict[str, Any]:
    """Only some of the outputs have gradients, another one each time; then only the input gets one."""

    def two(x: Tensor) -> dict[str, Any]:
        left, right = x.chunk(2, dim=1)
        return {"left": left, "right": [right.exp()], "mask": x > 0, "scale": 2.0}

    found: dict[str, Any] = {}
    with cut_by_hand(nn.Sequential(linear(), linear(), Calls(two)).double(), [1], timeout=TIMEOUT) as pipe:
        for number in range(3):
            out = pipe(X)
            parts = [out["left"].sum(), out["right"][0].pow(2).sum() * out["scale"]]
            (parts[number] if number < 2 else parts[0] + parts[1]).backward()
            found[f"gradients {number}"] = gradients(pipe)
        x = X.clone().requires_grad_()
        found["of the input"] = torch.autograd.grad(pipe(x)["left"].mean(), x)
        found["still"] = gradients(pipe)
    return found


@on(3)
def two_outputs_that_wait_for_their_backward() -> dict[str, Any]:
    """Beside a step and a call without gradients."""
    with small() as pipe:
        one, other = pipe(X), pipe(X * 2)
        loss = pipe.step(X, target=Y)
        with torch.no_grad():
            plain = pipe(X)
        other.pow(2).sum().backward()
        (one * plain).sum().backward()
        return {"loss": loss, "gradients": gradients(pipe), "generator": torch.get_rng_state()}


@on(3, "never", slow=True)
@on(3, "always")
def collected_losses(recompute: Any) -> dict[str, Any]:
    """Losses that layers of several ranks add."""
    model = nn.Sequential(linear(), Balanced(), linear(), Balanced()).double()
    with cut_by_hand(model, [1, 3], recompute=recompute, timeout=TIMEOUT) as pipe:
        losses = []
        for x, y in drawn_batches([6, 5]):
            with pipepart.collect_losses() as added:
                loss = functional.mse_loss(pipe(x), y)
            total = loss + added.total()
            total.backward()
            losses += [loss, total]
        return {"losses": losses, "gradients": gradients(pipe)}


@on(3)
def values_only_where_they_are_read() -> dict[str, Any]:
    """Mini-batches of changing shapes; a rank in the middle is given tensors of these shapes."""
    found: dict[str, Any] = {"losses": []}
    with small() as pipe:
        optimizer = adam(pipe.parameters())
        for x, y in drawn_batches([6, 6, 3, 6]):
            optimizer.zero_grad()
            given = [
                each.new_zeros(each.shape) if rank() == 1 and under_torchrun() else each for each in (x, y)
            ]
            found["losses"].append(pipe.step(given[0], target=given[1]))
            optimizer.step()
        return {**found, "state": pipe.full_state_dict()}


@on(3)
def behind_another_layer() -> dict[str, Any]:
    """Every rank has the layer that makes the input, and two pipelines take turns."""
    before = linear().double()
    found: dict[str, Any] = {"losses": []}
    with small() as one, small(schedule="gpipe") as other:
        for number, (x, y) in enumerate(drawn_batches([6, 3, 6, 5])):
            found["losses"].append((one, other)[number % 2].step(before(x), target=y))
        found["gradients"], found["other"] = gradients(one), gradients(other)
    return {**found, "before": [p.grad for p in before.parameters()]}


@on(3)
def loaded() -> dict[str, Any]:
    """The state of one training goes into a second pipeline, with other values and a tied weight."""
    first, second = (nn.Sequential(*[linear() for _ in range(5)]).double() for _ in range(2))
    for model in (first, second):
        model[4].weight = model[0].weight
    how: dict[str, Any] = {"loss_fn": nn.MSELoss(), "timeout": TIMEOUT}
    found = trained(cut_by_hand(first, [2, 3], **how), drawn_batches([6]))
    with cut_by_hand(second, [1, 4], **how) as pipe:
        pipe.load_state_dict(found["state"])
        with pytest.raises(RuntimeError, match="Unexpected key"):
            pipe.load_state_dict({**found["state"], "other": X})
        loss = pipe.step(X, target=Y)
        return {"loss": loss, "state": pipe.full_state_dict(), "own": Own(pipe.state_dict())}
