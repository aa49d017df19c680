"""Records a model repeatedly, with more or fewer open modules, until the recording can be replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ....autograd.own_copy import own_copy, tensors
from ...restore import bindings_restored, draws_restored
from ..fake_parameters import Fakes, on_fakes
from ..python_state.snapshot import Snapshot
from ..python_state.surroundings import Surroundings
from ..python_state.values import Holder
from ..refusal import LAST_RESORT, CaptureError, LeftAsideError, SkeletonError
from ..replay.calls import autocast_now
from ..replay.comparing import changed
from ..replay.given import Arguments
from ..replay.joining import joined
from ..replay.recording import Recording
from .changes import REGISTER, RETURN, Change, Changes, innermost
from .conditions import Conditions
from .interception import routed
from .opening import Opening, is_compiled
from .recorder import Recorder


def record(
    model: nn.Module,
    arguments: Arguments,
    opening: Opening,
    surroundings: Surroundings,
    without_values: bool = False,
) -> Recording:
    """Record a forward, opening modules or making them whole until the recording can be replayed.

    Args:
        model, given: the model and the arguments that it is called with.
        opening: which modules are whole; changed until the forward can be recorded.
        surroundings: what the model's code uses beside what the model holds.
        without_values: record it on fake tensors.

    Raises:
        CaptureError: it cannot be replayed however modules are opened.
        Exception: whatever the model raises.
    """
    with on_fakes(model) if without_values else nullcontext() as fakes:
        return _recorded(model, arguments, opening, surroundings, fakes)


def _recorded(
    model: nn.Module,
    arguments: Arguments,
    opening: Opening,
    surroundings: Surroundings,
    fakes: Fakes | None,
) -> Recording:
    tracking = False
    while True:
        opened = dict(opening.opened())
        try:
            return _Session(model, arguments, opening, surroundings, fakes, tracking).recording()
        except LeftAsideError as error:
            why = str(error)
            if error.culprit is None and not tracking:
                tracking = True
            elif (error.culprit is not None and opening.open(error.culprit, why)) or opening.make_whole(
                innermost(error, opened), why
            ):
                tracking = False
            else:
                raise CaptureError(f"{error}. {LAST_RESORT}") from error
        except SkeletonError as error:
            culprit = error.culprit if error.culprit is not None else innermost(error, opened)
            if not opening.make_whole(culprit, str(error)):
                raise CaptureError(f"{error}. {LAST_RESORT}") from error


class _Run(NamedTuple):
    """One forward under a recorder: its inputs, its result, and the Python values that it has changed.

    Attributes:
        changes: outside of the calls of the modules that hold them.
        inside: by whole modules in their own calls.
        names: what the code between whole modules names.
        changing: paths of the whole modules that are called several times and change what they hold.
    """

    recorder: Recorder
    inputs: list[Tensor]
    result: Any
    output: list[Any]
    spec: Any
    changes: list[Change]
    inside: list[Change]
    names: set[str]
    changing: set[str]

    def uses(self, change: Change) -> bool:
        """Return True if a recorded call uses a tensor that was written or replaced."""
        was = change.difference.was, change.difference.holder.owner
        return any(
            constant is tensor for constant in self.recorder.tensors.constants.values() for tensor in was
        )

    def may_read(self, change: Change) -> bool:
        """Return True if the code between whole modules uses this value, or reads the attribute that it is in."""
        attribute, module = change.difference.attribute, change.difference.holder.root
        by_name = (module, attribute) in self.recorder.attributes
        return attribute in self.names or by_name or self.uses(change)


class _Session:
    """Forwards of a model with the same arguments, of which one becomes a recording."""

    def __init__(
        self,
        model: nn.Module,
        arguments: Arguments,
        opening: Opening,
        surroundings: Surroundings,
        fakes: Fakes | None,
        tracking: bool,
    ) -> None:
        self._model, self._given, self._opening = model, arguments, opening
        self._surroundings, self._fakes, self._tracking = surroundings, fakes, tracking

    def recording(self) -> Recording:
        """Record the model's forward, and record it again if the first forward initialized something.

        Raises:
            CaptureError: a replay would not repeat it.
        """
        _check_not_compiled(self._opening)
        run = self._run_settled()
        recorder, model = run.recorder, self._model
        devices = {tensor.device for tensor in (*run.inputs, *model.parameters(), *model.buffers())}
        originals = {} if self._fakes is None else self._fakes.originals()
        return Recording(
            calls=recorder.calls,
            inputs=[recorder.tensors.number(tensor) for tensor in run.inputs],
            state=recorder.tensors.state,
            constants={
                number: originals.get(held, held) for number, held in recorder.tensors.constants.items()
            },
            output=run.output,
            output_spec=run.spec,
            joined=joined(
                recorder.calls,
                recorder.aliases,
                recorder.tensors.state,
                run.output,
                [*({path} for path in run.changing), *recorder.inner_calls],
            ),
            autocast=autocast_now(),
            devices=frozenset(devices),
            result=pytree.tree_map_only(Tensor, Tensor.detach, run.result),
            attributes=[(*place, key) for place, key in recorder.attributes.items()],
            scalars=frozenset(
                recorder.tensors.number(t) for t in tensors(run.result) if t.numel() == 1 and t.dim() == 0
            ),
        )

    def _run_settled(self) -> _Run:
        """Run the model; if Python values change outside of whole modules, return the second of two runs in a row.

        Values that only the first one changes are set up once, if the code between whole modules holds them or several
        whole modules share them. An attribute that each run sets to a tensor is harmless if the second one reads it,
        and not what the first one has left there. What whole modules change in their own calls may only be read
        by them.

        Raises:
            SkeletonError: the second run changes anything else, depends on tensors of the first, or reads what whole
                modules change.
        """
        with untouched(self._model, self._holders()) as before:
            with draws_restored(self._model):
                first = self._run(before)
            if not (first.changes or first.changing or any(map(first.may_read, first.inside))):
                return first
            for change in first.changes:
                if change.of_whole and not change.by_whole:
                    raise change.refused()
            second = self._run_again()
            for change in second.changes:
                if change.tensor is None:
                    raise change.refused()
            for change in second.inside:
                if second.uses(change):
                    raise change.refused_outside()
            for change in first.changes:
                if change.is_state:
                    raise change.refused("registers", REGISTER)
            left = map(first.recorder.is_of_this_forward, second.recorder.tensors.constants.values())
            names = [[call.name for call in run.recorder.calls] for run in (first, second)]
            if any(left) or (second.changes and names[0] != names[1]):
                raise first.changes[0].refused("reads again what it has set as")
            read = [change for change in second.inside if second.may_read(change)]
            if read and changed(second.recorder.calls, self._run_again().recorder.calls):
                raise read[0].refused_outside()
        return second

    def _run_again(self) -> _Run:
        return self._run(Snapshot(self._model, self._holders()))

    def _run(self, before: Snapshot) -> _Run:
        model, opening = self._model, self._opening
        fakes = self._fakes
        args, kwargs = own_copy(self._given)
        if fakes is not None:
            args, kwargs = pytree.tree_map_only(Tensor, fakes.if_on_meta, (args, kwargs))
        paths = {id(tensor): path for path, tensor in [*model.named_buffers(), *model.named_parameters()]}
        changes = Changes(model, opening, self._surroundings, before)
        recorder = Recorder(
            paths,
            before.held(),
            opening.whole,
            dict(opening.opened()),
            self._tracking,
            Conditions(paths, model),
            changes,
        )
        inputs = list(tensors((args, kwargs)))
        for tensor in inputs:
            recorder.tensors.input(tensor)
        mode = nullcontext() if fakes is None else fakes.in_use()
        getters = [table for code in changes.codes for table in code.getters]
        with routed(recorder, opening.whole, opening.parts(), getters), mode, recorder:
            try:
                result = model(*args, **kwargs)
            except CaptureError:
                raise
            except Exception as error:
                error.add_note(
                    f"pipepart: in the forward of the model, called as {_call_text(model, *self._given)}"
                )
                raise
        for module, name in recorder.attributes:
            self._surroundings.follow(getattr(module, name, None))
        output, spec = recorder.output(result)
        differences = changes.all()
        for change in differences:
            if recorder.is_of_this_forward(change.difference.now) and changes.is_for_others(change):
                raise change.refused("leaves a value for others in", RETURN)
        counts = Counter(call.module for call in recorder.calls)
        changing = {path for path in changes.changing if counts[path] > 1}
        return _Run(
            recorder,
            inputs,
            result,
            output,
            spec,
            differences,
            changes.inside(),
            changes.names,
            changing,
        )

    def _holders(self) -> Iterator[Holder]:
        return self._surroundings.holders(module for _, module in self._opening.opened())


def _check_not_compiled(opening: Opening) -> None:
    """Check that no module whose forward is recorded is compiled.

    Raises:
        CaptureError: one is.
    """
    for path, module in opening.opened():
        if is_compiled(module):
            raise CaptureError(
                f"{f'module {path!r}' if path else 'the model'} is compiled by torch.compile, whose graphs cannot be "
                "cut: pass the model as it was before. Pipeline(..., compile=True) compiles the layers of each stage"
            )


@contextmanager
def untouched(model: nn.Module, around: Iterable[Holder] = ()) -> Iterator[Snapshot]:
    """Within the block, the model runs on copies of its buffers; afterwards restore it and the random states.

    Args:
        around: holders of what its code uses beside what it holds.
    """
    with draws_restored(model), bindings_restored(model):
        copies: dict[Tensor, Tensor] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(buffer, buffer.clone())
        before = Snapshot(model, around, copies=True)
        try:
            yield before
        finally:
            before.restore()


def _call_text(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describe a call of the model: shapes of tensors, lengths of containers."""

    def text(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, list | tuple | dict):
            return f"{type(value).__name__} of {len(value)}"
        return f"{value!r:.20}"

    named = [f"{name}={text(value)}" for name, value in kwargs.items()]
    return f"{type(model).__name__}({', '.join([*map(text, args), *named])})"
