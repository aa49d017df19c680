"""Ways to train the same chain, and few of them in which every two settings meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from tests.pipeline.conformance.kinds import KINDS
from tests.support.chains import Recompute

# Schedules that a pipeline runs with the caller's optimizer, and their numbers of stages a device.
SCHEDULES: list[tuple[str, int]] = [
    *((name, 1) for name in ("sequential", "gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "chimera")),
    *((name, 1) for name in ("interleaved-1f1b",)),
    *((name, 2) for name in ("interleaved-1f1b", "looped-bfs", "interleaved-zb", "hanayo")),
    *((name, 2) for name in ("zb-v", "v-half", "v-min", "dualpipe-v")),
    *((name, 3) for name in ("interleaved-1f1b", "looped-bfs", "interleaved-zb")),
    ("hanayo", 4),
]
SPLITTING = {"zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min", "dualpipe-v"}


@dataclass(frozen=True)
class Mode:
    """One training: what is trained, and how."""

    kind: str
    schedule: tuple[str, int]
    devices: int  # of one replica
    border: int  # a stage begins at this layer; where the others begin is drawn
    recompute: str  # of each stage, or "mixed"
    replicas: int
    sizes: tuple[int, int]  # samples of the mini-batch, and micro-batches
    dtype: torch.dtype
    loss: str
    strict: bool
    drop_in: bool  # the pipeline is called like the model, and the caller goes backward

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self)).replace("torch.", "")

    @property
    def possible(self) -> bool:
        """Whether it is no training that is refused, and one that has an oracle."""
        kind, (name, chunks) = KINDS[self.kind], self.schedule
        samples, micro_batches = self.sizes
        if name == "chimera" and (self.devices != 2 or self.replicas == 3):
            return False
        if self.replicas > 1 and (kind.writes or micro_batches < self.replicas or samples < micro_batches):
            return False
        if kind.writes and samples < 2 * micro_batches:
            return False  # a batch norm wants two samples a micro-batch
        if kind.sparse and self.dtype == torch.bfloat16:
            return False  # torch adds none up
        if self.drop_in and (kind.draws or self.replicas > 1 or name == "chimera"):
            return False
        stages = self.devices * chunks
        return stages <= 7 and stages * self.replicas <= 8  # beyond the layers, and beyond what shows more


VALUES: dict[str, list[Any]] = {
    "kind": list(KINDS),
    "schedule": SCHEDULES,
    "devices": [1, 2, 3],
    "border": [1, 2, 3, 4, 5, 6],
    "recompute": ["never", "except-last", "always", "mixed"],
    "replicas": [1, 2, 3],
    "sizes": [(9, 4), (12, 6), (14, 7), (3, 8), (1, 2), (7, 1)],
    "dtype": [torch.float64, torch.float32, torch.bfloat16],
    "loss": ["mean", "sum", "huber", "own mean", "own sum"],
    "strict": [False] * 5 + [True],  # which is slow
    "drop_in": [False, True],
}


def drawn(choose: random.Random, **given: Any) -> Mode:
    """A possible mode with these settings, the others drawn."""
    while True:
        mode = Mode(**{name: given.get(name, choose.choice(values)) for name, values in VALUES.items()})
        if mode.possible:
            return mode


def pairs(mode: Mode) -> set[Any]:
    """Every two settings that meet in a mode. Kinds meet the ways to go backward, not each schedule."""
    family = (mode.schedule[0] in SPLITTING, mode.schedule[1] > 1)
    settings = [(field.name, getattr(mode, field.name)) for field in fields(mode)]
    found = {tuple(pair) for pair in itertools.combinations(settings, 2)}
    return {pair for pair in found if {"kind", "schedule"} != {pair[0][0], pair[1][0]}} | {
        (mode.kind, family)
    }


def covering(choose: random.Random, tries: int = 16) -> Iterator[Mode]:
    """Modes in which nearly every two settings that can meet do: the best of a few drawn ones, kind after kind."""
    seen: set[Any] = set()
    for kind in [*KINDS] * 4:
        best = max((drawn(choose, kind=kind) for _ in range(tries)), key=lambda mode: len(pairs(mode) - seen))
        seen |= pairs(best)
        yield best


# Each with whether it is a mean over samples.
LOSSES: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "mean": (nn.MSELoss(), True),
    "sum": (nn.MSELoss(reduction="sum"), False),
    "huber": (nn.functional.huber_loss, True),
    "own mean": (lambda output, target: (output - target).abs().mean(), True),
    "own sum": (lambda output, target: (output - target).pow(4).sum(), False),
}


def stages_of(mode: Mode, layers: int) -> tuple[list[int], tuple[Recompute, ...]]:
    """The layers at which stages begin, one of them the mode's, and what each stage recomputes."""
    choose = random.Random(str(mode))
    count = mode.devices * mode.schedule[1]
    others = [layer for layer in range(1, layers) if layer != mode.border]
    borders = sorted([mode.border, *choose.sample(others, count - 2)]) if count > 1 else []
    modes: list[Recompute] = ["never", "except-last", "always"]
    chosen = tuple(mode.recompute if mode.recompute in modes else choose.choice(modes) for _ in range(count))
    return borders, chosen  # type: ignore[return-value]
