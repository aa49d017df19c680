"""Under torchrun ``pipe(x)`` can be differentiated: the loss of the caller trains to the bits of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pipepart
from pipepart import Pipeline
from tests.distributed.models import Balanced, Overflow, language_model
from tests.distributed.test_calls import rank, small
from tests.distributed.training import TIMEOUT, adam, drawn_batches, gradients
from tests.support import skipping
from tests.support.chains import cut_by_hand
from tests.support.pieces import WIDTH, linear
from tests.support.ranks import Own, assert_as_in_one_process
from tests.support.recorded import piped

X, Y = drawn_batches([6])[0]
SIZES = [9, 9, 4, 9]


def chain(tied: bool = False) -> nn.Sequential:
    layers = [layer for _ in range(4) for layer in (linear(), nn.Dropout(0.2), nn.LayerNorm(WIDTH))]
    model = nn.Sequential(*layers, linear()).double()
    if tied:
        model[12].weight = model[0].weight
    return model


def trained_by_caller(pipe: Pipeline, loss_of: Callable[[Any, Tensor], Tensor]) -> dict[str, Any]:
    """Train by losses of the caller, whose own layer is behind the pipeline; two mini-batches make up a step."""
    found: dict[str, Any] = {"losses": [], "inputs": [], "outputs": []}
    head = linear().double()
    with pipe:
        optimizer = adam([*pipe.parameters(), *head.parameters()])
        for number, (x, y) in enumerate(drawn_batches(SIZES)):
            x.requires_grad_(number != 1)
            out = pipe(x)
            loss = loss_of(head(out), y)
            loss.backward()
            found["losses"].append(loss)
            found["outputs"].append(out)
            found["inputs"].append(x.grad)
            if number % 2:
                found["norm"] = pipe.clip_grad_norm_(0.5)
                found["gradients"] = gradients(pipe)
                optimizer.step()
                optimizer.zero_grad()
        found["stepped"] = pipe.step(X, target=Y)
        found["state"] = pipe.full_state_dict()
    return {**found, "head": [p.clone() for p in head.parameters()], "generator": torch.get_rng_state()}


def over(schedule: str, chunks: int, recompute: Any, tied: bool, processes: int) -> dict[str, Any]:
    borders = [13 * stage // (processes * chunks) for stage in range(1, processes * chunks)]
    pipe = cut_by_hand(
        chain(tied),
        borders,
        loss_fn=nn.MSELoss(),
        schedule=schedule,
        chunks=chunks,
        recompute=recompute,
        micro_batches=4,
        timeout=TIMEOUT,
    )
    return trained_by_caller(pipe, nn.MSELoss())


@pytest.mark.parametrize(
    ("schedule", "chunks", "recompute", "tied", "processes"),
    [
        ("1f1b", 1, "never", True, 2),
        ("gpipe", 1, "always", True, 3),
        ("interleaved-1f1b", 2, "never", True, 2),
        ("zb-v", 2, "never", False, 4),
        ("zb-h1", 1, "except-last", False, 3),
    ],
)
def test_a_loss_of_the_caller_trains_as_in_one_process(schedule, chunks, recompute, tied, processes):
    assert_as_in_one_process(over, processes, schedule, chunks, recompute, tied, processes)


def in_replicas() -> dict[str, Any]:
    pipe = cut_by_hand(
        chain(), [6], loss_fn=nn.MSELoss(), replicas=2, schedule="1f1b", micro_batches=4, timeout=TIMEOUT
    )
    return trained_by_caller(pipe, nn.MSELoss())


def test_gradients_of_replicas_are_added_up():
    assert_as_in_one_process(in_replicas, 4)


def of_a_recorded_model() -> dict[str, Any]:
    """Live values go past a stage on another rank."""
    x, model = drawn_batches([8])[0][0], skipping.Hourglass(4).double()
    pipe = piped(model, x, loss_fn=nn.MSELoss(), stages=3, parts=4, timeout=TIMEOUT)
    return trained_by_caller(pipe, nn.MSELoss())


def test_values_that_skip_ranks():
    assert_as_in_one_process(of_a_recorded_model, 3)


def with_a_loss_of_its_own(given: bool) -> dict[str, Any]:
    """Every rank computes the loss of the model from its labels, also one that was given no mini-batch."""
    ids = torch.randint(40, (6, 7), generator=torch.Generator().manual_seed(4))
    sample = {"input_ids": ids, "labels": ids, "use_cache": False}
    with piped(language_model("llama"), sample, stages=3, parts=3, timeout=TIMEOUT) as pipe:
        if not given and torch.distributed.is_initialized():
            with pytest.raises((RuntimeError, ValueError), match="give the mini-batch to all ranks"):
                pipe(**(sample if rank() != 1 else {}))
        out = pipe(**sample)
        (out.loss + out.logits.pow(2).mean()).backward()
        return {"loss": out.loss, "logits": out.logits, "gradients": gradients(pipe)}


@pytest.mark.parametrize("given", [True, False])
def test_a_model_that_computes_its_own_loss(given):
    assert_as_in_one_process(with_a_loss_of_its_own, 3, given)


class Two(nn.Module):
    """Returns two outputs and a value."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        left, right = x.chunk(2, dim=1)
        return {"left": left, "right": [right.exp()], "mask": x > 0, "scale": 2.0}


