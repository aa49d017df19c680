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
        form: of the inputs; "" on a rank that was given none.
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


def check_run(
    everyone: Sequence[CallSummary], firsts: Sequence[int], lasts: Sequence[int], call: Call, ranks: Ranks
) -> None:
    """Check that all ranks make a call with the same mini-batch, in the same modes.

    Args:
        everyone: the summary of each rank's call.
        firsts, lasts: the ranks of the first and the last stage of each replica, which need the mini-batch.
        call: of this rank.
        ranks: the processes.

    Raises:
        RankError: a rank refuses its arguments.
        RuntimeError: the ranks make different calls, or are in different modes.
        InputError: a rank needs a mini-batch and was given none, or two were given different ones.
    """
    check_calls(everyone)
    needed = [(rank, "runs the first stage") for rank in firsts]
    for rank, what in (*needed, *((rank, "runs the last stage") for rank in lasts)):
        if not everyone[rank].form and not (rank in lasts and everyone[rank].target):
            raise InputError(f"rank {rank} {what} and was given no mini-batch")
    with_target = next((rank for rank, summary in enumerate(everyone) if summary.target), None)
    without = next((rank for rank in lasts if not everyone[rank].target), None)
    if with_target is not None and without is not None:
        raise InputError(
            f"rank {without} runs the last stage and was given no target, and rank {with_target} was: pass the same "
            "target= on all ranks"
        )
    for field, what in (("form", "mini-batch"), ("values", "mini-batch"), ("target", "target")):
        values = {
            rank: getattr(summary, field) for rank, summary in enumerate(everyone) if getattr(summary, field)
        }
        first = next(iter(values), 0)
        if other := next((rank for rank in values if values[rank] != values[first]), 0):
            mine = call.target if field == "target" else (call.args, call.kwargs)
            texts = [text[:_MOST_SHOWN] for text in ranks.gather(str(forms([mine])))]
            difference = f"{texts[other]} in place of {texts[first]} (shape, strides, dtype, requires_grad)"
            raise InputError(
                f"rank {other} was given another {what} than rank {first}: "
                f"{difference if texts[other] != texts[first] else 'it has other values'}. All ranks that are given "
                "one get the same, in the same order: seed what shuffles the data alike on every rank"
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
