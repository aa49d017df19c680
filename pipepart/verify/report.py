"""The result of a check: one row for each schedule and dtype, and facts about the plain model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from ..document import Document, Value

# 0 means equal bit for bit. Infinite: only one side has a tensor or a finite number.
RelativeError = Annotated[float, Field(ge=0)]


class DifferentNumbers(AssertionError):
    """A pipeline does not give the numbers of the plain model. The message names schedule, layer and reason."""


class CheckRow(Value):
    """The errors of one schedule in one dtype.

    Attributes:
        schedule, recompute, stages: the pipeline that was trained.
        dtype: dtype of the numbers.
        losses, gradients, parameters, buffers: largest relative error of any step, against the plain model run on the
            same micro-batches one after the other. 0 is bit for bit; None if there are no such numbers.
        mini_batch: largest relative error of losses and gradients against one loss over the outputs of all
            micro-batches: the loss of the whole mini-batch. For a model that computes its own loss, against the model
            run on the whole mini-batch. None if its layers draw random numbers or mix samples, or if the user splits
            the mini-batch.
        tolerance: the largest error that counts as rounding.
        compressed: what the plan compresses between stages; empty if nothing is.
        layer: the first layer that differs, in the order of computation; ``"loss"`` for the loss; empty if all
            numbers are equal bit for bit.
        kind: class of that layer.
        what: what differs in it.
        why: why it may differ.
    """

    schedule: str
    recompute: str
    stages: int
    dtype: str
    losses: RelativeError
    gradients: RelativeError | None
    parameters: RelativeError | None
    buffers: RelativeError | None
    mini_batch: RelativeError | None
    tolerance: RelativeError
    compressed: str = ""
    layer: str = ""
    kind: str = ""
    what: str = ""
    why: str = ""

    @property
    def ok(self) -> bool:
        """True if no error is larger than the tolerance."""
        return self.largest <= self.tolerance

    @property
    def same(self) -> bool:
        """True if all numbers equal those of the plain model on the same micro-batches, bit for bit."""
        return not any((self.losses, self.gradients, self.parameters, self.buffers))

    @property
    def largest(self) -> float:
        """The largest error."""
        found = (self.losses, self.gradients, self.parameters, self.buffers, self.mini_batch)
        return max(error for error in found if error is not None)

    @property
    def place(self) -> str:
        """The first layer that differs, in words."""
        return "the loss" if self.layer == "loss" and not self.kind else f"layer {self.layer!r} ({self.kind})"

    @property
    def text(self) -> str:
        """The row as a sentence."""
        mode = "" if self.recompute == "never" else f", recompute {self.recompute}"
        named = f"{self.schedule} in {self.dtype}{mode}"
        if not self.layer:
            return f"{named}: the same"
        return f"{named}: {self.place} is the first to differ, in {self.what}: {self.why}"


class PlainFacts(Value):
    """Facts about the plain model in one dtype.

    Attributes:
        dtype: dtype of the numbers.
        repeats: whether a second plain run gave the same bits.
        unsteady: if it did not, the first layer that differed.
        at_once: relative error of loss and gradients on the whole mini-batch, against micro-batches.
        mixes: the first layer whose output for a sample depends on the other samples; empty if there is none.
        draws: layers that drew random numbers.
        remembers: attributes in Python that a step has changed, as in ``"2.count"``.
    """

    dtype: str
    repeats: bool
    unsteady: str = ""
    at_once: RelativeError
    mixes: str = ""
    draws: tuple[str, ...] = ()
    remembers: tuple[str, ...] = ()

    @property
    def unsteady_text(self) -> str:
        """Why two plain runs differ."""
        where = f"layer {self.unsteady!r}" if self.unsteady else "the model"
        return (
            f"two plain runs from the same state and seed differ as well, first in {where}: an operation is not "
            "deterministic, or state is kept outside of the model"
        )

    @property
    def notes(self) -> list[str]:
        """What a reader must know about the plain model to understand the rows, as sentences."""
        notes = []
        if not self.repeats:
            notes.append(f"Two plain runs differ: {self.unsteady_text}.")
        if self.draws:
            notes.append(
                f"Random layers ({listed(self.draws)}): the plain model was given the pipeline's random draws, by "
                "seed, step, micro-batch and layer. By itself it draws other numbers."
            )
        remembers = any(name.startswith(f"{self.mixes}.") for name in self.remembers)
        if self.mixes and self.mixes not in self.draws and not remembers:
            notes.append(
                f"On the whole mini-batch the plain model gives other numbers ({self.at_once:.0e}): in layer "
                f"{self.mixes!r} a sample's output depends on the other samples, and it sees one micro-batch at a "
                "time, as in any training with micro-batches."
            )
        if self.remembers:
            notes.append(f"Attributes in Python that a step changes: {listed(self.remembers)}.")
        return notes


class CheckReport(Document):
    """The result of :func:`pipepart.check`.

    Attributes:
        model: class of the model.
        devices: names of the devices.
        samples: samples of the mini-batch.
        micro_batches: micro-batches that it was split into.
        steps: steps that were trained.
        optimizer: name of the optimizer.
        seed: seed of the first step.
        rows: one for each schedule, recompute mode and dtype.
        plain: one for each dtype.
    """

    model: str
    devices: tuple[str, ...]
    samples: int
    micro_batches: int
    steps: int
    optimizer: str
    seed: int
    rows: tuple[CheckRow, ...]
    plain: tuple[PlainFacts, ...]

    @property
    def ok(self) -> bool:
        """True if no row differs by more than its tolerance."""
        return all(row.ok for row in self.rows)

    def raise_if_different(self) -> None:
        """Do nothing if all rows are ok.

        Raises:
            DifferentNumbers: a row differs by more than its tolerance.
        """
        if not self.ok:
            raise DifferentNumbers("\n".join(row.text for row in self.rows if not row.ok))


def listed(names: Sequence[str], most: int = 6) -> str:
    """The names with commas between them; of many the first ``most`` and a count."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
