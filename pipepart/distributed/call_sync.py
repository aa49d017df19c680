"""CallSync: agrees on a call before it runs, so that an error on one rank is raised on all.

::

    rank 0   parts of the mini-batch ┐
    rank 1   parts, or an error      ├ exchange: same call and shapes? ─▶ run; an error anywhere: all raise
    rank 2   given no mini-batch     ┘

A rank that was given no mini-batch runs with tensors of the same shapes on the meta device. Its stages do not read
them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..data.split import MicroBatches
from ..input_error import InputError
from ..ranks import RankError, Ranks, attempt
from ..runtime.replay.randomness import RngKeys
from ..workers.modes import Modes
from .call_summary import CallSummary, check_calls, check_run
from .mini_batches import digest, forms, on_meta, values
from .single_process import Agreed, Call

T = TypeVar("T")


class CallSync:
    """Synchronizes the begins of the calls of one pipeline between its ranks.

    Args:
        ranks: the processes.
        model: the user's.
        firsts, lasts: the ranks of the first and the last stage of each replica, which need the mini-batch.
        strict: whether values of mini-batches are compared, and not their shapes alone.
    """

    def __init__(
        self, ranks: Ranks, model: nn.Module, firsts: Sequence[int], lasts: Sequence[int], strict: bool
    ) -> None:
        self._ranks = ranks
        self._firsts, self._lasts = firsts, lasts
        self._model, self._strict = model, strict
        self._calls = 0

    def begin(self, call: Call) -> Agreed:
        """Check that all ranks make the same call, and return its micro-batches.

        Raises:
            TypeError, ValueError: of this rank's arguments; nothing has run on any rank.
            RankError: another rank refuses its arguments, or is lost.
            RuntimeError: the ranks make different calls.
        """
        is_given = bool(call.args or call.kwargs)
        batch, refusal, why = attempt(call.split) if is_given else (None, None, "")
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
        check_run(everyone, self._firsts, self._lasts, call, self._ranks)
        form = next(summary.form for summary in everyone if summary.form)
        if batch is None or not all(summary.form for summary in everyone):
            batch = self._everywhere(batch, everyone, call)
        self._begun(call.name)
        whole = call.name, form, tuple(summary.state for summary in everyone)
        return Agreed(batch, whole, everyone[0].seed, self._calls - 1)

    def meet(self, call: str, work: Callable[[], T]) -> T:
        """Check that all ranks make a call without a mini-batch, and return the result of ``work`` on this rank.

        Args:
            call: the name of the method, with the arguments that are the same on all ranks.
            work: its part that needs no other rank. It runs before the ranks agree.

        Raises:
            Exception: what ``work`` raises on this rank.
            RankError: it raises on another rank, or that is lost.
            RuntimeError: the ranks make different calls.
        """
        result, refusal, why = attempt(work)
        check_calls(self._exchange(CallSummary(call, self._calls, why), call, refusal))
        return cast(T, result)

    def begin_backward(self, call: str, form: str, check: Callable[[], None]) -> Hashable:
        """Check that all ranks make a backward; return ``form``, the layout of the gradients, of all last stages.

        Raises:
            Exception: what ``check`` raises on this rank.
            RankError, RuntimeError: as :meth:`meet`.
        """
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

    def _everywhere(
        self, batch: MicroBatches | None, everyone: Sequence[CallSummary], call: Call
    ) -> MicroBatches:
        """Return the micro-batches of this rank, which are made on the meta device if it was given no mini-batch.

        Raises:
            RankError: that fails on another rank.
            ValueError: a rank would run the model in another way than those with a mini-batch.
        """
        source = next(rank for rank, summary in enumerate(everyone) if summary.form)
        shapes = None
        if self._ranks.rank == source:
            shapes = pytree.tree_map_only(Tensor, on_meta, (call.args, call.kwargs))
        args, kwargs = self._ranks.gather(shapes)[source]
        outcome, failure, why = attempt(lambda: batch or call._replace(args=args, kwargs=kwargs).split())
        mine = why, outcome and digest(forms(outcome.inputs))
        for rank, (other, form) in enumerate(self._ranks.gather(mine)):
            if failure is not None:
                raise failure
            if other:
                raise RankError(f"rank {rank} cannot run without the values of the mini-batch: {other}")
            if form != everyone[source].form:
                raise InputError(
                    f"on rank {rank}, which was given no mini-batch, the model calls other functions than on the ranks "
                    "that were: give the mini-batch to all ranks"
                )
        assert outcome is not None
        return outcome
