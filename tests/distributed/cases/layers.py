"""Trainings of models of every shape, and of what goes between their layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipepart import Arguments, Pipeline
from pipepart.capture import RecordedChain
from tests.distributed.cases.models import ScalesByFirst, varied
from tests.distributed.cases.registry import on
from tests.distributed.training import TIMEOUT, drawn_batches, gradients, trained
from tests.support.chains import cut_by_hand
from tests.support.deferred import Tied, initialize, twins
from tests.support.pieces import linear
from tests.support.ranks import Own
from tests.support.recorded import borders_of, chain_for
from tests.support.two_parts import Calls


def cut(layers: list[nn.Module], borders: list[int], **options: Any) -> Pipeline:
    options = {"loss_fn": nn.MSELoss(), "timeout": TIMEOUT, **options}
    return cut_by_hand(nn.Sequential(*layers).double(), borders, **options)


@on(3)
def frozen_and_thawed() -> dict[str, Any]:
    """The second and third step train one layer more."""
    layers = [linear(), nn.Tanh(), linear(), linear(), nn.Tanh(), linear()]
    for layer in layers[:4]:
        layer.requires_grad_(False)
    found: dict[str, Any] = {"losses": []}
    with cut(layers, [2, 4]) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for number, (x, y) in enumerate(drawn_batches([6, 6, 6, 6])):
            layers[2].requires_grad_(number in (1, 2))
            optimizer.zero_grad()
            found["losses"].append(pipe.step(x, target=y))
            optimizer.step()
        return {**found, "gradients": gradients(pipe), "state": pipe.full_state_dict()}


class Enters(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        return x * scale if shift is None else x * scale + shift


@on(3)
def keywords_complex_numbers_and_several_outputs() -> dict[str, Any]:
    def leave(pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        turned, rounded = pair
        return {"size": turned.abs(), "angle": (turned * turned).real, "rounded": rounded.double()}

    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return (output["size"] - target).pow(2).mean() + (output["angle"] * output["rounded"]).mean()

    turn = Calls(lambda x: (torch.complex(x, x.sin()), x.bfloat16()))
    pipe = cut([Enters(), linear(), turn, Calls(leave)], [1, 3], loss_fn=loss)
    shifts: list[dict[str, Any]] = [{}, {"shift": torch.tensor(0.5).double()}, {}]
    batches = drawn_batches([6, 7, 6])
    given = [(Arguments(x, scale=1.5, **shift), y) for (x, y), shift in zip(batches, shifts, strict=True)]
    return trained(pipe, given, optimizer=None, return_outputs=True)


def cut_of_varying_shapes(**options: Any) -> Pipeline:
    """The number of rows between the first stages depends on values: those whose first number is positive."""
    picks = Calls(lambda x: (x, (x[:, 0] > 0).nonzero().flatten()))
    uses = Calls(lambda pair, inner: pair[0].index_add(0, pair[1], inner(pair[0][pair[1]])), inner=linear())
    return cut([linear(), picks, uses, linear()], [2, 3], **options)


def cut_recorded(
    plain: nn.Module,
    model: nn.Module,
    args: tuple[Any, ...],
    stages: int,
    loss_fn: Callable[..., Tensor],
    verify: Any = "first",
    **options: Any,
) -> Pipeline:
    """A pipeline of a model whose layers are those that ``plain`` is recorded with."""
    chain = chain_for(plain, args, loss_fn=loss_fn)
    own = RecordedChain(model, chain.groups, split_loss=False, verify=verify)
    borders = borders_of(len(chain.layers), stages)
    return cut_by_hand(own, borders, loss_fn=loss_fn, micro_batches=2, timeout=TIMEOUT, **options)


@on(2, "plain", slow=True)
@on(3, "deferred")
def tied_and_recorded(kind: str, folder: Path | None = None) -> dict[str, Any]:
    """Each rank has the layers of its own stages only, and takes their values from files if there are any."""
    plain, model = twins(Tied)
    words = torch.randint(12, (8,), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"weights": folder} if folder else {"initialize": initialize}
    own, stages = (plain, 2) if kind == "plain" else (model, 3)
    pipe = cut_recorded(plain, own, (words,), stages, nn.functional.cross_entropy, **options)
    return trained(pipe, [(words, words)] * 2)


@on(3)
def a_tensor_of_a_block_of_another_rank() -> dict[str, Any]:
    model, batches = ScalesByFirst().double(), drawn_batches([6, 6], width=4)
    return trained(cut_recorded(model, model, batches[0][:1], 3, nn.functional.mse_loss), batches)


@on(3)
def values_of_deferred_layers() -> dict[str, Any]:
    with cut_by_hand(twins(varied)[1], [2, 4], initialize=initialize, timeout=TIMEOUT) as pipe:
        return {"state": pipe.full_state_dict(), "own": Own(pipe.state_dict())}