def in_parts() -> dict[str, Any]:
    """Only some of the outputs have gradients, another one each time; then only the input gets one."""
    found: dict[str, Any] = {}
    with cut_by_hand(nn.Sequential(linear(), linear(), Two()).double(), [1], timeout=TIMEOUT) as pipe:
        for number in range(3):
            out = pipe(X)
            parts = [out["left"].sum(), out["right"][0].pow(2).sum() * out["scale"]]
            (parts[number] if number < 2 else parts[0] + parts[1]).backward()
            found[f"gradients {number}"] = gradients(pipe)
        x = X.clone().requires_grad_()
        found["of the input"] = torch.autograd.grad(pipe(x)["left"].mean(), x)
        found["still"] = gradients(pipe)
    return found


def test_outputs_without_a_gradient_and_the_gradient_of_the_input_alone():
    assert_as_in_one_process(in_parts, 2)


def two_at_once() -> dict[str, Any]:
    """Two outputs wait for their backward, beside a step and a call without gradients."""
    with small() as pipe:
        one, other = pipe(X), pipe(X * 2)
        loss = pipe.step(X, target=Y)
        with torch.no_grad():
            plain = pipe(X)
        other.pow(2).sum().backward()
        (one * plain).sum().backward()
        return {"loss": loss, "gradients": gradients(pipe), "generator": torch.get_rng_state()}


def test_two_outputs_wait_for_their_backward():
    assert_as_in_one_process(two_at_once, 3)


def with_added_losses(recompute: Any) -> dict[str, Any]:
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


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_losses_that_layers_of_several_ranks_add(recompute):
    assert_as_in_one_process(with_added_losses, 3, recompute)


def in_half() -> dict[str, Any]:
    """The gradients of the first stage alone overflow in the third step."""
    overflow = Overflow()
    model = nn.Sequential(linear(), overflow, linear(), nn.Tanh(), linear())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    with cut_by_hand(model, [2, 4], timeout=TIMEOUT) as pipe:
        optimizer = adam(pipe.parameters())
        for step, (x, y) in enumerate(drawn_batches([6] * 5)):
            overflow.on = step == 2
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = functional.mse_loss(pipe(x.float()).float(), y.float())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return {"scales": scales, "state": pipe.full_state_dict()}


def test_an_overflow_on_one_rank_skips_the_step_of_all():
    assert_as_in_one_process(in_half, 3)


def not_given_to_all() -> dict[str, Any]:
    """The rank between has no mini-batch, which comes from a layer of the caller's."""
    before = linear().double()
    with small() as pipe:
        out = pipe(*([before(X)] if rank() != 1 else []))
        out.pow(2).mean().backward()
        return {"gradients": gradients(pipe), "before": Own({} if rank() == 1 else {"w": before.weight.grad})}


def test_ranks_without_the_mini_batch_go_backward_as_well():
    assert_as_in_one_process(not_given_to_all, 3)


def _others_go_on(pipe: Pipeline) -> None:
    out = pipe(X)
    if rank() == 1:
        pipe.evaluate(X, target=Y)
    else:
        out.sum().backward()


def _another_order(pipe: Pipeline) -> None:
    one, other = pipe(X), pipe(X)
    (other if rank() else one).sum().backward()


def _another_loss(pipe: Pipeline) -> None:
    functional.mse_loss(pipe(X), Y + (rank() == 1)).backward()


def _written(pipe: Pipeline) -> None:
    x = X.clone()
    out = pipe(x)
    if rank() == 0:
        x.zero_()
    out.sum().backward()


WRONG: dict[str, tuple[Callable[[Pipeline], None], str]] = {
    "another call": (
        _others_go_on,
        "rank 1 calls evaluate.*while rank 0 calls the backward of the output of call 1",
    ),
    "another order": (_another_order, "rank 1 calls the backward of the output of call 2"),
    "another loss": (_another_loss, "rank 1 goes backward from another gradient of the output than rank 2"),
    "written": (_written, "modified by an inplace operation"),
}


def refused(name: str) -> dict[str, Any]:
    """A step, a backward that is refused, and a step."""
    call, message = WRONG[name]
    with small() as pipe:
        losses = [pipe.step(X, target=Y)]
        pipe.zero_grad()
        if torch.distributed.is_initialized():
            with pytest.raises((RuntimeError, ValueError), match=message):
                call(pipe)
        elif name == "another order":
            _ = pipe(X), pipe(X)
        else:
            pipe(X)
        losses.append(pipe.step(X, target=Y))
        return {"losses": losses, "gradients": gradients(pipe)}


@pytest.mark.parametrize("name", WRONG)
def test_a_backward_that_ranks_do_not_begin_alike_is_refused(name):
    assert_as_in_one_process(refused, 3, name)
