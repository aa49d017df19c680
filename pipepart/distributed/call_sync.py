"""CallSync: exchanges summaries of a call before it runs and the loss after it; errors are raised on all ranks.

::

    rank 0   parts of the mini-batch ┐                 ┌ same call and shapes?  ─▶ run ┐              ┌ loss, factor
    rank 1   parts, or an error      ├ begin: exchange ┤                                ├ end: exchange┤
    rank 2   given no mini-batch     ┘                 └ an error anywhere: all raise   ┘              └ losses added

A rank that was given no mini-batch runs with tensors of the same shapes on the meta device. Its stages do not read
them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..autograd import graph_cut
from ..capture import Live, Recording
from ..data.split import MicroBatches
from ..input_error import InputError
from ..loss import LossError
from ..ranks import RankError, Ranks
from ..runtime.replay.randomness import RngKeys
from ..runtime.sinks import LossSink, Share
from ..runtime.transport.wire import buffers_for, pack, unpack
from ..workers.modes import Modes
from .agreed import Agreed, Call
from .call_summary import CallSummary, check_calls, check_refusals, check_run
from .mini_batches import Shape, digest, forms, values
from .overflow import overflows
from .sketches import are_close, sketches

T = TypeVar("T")


class CallSync:
    """Synchronizes the calls of one pipeline between its ranks.

    Args:
        ranks: the processes.
        model: the user's.
        firsts, lasts: the ranks of the first and the last stage of each replica, which need the mini-batch.
        strict: whether values of mini-batches are compared, and not their shapes alone.
    """

    def __init__(
        self, ranks: Ranks, model: nn.Module, firsts: Sequence[int], lasts: Sequence[int], strict: bool
    ) -> None:
        self.ranks = ranks
        self.first, self.last = firsts[0], lasts[0]
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
        batch, refusal = None, None
        if call.args or call.kwargs:
            try:
                batch = call.split()
            except Exception as error:
                refusal = error
        mine = CallSummary(
            call.name + call.options,
            self._calls,
            _as_text(refusal),
            "" if batch is None else digest(forms(batch.inputs)),
            "" if batch is None or not self._strict else digest(values((call.args, call.kwargs))),
            ""
            if call.target is None
            else digest((forms([call.target]), self._strict and values(call.target))),
            self._state(),
            RngKeys().seed,
        )
        everyone = self._exchange(mine, call.name)
        if refusal is not None:
            raise refusal
        check_run(everyone, self._firsts, self._lasts, call, self.ranks)
        form = next(one.form for one in everyone if one.form)
        if batch is None or not all(one.form for one in everyone):
            args, kwargs = self._shapes((call.args, call.kwargs), everyone)
            batch = self._everywhere(batch, form, call._replace(args=args, kwargs=kwargs))
        self.ranks.midway, self.ranks.place = True, f"the end of {call.name}"
        whole = call.name, form, tuple(one.state for one in everyone)
        return Agreed(batch, whole, everyone[0].seed, self._calls - 1)

    def begin_backward(
        self, call: str, gradients: Sequence[Tensor | None], check: Callable[[], None]
    ) -> Hashable:
        """Synchronize a backward; the gradients of the output come from the ranks of the last stage.

        Args:
            call: which one.
            gradients: of the output on this rank; those of all ranks are the same, but for rounding.
            check: raises if it cannot run.

        Returns:
            The layout of the gradients, which decides with the forward what the messages look like.

        Raises:
            RankError: another rank refuses it, or is lost.
            RuntimeError: the ranks make different calls, or ``check`` raises.
            ValueError: the gradients of a rank are others than those of the last stage's.
        """
        refusal = None
        try:
            check()
        except Exception as error:
            refusal = error
        form = digest(forms(gradients))
        mine = CallSummary(call, self._calls, _as_text(refusal), form, gradients=sketches(gradients))
        everyone = self._exchange(mine, call)
        if refusal is not None:
            raise refusal
        check_refusals(everyone)
        check_calls(everyone)
        for rank, one in enumerate(everyone):
            if not are_close(one.gradients, everyone[self.last].gradients):
                raise InputError(
                    f"rank {rank} goes backward from another gradient of the output than rank {self.last}, whose "
                    "stage is the last: every rank computes the same loss, of the whole output that pipe(x) returns"
                )
        self.ranks.midway, self.ranks.place = True, f"the end of {call}"
        return tuple(everyone[rank].form for rank in self._lasts)

    def share_overflow(self, gradients: Sequence[Tensor]) -> None:
        """Write an infinity into the gradients of this rank if those of another rank are not finite.

        Raises:
            RankError: another rank has failed in the backward, or is lost.
        """
        overflow = overflows(gradients)
        if any(self.ranks.gather(overflow)) and gradients and not overflow:
            gradients[0].view(-1)[:1] = float("inf")

    def end_backward(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs on every rank; they come from the rank of the first stage.

        Raises:
            RankError: another rank has failed in the backward, or is lost.
        """
        found = self.from_one(self.first, lambda: gradients)
        self.ranks.midway = False
        return found

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
        result, refusal = None, None
        try:
            result = work()
        except Exception as error:
            refusal = error
        everyone = self._exchange(CallSummary(call, self._calls, _as_text(refusal)), call)
        if refusal is not None:
            raise refusal
        check_calls(everyone)
        check_refusals(everyone)
        return cast(T, result)

    def _exchange(self, mine: CallSummary, call: str) -> list[CallSummary]:
        self._calls += 1
        self.ranks.place = f"the begin of {call}"
        return [CallSummary(*one) for one in self.ranks.exchange(mine)]

    def end(self, sink: LossSink, keys: RngKeys, scaled: Sequence[Tensor] = ()) -> None:
        """Send the loss of the mini-batch, the factor of its gradients and the auxiliary losses to every rank.

        Args:
            sink: of this rank.
            keys: the random numbers of the call; the generators advance on all ranks if a layer of any drew.
            scaled: gradients that may overflow. If those of any rank do, those of every rank get an infinity: so all
                scalers skip the step alike.

        Raises:
            LossError: on all ranks, if the loss of the mini-batch does not reduce.
            RankError: another rank has failed or is lost.
        """
        overflow = overflows(scaled)
        refusal = self._share_taken(sink)
        share = sink.share(is_last=self.ranks.rank == self.last).as_plain()
        found = self.ranks.exchange((share, keys.drawn, overflow))
        self.ranks.midway = False
        shares = [Share.from_plain(share) for share, *_ in found]
        keys.drawn = any(drawn for _, drawn, _ in found)
        keys.finish()
        if refusal := refusal or shares[self.last].refusal:
            raise LossError(refusal)
        if scaled and not overflow and any(one for *_, one in found):
            scaled[0].view(-1)[:1] = float("inf")
        sink.adopt(shares, self.last)

    def _share_taken(self, sink: LossSink) -> str:
        """Give every rank the losses of the micro-batches of all replicas; return why they do not fit, if so."""
        if len(self._lasts) == 1:
            return ""
        try:
            for taken in self.ranks.gather(sink.taken()):
                sink.adopt_taken(taken)
        except LossError as error:
            return str(error)
        return ""

    def collect(self, made: list[Any], inputs: Sequence[Any], always: bool = False) -> None:
        """Collect the results of all replicas, such as outputs, on every rank.

        Args:
            made: by micro-batch; None or an empty tuple where another rank has made it.
            inputs: of the micro-batches.
            always: with one replica as well; otherwise nothing is done there.
        """
        if len(self._lasts) == 1 and not always:
            return
        everyone = self.ranks.gather([one is not None and type(one) is not tuple for one in made])
        for index, given in enumerate(inputs):
            source = next((rank for rank, has in enumerate(everyone) if has[index]), None)
            if source is not None:
                recording = given.recording if isinstance(given, Live) else None
                made[index] = self.from_one(source, lambda index=index: made[index], recording)

    def from_one(self, source: int, make: Callable[[], Any], recording: Recording | None = None) -> Any:
        """Return the result of one rank, such as the output of the last stage, on every rank.

        Args:
            source: the rank that makes it.
            make: makes a nest of tensors and plain values.
            recording: that live values belong to, if it is them that it makes.

        Raises:
            Exception: what ``make`` raises, on that rank.
            RankError: it has raised there, or another rank is lost.
        """
        is_source = self.ranks.rank == source
        made, buffers, failure, form = None, [], None, None
        if is_source:
            try:
                made = make()
                form, buffers = pack(graph_cut.move(made, torch.device("cpu")))
            except Exception as error:
                failure = error
        found, why = self.ranks.gather((form, failure and f"{type(failure).__name__}: {failure}"))[source]
        if failure is not None:
            raise failure
        if why:
            raise RankError(f"rank {source} failed: {why}")
        if not is_source:
            buffers = buffers_for(found)
        for buffer in buffers:
            if buffer.numel():
                self.ranks.broadcast(buffer, source)
        return made if is_source else unpack(found, buffers, recording)

    def _state(self) -> str:
        flags = bytearray()
        for module in self._model.modules():
            flags.append(module.training)
            flags += bytes(one.requires_grad for one in module._parameters.values() if one is not None)
        return digest((bytes(flags), torch.is_grad_enabled(), Modes.current().autocast))

    def _everywhere(self, batch: MicroBatches | None, form: str, call: Call) -> MicroBatches:
        """Return the micro-batches of this rank, which are made here if it was given no mini-batch.

        Raises:
            RankError: that fails on another rank.
            ValueError: a rank would run the model in another way than those with a mini-batch.
        """
        failure: Exception | None = None
        if batch is None:
            try:
                batch = call.split()
            except Exception as error:
                failure = error
        mine = failure and f"{type(failure).__name__}: {failure}", batch and digest(forms(batch.inputs))
        for rank, (why, own) in enumerate(self.ranks.gather(mine)):
            if failure is not None:
                raise failure
            if why:
                raise RankError(f"rank {rank} cannot run without the values of the mini-batch: {why}")
            if own != form:
                raise InputError(
                    f"on rank {rank}, which was given no mini-batch, the model calls other functions than on the ranks "
                    "that were: give the mini-batch to all ranks"
                )
        assert batch is not None
        return batch

    def _shapes(self, given: Any, everyone: Sequence[CallSummary]) -> tuple[Any, Any]:
        """Return the arguments of the call on the meta device, from the first rank that has them."""
        source = next(rank for rank, one in enumerate(everyone) if one.form)
        mine = None
        if self.ranks.rank == source:
            mine = pytree.tree_map_only(Tensor, Shape.of, given)
        found = self.ranks.gather(mine)[source]
        return pytree.tree_map_only(Shape, Shape.made, found)


def _as_text(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"
