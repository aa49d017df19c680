"""CallSummary: the method, inputs, modes and seed of one rank's call, compared across ranks before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..input_error import InputError
from ..ranks import RankError, Ranks
from .mini_batches import forms
from .single_process import Call

_MOST_SHOWN = 300  # characters


class CallSummary(NamedTuple):
    """The call that one rank is about to run.

    Attributes:
        call: the method.
        number: how often the pipeline was called before.
        refusal: of the arguments, if the rank refuses them.
        form: of the inputs.
        values: a digest of some numbers of the inputs, and of the target; "" where there is none.
        target: the same of the target.
        state: of the parameters and modes of the model that decide which gradients there are.
        seed: of the rank's random numbers.
    """

    call: str
    number: int
    refusal: str = ""
    form: str = ""
    values: str = ""
    target: str = ""
    state: str = ""
    seed: int = 0


def check_run(everyone: Sequence[CallSummary], call: Call, ranks: Ranks) -> None:
    """Check that all ranks make a call with the same mini-batch, in the same modes; ``call`` is this rank's.

    Raises:
        RankError, RuntimeError: as :func:`check_calls`; or the ranks are in different modes.
        InputError: two were given different mini-batches.
    """
    check_calls(everyone)
    for field, what in (("form", "mini-batch"), ("values", "mini-batch"), ("target", "target")):
        values = [getattr(summary, field) for summary in everyone]
        if other := next((rank for rank, value in enumerate(values) if value != values[0]), 0):
            mine = call.target if field == "target" else (call.args, call.kwargs)
            texts = [text[:_MOST_SHOWN] for text in ranks.gather(str(forms([mine])))]
            difference = f"{texts[other]} in place of {texts[0]} (shape, strides, dtype, requires_grad)"
            raise InputError(
                f"rank {other} was given another {what} than rank 0: "
                f"{difference if texts[other] != texts[0] else 'it has other values'}. All ranks are given the same, "
                "in the same order: seed what shuffles the data alike on every rank"
            )
    for rank, summary in enumerate(everyone):
        if summary.state != everyone[0].state:
            raise RuntimeError(
                f"the model of rank {rank} is in another mode than that of rank 0, or other parameters are frozen, "
                "or gradients or autocast are set differently: set them alike on all ranks"
            )


def check_calls(everyone: Sequence[CallSummary]) -> None:
    """Check that all ranks make the same call, and none has rejected its arguments.

    Raises:
        RankError: one has.
        RuntimeError: the ranks make different calls.
    """
    first = everyone[0]
    for rank, summary in enumerate(everyone):
        if summary.refusal:
            raise RankError(f"rank {rank} refuses {summary.call}: {summary.refusal}")
    for rank, summary in enumerate(everyone):
        if summary[:2] != first[:2]:
            raise RuntimeError(
                f"rank {rank} calls {summary.call} (call {summary.number}) while rank 0 calls {first.call} (call "
                f"{first.number}): all ranks make the same calls with the same options in the same order"
            )
