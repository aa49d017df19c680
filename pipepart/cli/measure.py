"""Profiles the model that a command was given."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..capture import flatten
from ..data.arguments import Arguments
from ..data.split import batch_size
from ..profiling import Profile, profile
from .errors import Mistake
from .loading import Given, load_model
from .output import note, quiet_output
from .sample import make_sample


@dataclass(frozen=True)
class HowToMeasure:
    """The options of a measurement; None leaves the default of :func:`pipepart.profile`."""

    sample: str | None = None
    optimizer: str | None = None
    threads: int | None = None
    seconds: float | None = None

    def given(self) -> list[str]:
        """The options that were set."""
        options = {
            "--input": self.sample,
            "--optimizer": self.optimizer,
            "--threads": self.threads,
            "--seconds": self.seconds,
        }
        return [option for option, value in options.items() if value is not None]


def measure(name: str, how: HowToMeasure, micro_batches: Callable[[int], list[int]]) -> Profile:
    """The profile of a model by name.

    Args:
        name: file or module, and factory.
        how: options.
        micro_batches: the numbers to measure for a mini-batch of so many samples.

    Raises:
        Mistake: as for loading; or there is no sample.
        Exception: as :func:`pipepart.profile` does.
    """
    with quiet_output(), warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: note(str(message))
        made_up = None if how.sample is None else make_sample(how.sample)
        given = with_sample(name, load_model(name), made_up)
        _note_backward_of_ones(given)
        flatten(given.model)
        batch = batch_size(Arguments.of(given.sample), given.target)
        return profile(
            given.model,
            given.sample,
            loss_fn=given.loss_fn,
            target=given.target,
            micro_batches=_possible(micro_batches(batch), batch),
            optimizer=how.optimizer or "adam",
            threads=how.threads,
            seconds=1.0 if how.seconds is None else how.seconds,
        )


def with_sample(name: str, given: Given, made_up: Tensor | None) -> Given:
    """What the factory of that name returned, with a sample that was made up instead of its own, if one was.

    Raises:
        Mistake: there is none.
    """
    if made_up is None and given.sample is None:
        raise Mistake(
            f"{name} returned a model without a sample: let it return (model, sample), or describe one, "
            "as in --input 32x3x16x16"
        )
    return given if made_up is None else Given(given.model, made_up, given.target, given.loss_fn)


def _note_backward_of_ones(given: Given) -> None:
    if given.loss_fn is None and given.target is None:
        note("no loss function: the backward starts with ones at the model's output")
    elif given.loss_fn is None:
        note("a target and no loss function: the backward starts with ones at the model's output")


def _possible(counts: list[int], batch: int) -> list[int]:
    for count in counts:
        if count > batch:
            raise Mistake(f"--micro-batches {count} is more than the mini-batch has samples, {batch}")
    return counts
