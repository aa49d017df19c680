"""Action: one step of one device, and its text form."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class ScheduleError(ValueError):
    """The schedule cannot be built, read or run; the message names the action or the numbers."""


class Kind(StrEnum):
    """What an action does; the values are the letters of torch.distributed.pipelining."""

    F = "F"  # forward
    B = "B"  # full backward: I and W in one
    I = "I"  # backward for the inputs  # noqa: E741
    W = "W"  # backward for the weights
    OVERLAP_F_B = "OVERLAP_F_B"  # one forward and one backward side by side
    RECOMPUTE = "RECOMPUTE"  # forward once more, to rebuild what the backward needs
    OFFLOAD = "OFFLOAD"  # the copy to the host, begun when the forward ended, is done; the stash is freed
    RELOAD = "RELOAD"  # the copy back begins; the backward waits for it
    REDUCE_GRAD = "REDUCE_GRAD"  # sum a stage's gradients over its replicas
    OPT_STEP = "OPT_STEP"  # optimizer step of a stage


BACKWARDS = frozenset({Kind.B, Kind.I, Kind.W})
HOST_COPIES = frozenset({Kind.OFFLOAD, Kind.RELOAD})
_WITHOUT_MICRO_BATCH = frozenset({Kind.REDUCE_GRAD, Kind.OPT_STEP})

_NUMBER = r"(0|[1-9][0-9]*)"
_KINDS = "|".join(kind.value for kind in Kind if kind is not Kind.OVERLAP_F_B)
_ACTION = re.compile(rf"{_NUMBER}({_KINDS}){_NUMBER}?")
_OVERLAP = re.compile(rf"\(([^();]*);([^();]*)\){Kind.OVERLAP_F_B.value}")


class Action(NamedTuple):
    """One step of one device.

    `stage` and `micro_batch` count from 0. REDUCE_GRAD has no micro-batch; OPT_STEP names the last
    micro-batch whose gradient it applies, or none when it applies them all. OVERLAP_F_B has stage -1, no
    micro-batch, and its forward and its backward in `parts`: build it with `overlap`.

    >>> str(Action(Kind.F, 3, 5))
    '3F5'
    >>> Action.parse("3F5") == Action(Kind.F, 3, 5)
    True
    """

    kind: Kind
    stage: int
    micro_batch: int | None = None
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        number = "" if self.micro_batch is None else self.micro_batch
        return f"{self.stage}{self.kind.value}{number}"

    @property
    def leaves(self) -> tuple[Action, ...]:
        """The parts of the action: forward and backward if it is overlapped, else only the action itself."""
        return self.parts or (self,)

    @staticmethod
    def overlap(forward: Action, backward: Action) -> Action:
        """Return the action that runs `forward` and `backward` side by side."""
        return Action(Kind.OVERLAP_F_B, -1, None, (forward, backward))

    @staticmethod
    def parse(text: str) -> Action:
        """Return the action that prints as `text`.

        Raises ScheduleError unless the whole of `text` is one action: nothing may precede or follow it.
        """
        if overlapped := _OVERLAP.fullmatch(text):
            forward, backward = map(Action.parse, overlapped.groups())
            return Action.overlap(forward, backward)
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is no action: expected stage, kind, micro-batch as in '2F0' or '3B1'"
            )
        stage, kind, micro_batch = match.groups()
        if micro_batch is None and Kind(kind) not in _WITHOUT_MICRO_BATCH:
            raise ScheduleError(f"{text!r} names no micro-batch: write it last, as in '{text}0'")
        if micro_batch is not None and Kind(kind) is Kind.REDUCE_GRAD:
            raise ScheduleError(
                f"{text!r}: gradients are reduced once for all micro-batches; write '{stage}{kind}'"
            )
        return Action(Kind(kind), int(stage), None if micro_batch is None else int(micro_batch))


def forward(stage: int, micro_batch: int) -> Action:
    """Return the forward of a micro-batch on a stage."""
    return Action(Kind.F, stage, micro_batch)


def backward(stage: int, micro_batch: int) -> Action:
    """Return the full backward of a micro-batch on a stage."""
    return Action(Kind.B, stage, micro_batch)


def backward_input(stage: int, micro_batch: int) -> Action:
    """Return the backward for the inputs of a micro-batch on a stage."""
    return Action(Kind.I, stage, micro_batch)


def backward_weight(stage: int, micro_batch: int) -> Action:
    """Return the backward for the weights of a micro-batch on a stage."""
    return Action(Kind.W, stage, micro_batch)
