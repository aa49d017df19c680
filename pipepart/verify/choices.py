"""Choices of a pipeline to repeat in the plain model: seeds of random draws, and weights of micro-batch losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from ..autograd import graph_cut
from ..capture import loss_of
from ..capture.restore import draws_restored
from ..data.arguments import call
from ..data.recorded import entered
from ..loss import MiniBatchLoss, collect_losses
from ..runtime.replay.randomness import KeyedDraws, RngKeys
from .copies import take_over
from .training import Case, Training


class Chosen(NamedTuple):
    """The choices for one step.

    Attributes:
        draws: for each micro-batch and each layer the number of its random draws.
        shares: for each micro-batch the part of its loss in that of the mini-batch, if the model computes its loss.
            None if several terms of the loss have different ones.
    """

    draws: list[list[int]]
    shares: list[float] | None = None


class Choices:
    """Finds the choices of each step by a forward of a copy's layers, whose outputs are not used.

    A wrong recording makes wrong choices, and then the numbers differ: a check cannot pass because of them. The shares
    are compared with the model on the whole mini-batch.
    """

    def __init__(self, case: Case) -> None:
        self._training = Training(case)
        self._chain = self._training.chain
        self.names = [name for name, _ in self._chain.layers]

    def of_step(self, model: nn.Module, x: Any, y: Any) -> Chosen:
        """Return the choices for the next step of ``model``."""
        case, ours = self._training.case, self._training.model
        take_over(ours, {**dict(model.named_parameters()), **dict(model.named_buffers())})
        batch = entered(self._chain, case.split_up(x, y))
        loss = None
        if case.loss_fn is None:
            loss = MiniBatchLoss(case.step_loss(loss_of), batch)
        keys = RngKeys()
        counts: list[list[int]] = []
        with draws_restored(ours), collect_losses():
            for index, part in enumerate(batch.inputs):
                value, choices = graph_cut.part(part), []
                for place, (_, layer) in enumerate(self._chain.layers):
                    with keys.of(place, index) as draws:
                        value = call(layer, value)
                    choices.append(draws.count)
                counts.append(choices)
                if loss is not None:
                    loss.take(index, value, batch.targets[index])
        return Chosen(counts, None if loss is None else loss.shares())


class ModelDraws(KeyedDraws):
    """Context manager in which the user's model draws the same random numbers as the layers of the pipeline.

    Args:
        keys: of the step.
        micro_batch: which.
        counts: the number of draws of each layer.

    Attributes:
        matches: whether the model has drawn as often as the layers.
    """

    def __init__(self, keys: RngKeys, micro_batch: int, counts: Sequence[int]) -> None:
        super().__init__(keys, hash((keys.seed, -1, micro_batch)))
        self._seeds = []
        for layer, count in enumerate(counts):
            draws = keys.of(layer, micro_batch)
            self._seeds += [draws.next_seed() for _ in range(count)]

    @property
    def matches(self) -> bool:
        """True if the model has drawn as often as the layers."""
        return self.count == len(self._seeds)

    def next_seed(self) -> int:
        """Return the seed of the next draw of the layers; another one if the model draws more often."""
        other = super().next_seed()
        return self._seeds[self.count - 1] if self.count <= len(self._seeds) else other
