"""A small language model with blocks, whose plans are exported, and what one of its plans is made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipepart import Cluster, Plan, Profile, profile
from pipepart.planning import StagePlan

WIDTH, WORDS = 8, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


class LanguageModel(nn.Module):
    def __init__(self, blocks: int = 5, tied: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def loss_of(logits: Tensor, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(WORDS, (8, 3), generator=generator)
    return tokens, tokens.roll(1, 1)


def model_of(seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel().double()


def profile_of(model: nn.Module, micro_batches: int = 4, layers: list[str] | None = None) -> Profile:
    tokens, words = batch()
    return profile(model, tokens, loss_fn=loss_of, target=words, micro_batches=micro_batches, layers=layers)


def names(blocks: int = 5) -> list[str]:
    return ["tok_embeddings", *(f"layers.{index}" for index in range(blocks)), "norm", "output"]


def by_hand(placement: list[int], borders: list[int], actions: list[str], micro_batches: int) -> Plan:
    """A plan without a profile, of the language model's layers, with the order of each device as text."""
    cluster = Cluster.virtual(max(placement) + 1, threads=1)
    edges = [0, *borders, len(names())]
    return Plan(
        stages=tuple(
            StagePlan(layers=tuple(names()[start:end]), device=cluster.devices[home].name)
            for start, end, home in zip(edges, edges[1:], placement, strict=False)
        ),
        cluster=cluster,
        schedule="search",
        micro_batches=micro_batches,
        actions=tuple(tuple(row.split(",")) for row in actions),
    )
