"""CallSync: agrees on a call before it runs, so that an error on one rank is raised on all.

::

    rank 0   parts of the mini-batch ┐
    rank 1   parts, or an error      ┴ exchange: same call and shapes? ─▶ run; an error anywhere: all raise
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeVar, cast

import torch
from torch import nn

from ..data.split import MicroBatches
from ..input_error import InputError
from ..ranks import Ranks, attempt
from ..runtime.replay.randomness import RngKeys
from ..workers.modes import Modes
from .call_summary import CallSummary, check_calls, check_run
from .mini_batches import digest, forms, values
from .single_process import Agreed, Call

T = TypeVar("T")


class CallSync:
    """Synchronizes the begins of the calls of one pipeline between its ranks.

    Args:
        lasts: the ranks of the last stage of each replica.
        strict: whether values of mini-batches are compared, and not their shapes alone.
    """

    def __init__(self, ranks: Ranks, model: nn.Module, lasts: Sequence[int], strict: bool) -> None:
        self._ranks = ranks
        self._lasts = lasts
        self._model, self._strict = model, strict
        self._calls = 0

    def begin(self, call: Call) -> Agreed:
        """Check that all ranks make the same call, and return its micro-batches. If any refuses, nothing has run.

        Raises:
            TypeError, ValueError: of this rank's arguments.
            RankError, RuntimeError, InputError: as :func:`check_run`.
        """
        batch, refusal, why = attempt(partial(_split, call))
        target = () if call.target is None else (forms([call.target]), self._strict and values(call.target))
        mine = CallSummary(
            call.name + call.options,
            self._calls,
            why,
            "" if batch is None else digest(forms(batch.inputs)),
            "" if batch is None or not self._strict else digest(values((call.args, call.kwargs))),
            digest(target) if target else "",
            self._state(),
            RngKeys().seed,
        )
        everyone = self._exchange(mine, call.name, refusal)
        check_run(everyone, call, self._ranks)
        assert batch is not None
        self._begun(call.name)
        whole = call.name, mine.form, tuple(summary.state for summary in everyone)
        return Agreed(batch, whole, everyone[0].seed, self._calls - 1)

    def meet(self, call: str, work: Callable[[], T]) -> T:
        """Check that all ranks make a call without a mini-batch, and return the result of ``work`` on this rank.

        Args:
            call: the name of the method, with the arguments that are the same on all ranks.
            work: its part that needs no other rank. It runs before the ranks agree.

        Raises:
            Exception: what ``work`` raises on this rank; a RankError on the others.
            RuntimeError: the ranks make different calls.
        """
        result, refusal, why = attempt(work)
        check_calls(self._exchange(CallSummary(call, self._calls, why), call, refusal))
        return cast(T, result)

    def begin_backward(self, call: str, form: str, check: Callable[[], None]) -> Hashable:
        """Check as :meth:`meet` that all ranks make a backward; return the layouts of gradients of all last stages."""
        _, refusal, why = attempt(check)
        everyone = self._exchange(CallSummary(call, self._calls, why, form), call, refusal)
        check_calls(everyone)
        self._begun(call)
        return tuple(everyone[rank].form for rank in self._lasts)

    def _exchange(self, mine: CallSummary, call: str, refusal: Exception | None) -> list[CallSummary]:
        """Return the summaries of all ranks; raise ``refusal`` if there is one, once all have it."""
        self._calls += 1
        self._ranks.place = f"the begin of {call}"
        everyone = [CallSummary(*fields) for fields in self._ranks.exchange(mine)]
        if refusal is not None:
            raise refusal
        return everyone

    def _begun(self, call: str) -> None:
        self._ranks.midway, self._ranks.place = True, f"the end of {call}"

    def _state(self) -> str:
        flags = bytearray()
        for module in self._model.modules():
            flags.append(module.training)
            flags += bytes(
                parameter.requires_grad for parameter in module._parameters.values() if parameter is not None
            )
        return digest((bytes(flags), torch.is_grad_enabled(), Modes.current().autocast))


def _split(call: Call) -> MicroBatches:
    if not (call.args or call.kwargs):
        raise InputError(
            f"{call.name} was given no mini-batch: pass the same one on all ranks. On ranks with neither the first nor "
            "the last stage tensors of the same shapes do, as nothing there reads their values"
        )
    return call.split()
