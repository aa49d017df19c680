"""CallSummary: the method, inputs, modes and seed of one rank's call, compared across ranks before it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from ..input_error import InputError
from ..ranks import RankError, Ranks
from .agreed import Call
from .mini_batches import shown

T = TypeVar("T")


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


def attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None, str]:
    """Return the result of ``work``, or its error and the text for the other ranks, "" for none."""
    try:
        return work(), None, ""
    except Exception as error:
        return None, error, f"{type(error).__name__}: {error}"


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
    with_target = next((rank for rank, one in enumerate(everyone) if one.target), None)
    without = next((rank for rank in lasts if not everyone[rank].target), None)
    if with_target is not None and without is not None:
        raise InputError(
            f"rank {without} runs the last stage and was given no target, and rank {with_target} was: pass the same "
            "target= on all ranks"
        )
    for field, what in (("form", "mini-batches"), ("values", "mini-batches"), ("target", "targets")):
        given = {rank: getattr(one, field) for rank, one in enumerate(everyone) if getattr(one, field)}
        if len(set(given.values())) > 1:
            mine = call.target if field == "target" else (*call.args, *call.kwargs.items())
            raise InputError(
                f"the ranks were given {what} that differ: {_difference(given, field, ranks.gather(shown(mine)))}. All "
                "ranks that are given one get the same, in the same order: seed what shuffles the data alike on every "
                "rank"
            )
    for rank, one in enumerate(everyone):
        if one.state != everyone[0].state:
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
    for rank, one in enumerate(everyone):
        if one.refusal:
            raise RankError(f"rank {rank} refuses {one.call}: {one.refusal}")
    for rank, one in enumerate(everyone):
        if one[:2] != first[:2]:
            raise RuntimeError(
                f"rank {rank} calls {one.call} (call {one.number}) while rank 0 calls {first.call} (call "
                f"{first.number}): all ranks make the same calls with the same options in the same order"
            )


def _difference(given: dict[int, str], field: str, texts: Sequence[str]) -> str:
    """Say which ranks were given what.

    Args:
        given: a digest, by rank.
        field: of :class:`CallSummary`, whose digests these are.
        texts: what each rank was given, in words.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for rank, found in given.items():
        groups.setdefault((found, texts[rank]), []).append(str(rank))
    if len({text for _, text in groups}) > 1:
        return "; ".join(f"{text} on rank {', '.join(members)}" for (_, text), members in groups.items())
    what = "the model calls other functions" if field == "form" else "other values"
    return f"{what} on rank {' than on rank '.join(', '.join(members) for members in groups.values())}"
