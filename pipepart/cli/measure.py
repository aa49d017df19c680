"""Profiles the model of a command."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..capture import capture, flatten
from ..data.arguments import Arguments
from ..data.split import batch_size
from ..profiling import Profile, profile
from .errors import UsageError
from .loading import Given, load_model
from .output import note, user_output_to_stderr
from .sample import make_sample


def measure(
    name: str,
    sample: str | None,
    micro_batches: Callable[[int], list[int]],
    optimizer: str,
    threads: int | None,
    seconds: float,
    devices: int = 2,
) -> Profile:
    """Load and profile a model.

    Args:
        name: file or module, and factory.
        sample: description of a random sample, instead of the factory's own.
        micro_batches: returns the numbers to measure, for the number of samples in the mini-batch.
        optimizer, threads, seconds, devices: as for :func:`pipepart.profile`.

    Raises:
        UsageError: the model cannot be loaded, or there is no sample.
        Exception: as :func:`pipepart.profile` does.
    """
    with user_output_to_stderr(), warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: note(str(message))
        given = load_with_sample(name, sample)
        if given.loss_fn is None:
            target = "" if given.target is None else "a target and "
            note(f"{target}no loss function: the backward starts with ones at the model's output")
        flatten(given.model)
        batch = batch_size(Arguments.of(given.sample), given.target)
        counts = micro_batches(batch)
        for count in counts:
            if count > batch:
                raise UsageError(f"--micro-batches {count} is more than the mini-batch has samples, {batch}")
        return profile(
            given.model,
            given.sample,
            loss_fn=given.loss_fn,
            target=given.target,
            micro_batches=counts,
            optimizer=optimizer,
            threads=threads,
            seconds=seconds,
            devices=devices,
        )


def load_with_sample(name: str, sample: str | None) -> Given:
    """Load a model; make up its sample if one is described.

    Raises:
        UsageError: the model cannot be loaded, or there is no sample.
    """
    made_up = None if sample is None else make_sample(sample)
    given = load_model(name)
    if made_up is None and given.sample is None:
        raise UsageError(
            f"{name} returned a model without a sample: let it return (model, sample), or describe one, "
            "as in --input 32x3x16x16"
        )
    return given if made_up is None else replace(given, sample=made_up)


def loss_or_mean_square(given: Given) -> Callable[..., Tensor] | None:
    """Return the model's loss function, or the mean square for a model without one.

    None for a model whose output is the loss.
    """
    if given.loss_fn is not None:
        return given.loss_fn
    sample = Arguments.of(given.sample)
    outputs = capture(given.model, *sample.args, **sample.kwargs).layers[-1].outputs
    if len(outputs) == 1 and not outputs[0].shape:
        return None
    note("no loss function: the mean of the squares of the output is taken")
    return _mean_square


def _mean_square(output: Any, target: Any = None) -> Tensor:
    """Return the mean square of all numbers of the output. The target is ignored."""
    tensors = [
        leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    return sum((tensor.square().mean() for tensor in tensors[1:]), tensors[0].square().mean())
