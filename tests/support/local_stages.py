"""Emulates several processes in one: each has its own model, with only the layers of its stages."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipepart import Arguments, Plan
from pipepart.capture import Chain, Live, RecordedChain, chain_of
from pipepart.data.recorded import entered
from pipepart.data.split import micro_batches_of
from pipepart.runtime.build import build_stages
from pipepart.runtime.placing import InitialValues
from tests.support.deferred import initialize


class Process(NamedTuple):
    """The model of one process, and its chain."""

    model: nn.Module
    chain: Chain


def process(
    model: nn.Module,
    plan: Plan,
    local: Collection[int],
    *,
    groups: Any = None,
    weights: Any = None,
    **options: Any,
) -> Process:
    """Give a model the layers of some stages.

    Args:
        groups: of a chain that has recorded the same model; None for an ``nn.Sequential``.
        options: of :class:`RecordedChain`.
    """
    torch.manual_seed(1)  # the seed of :func:`tests.support.deferred.twins`
    chain = chain_of(model) if groups is None else RecordedChain(model, groups, **options)
    if isinstance(chain, RecordedChain):
        chain.use_fake_parameters()
    build_stages(chain.layers, plan, values=InitialValues.of(model, weights, initialize), local=local)
    return Process(model, chain)


def output(processes: list[Process], plan: Plan, sample: Any) -> Any:
    """Run the forward of a mini-batch as one micro-batch, each stage in its process; return what the last layer did.

    Each process records the model by itself. From one to the next only tensors are sent.
    """
    batch = micro_batches_of(Arguments.of(sample).input, None, 1)
    inputs = [entered(one.chain, batch).inputs[0] for one in processes]
    value, place = inputs[0], 0
    for stage, one, own in zip(plan.stages, processes, inputs, strict=True):
        if isinstance(own, Live):
            value = Live(own.recording, value.tensors)
        for _, layer in one.chain.layers[place : place + len(stage.layers)]:
            value = layer(value)
        place += len(stage.layers)
    return value


class Block(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)


class Blocks(nn.Module):
    """Calls its blocks one after the other."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class AsksForMask(Blocks):
    """Takes another way if its argument has zeros."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is not None
        x = x * 2 if bool(mask.all()) else x * mask.unsqueeze(1)
        return super().forward(x)


class AsksBetween(Blocks):
    """Reads what a block has computed."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x) if x.sum() > 0 else -block(x)
        return x
