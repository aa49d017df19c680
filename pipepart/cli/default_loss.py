"""Chooses a loss for a model whose factory returns none."""

from __future__ import annotations

from typing import Any

from ..autograd.own_copy import tensors
from ..capture import RecordedChain, capture, chain_of
from ..data.arguments import Arguments
from .model import Given
from .output import note


def loss_or_mean_square(given: Given, layers: list[str] | None) -> Any:
    """Return the model's loss function, or the mean square of the output for a model without one.

    None for a model whose output is the loss.
    """
    if given.loss_fn is not None:
        return given.loss_fn
    sample = Arguments.of(given.sample)
    chain = chain_of(given.model, layers=layers, verify="never")
    if isinstance(chain, RecordedChain):
        if chain.bind(sample.args, sample.kwargs).live.recording.loss is not None:
            return None
    else:
        outputs = capture(given.model, *sample.args, **sample.kwargs).layers[-1].outputs
        if len(outputs) == 1 and not outputs[0].shape:
            return None
    note("no loss function: the mean of the squares of the output is taken")

    def mean_square(output: Any, target: Any = None) -> Any:
        return sum(tensor.square().mean() for tensor in tensors(output) if tensor.is_floating_point())

    return mean_square
