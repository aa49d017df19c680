"""CheckReport: the result of a check, with one row for each schedule and dtype."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..document import Document, Value
from ..units import listed

# 0 means equal bit for bit. Infinite: only one side has a tensor or a finite number.
RelativeError = Annotated[float, Field(ge=0)]

MINI_BATCH = "the loss of the mini-batch"
_UNSTEADY = (
    "Two plain runs from the same state and seed differ as well: an operation is not deterministic, or state is kept "
    "outside of the model"
)


class DifferentNumbers(AssertionError):
    """A pipeline computes other numbers than the plain model. The message names schedule and layer."""


class CheckRow(Value):
    """The errors of one schedule in one dtype.

    Attributes:
        schedule, recompute, stages: the pipeline that was trained.
        dtype: dtype of the numbers.
        losses, gradients, parameters, buffers: largest relative error of any step, against the plain model run on the
            same micro-batches one after the other. 0 is bit for bit; None if there are no such numbers.
        mini_batch: largest relative error against the loss of the whole mini-batch: of the loss and its gradients at
            the model's outputs, against one loss over the outputs of all micro-batches. For a model that computes its
            own loss: of loss and gradients of the first step, against the model run on the whole mini-batch. None if
            there is no such loss: the user splits the mini-batch, the outputs cannot be joined, or a model with its
            own loss draws random numbers or has a batch norm.
        tolerance: the largest error that counts as rounding.
        compressed: what the plan compresses between stages; empty if nothing is.
        layer: path of the first module that differs, in the order of computation; ``"loss"`` for the loss; empty if
            the row is ok.
        kind: class of that module.
        what: what differs in it.
        repeats: whether the plain model gave the same bits a second time; None if the row is ok.
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
    repeats: bool | None = None

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
        kinds = (self.losses, self.gradients, self.parameters, self.buffers, self.mini_batch)
        return max(error for error in kinds if error is not None)

    @property
    def place(self) -> str:
        """Text that names the first layer that differs."""
        return "the loss" if self.layer == "loss" and not self.kind else f"layer {self.layer!r} ({self.kind})"

    @property
    def text(self) -> str:
        """The row as a sentence."""
        mode = "" if self.recompute == "never" else f", recompute {self.recompute}"
        named = f"{self.schedule} in {self.dtype}{mode}"
        if not self.layer:
            return f"{named}: the same"
        if self.what == MINI_BATCH:
            return f"{named}: {self._combination}"
        unsteady = "" if self.repeats is not False else f". {_UNSTEADY}"
        return f"{named}: {self.place} is the first to differ, in {self.what}{unsteady}"

    @property
    def _combination(self) -> str:
        return (
            "the micro-batches are those of the plain model, and their losses do not add up to the loss of the whole "
            f"mini-batch (relative error {self.mini_batch or 0.0:.1e}). If that is more than rounding, declare "
            "reduction='mean', 'sum' or 'batch', or return (sum, count). A layer that mixes samples gives other "
            "numbers for micro-batches by design: allow a larger tolerance"
        )


class PlainFacts(Value):
    """Facts about the plain model in one dtype.

    Attributes:
        dtype: dtype of the numbers.
        at_once: relative error of loss and gradients of the first step on the whole mini-batch, against micro-batches.
            None if the model draws random numbers, or the user splits the mini-batch.
        mixes: the first module with a batch norm, whose output for a sample depends on the other samples; empty if
            there is none, or ``at_once`` is rounding.
        draws: layers that drew random numbers.
        draws_match: whether the plain model drew as often as the layers of the pipeline, so that it got the same draws.
    """

    dtype: str
    at_once: RelativeError | None = None
    mixes: str = ""
    draws: tuple[str, ...] = ()
    draws_match: bool = True

    @property
    def notes(self) -> list[str]:
        """Sentences about the plain model that explain the rows."""
        notes = []
        if self.draws:
            notes.append(
                f"Random layers ({listed(self.draws, 6)}): the plain model was given the pipeline's random draws, by "
                "seed, step, micro-batch and layer. By itself it draws other numbers."
            )
        if not self.draws_match:
            notes.append(
                "The plain model draws random numbers more or less often than the layers of the pipeline, so that it "
                "cannot be given the same draws."
            )
        if self.mixes:
            notes.append(
                f"On the whole mini-batch the plain model gives other numbers ({self.at_once:.0e}): in layer "
                f"{self.mixes!r} a batch norm sees one micro-batch at a time, as in any training with micro-batches."
            )
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
