"""Trains a pipeline for some steps and returns all that another number of processes must give as well."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipepart import Pipeline
from pipepart.ranks import under_torchrun
from tests.support.chains import cut_by_hand
from tests.support.pieces import WIDTH, linear
from tests.support.ranks import Own

TIMEOUT = 200.0  # seconds that a rank of these tests waits for the others, on a busy machine too

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def drawn_batches(sizes: Sequence[int], width: int = WIDTH, **kind: Any) -> list[tuple[Tensor, Tensor]]:
    """Mini-batches of these numbers of samples, the same on every rank."""
    generator = torch.Generator().manual_seed(1)

    def draw(size: int) -> Tensor:
        return torch.randn(size, width, generator=generator, dtype=torch.float64).to(**kind)

    return [(draw(size), draw(size)) for size in sizes]


def trained(
    pipe: Pipeline,
    batches: Sequence[tuple[Any, Any]],
    optimizer: Optimizer | None = adam,
    max_norm: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train on the mini-batches, one step each, with ``options``; then evaluate the last. Closes the pipeline.

    ``optimizer`` is of the parameters of a rank; None if stages have their own, or gradients are to add up.
    """
    found: dict[str, Any] = {"losses": [], "norms": []}
    with pipe:
        steps = optimizer(pipe.parameters()) if optimizer else None
        for x, y in batches:
            if steps:
                steps.zero_grad()
            found["losses"].append(pipe.step(x, target=y, **options))
            if max_norm is not None:
                found["norms"].append(pipe.clip_grad_norm_(max_norm))
            found["gradients"] = gradients(pipe)
            if steps:
                steps.step()
        with torch.no_grad():
            found["output"] = pipe(batches[-1][0])
        found["evaluated"] = pipe.evaluate(batches[-1][0], target=batches[-1][1])
        found["state"] = pipe.full_state_dict()
        found["own state"] = Own(pipe.state_dict())
        if pipe.optimizers:
            found["optimizers"] = Own(
                {
                    name: optimizer.state[parameter]
                    for name, parameter in pipe.named_parameters()
                    for optimizer in pipe.optimizers
                    if parameter in optimizer.state
                }
            )
    found["generator"] = torch.get_rng_state()
    return found


def trained_by_caller(pipe: Pipeline) -> dict[str, Any]:
    """Train by losses of the caller, whose own layer is behind the pipeline; two mini-batches make up a step."""
    found: dict[str, Any] = {"losses": [], "inputs": [], "outputs": []}
    head = linear().double()
    batches = drawn_batches([9, 9, 4, 9])
    with pipe:
        optimizer = adam([*pipe.parameters(), *head.parameters()])
        for number, (x, y) in enumerate(batches):
            x.requires_grad_(number != 1)
            out = pipe(x)
            loss = nn.functional.mse_loss(head(out), y)
            loss.backward()
            found["losses"].append(loss)
            found["outputs"].append(out)
            found["inputs"].append(x.grad)
            if number % 2:
                found["norm"] = pipe.clip_grad_norm_(0.5)
                found["gradients"] = gradients(pipe)
                optimizer.step()
                optimizer.zero_grad()
        found["stepped"] = pipe.step(batches[0][0].detach(), target=batches[0][1])
        found["state"] = pipe.full_state_dict()
    return {**found, "head": [p.clone() for p in head.parameters()], "generator": torch.get_rng_state()}


def rank() -> int:
    """The rank of this process; 0 in the tests' own."""
    return int(os.environ.get("RANK", "0")) if under_torchrun() else 0


def small(**options: Any) -> Pipeline:
    """Four layers with dropout, in three stages; the first and the last share their weight."""
    layers = [nn.Sequential(linear(), nn.Dropout(0.1)) for _ in range(4)]
    layers[3][0].weight = layers[0][0].weight
    return cut_by_hand(
        nn.Sequential(*layers).double(), [1, 2], loss_fn=nn.MSELoss(), timeout=TIMEOUT, **options
    )


def gradients(pipe: Pipeline) -> Own:
    return Own({name: None if p.grad is None else p.grad.clone() for name, p in pipe.named_parameters()})
