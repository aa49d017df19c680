"""What a check has found: one row a schedule and dtype, and what is known of the plain model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..document import Document, Value

# 0 is bit for bit; infinite where one side has a number that the other has not.
RelativeError = Annotated[float, Field(ge=0)]


class DifferentNumbers(AssertionError):
    """A pipeline does not give the numbers of the plain model; the message names schedule, layer and reason."""


class CheckRow(Value):
    """One schedule in one dtype, after all steps.

    Attributes:
        schedule, recompute, stages: the pipeline that was tried.
        dtype: of the numbers.
        losses, gradients, parameters, buffers: the largest relative error of any step against the plain model run on
            the same micro-batches in order; 0 is bit for bit. None where there is nothing to compare.
        mini_batch: the same of losses and gradients against the loss of all outputs together, which knows no weights
            of micro-batches. Of a model that computes its own loss, against the mini-batch at once; None where its
            layers draw or mix samples, or the user splits the mini-batch.
        tolerance: what is allowed.
        layer: the first layer that differs, in the order of execution for outputs and buffers, in that of the
            backward for gradients; ``"loss"`` for the loss, empty where all is the same bit for bit.
        kind: its class.
        what: of it differs.
        why: it may.
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
    layer: str = ""
    kind: str = ""
    what: str = ""
    why: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing differs by more than is allowed."""
        return self.largest <= self.tolerance

    @property
    def same(self) -> bool:
        """Whether all is bit for bit that of the plain model in the same micro-batches."""
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
        """The row in a sentence."""
        again = "" if self.recompute == "never" else f", recompute {self.recompute}"
        named = f"{self.schedule} in {self.dtype}{again}"
        if not self.layer:
            return f"{named}: the same"
        return f"{named}: {self.place} is the first to differ, in {self.what}: {self.why}"


class PlainFacts(Value):
    """What was seen of the plain model in one dtype.

    Attributes:
        dtype: of the numbers.
        repeats: whether a second plain run gave the same bits; else ``unsteady`` names the first layer that differed.
        at_once: relative error of loss and gradients with the mini-batch as one micro-batch, against micro-batches.
        mixes: the first layer whose output for a sample then differs; empty if none does.
        draws: layers that drew random numbers.
        remembers: layers with attributes in Python that a step has changed, as ``"2.count"``.
    """

    dtype: str
    repeats: bool
    unsteady: str = ""
    at_once: RelativeError
    mixes: str = ""
    draws: tuple[str, ...] = ()
    remembers: tuple[str, ...] = ()


class CheckReport(Document):
    """What :func:`pipepart.check` has found.

    Attributes:
        model: its class.
        devices: names.
        samples, micro_batches: of the mini-batch.
        steps: that were trained.
        optimizer: that trained.
        seed: of the first step.
        rows: one a schedule, recompute mode and dtype.
        plain: one a dtype.
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
        """Whether no row differs by more than is allowed."""
        return all(row.ok for row in self.rows)

    def raise_if_different(self) -> None:
        """Does nothing where all is the same.

        Raises:
            DifferentNumbers: a row differs by more than is allowed.
        """
        if not self.ok:
            raise DifferentNumbers("\n".join(row.text for row in self.rows if not row.ok))
