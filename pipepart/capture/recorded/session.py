"""Runs a model under a recorder; opens modules or leaves them whole until the recording can be replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...autograd.own_copy import own_copy, tensors
from ..restore import draws_restored, restored
from .calls import autocast_now
from .interception import called_whole, patched_functions
from .opening import Opening
from .placing import is_on_meta, to_meta
from .recorder import Recorder
from .recording import Recording
from .refusal import CaptureError, LeftAsideError, SkeletonError
from .skeleton import Change, Watched, innermost


def record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], opening: Opening) -> Recording:
    """Record one forward. Modules are opened or left whole until it can be replayed.

    Raises:
        CaptureError: it cannot be replayed however modules are opened.
        Exception: whatever the model raises.
    """
    tracking = False
    while True:
        try:
            return _recorded(model, args, kwargs, opening, tracking)
        except LeftAsideError as error:
            why = str(error)
            if error.culprit is None and not tracking:
                tracking = True
            elif (error.culprit is not None and opening.open(error.culprit, why)) or opening.close(
                innermost(error, opening.opened()), why
            ):
                tracking = False
            else:
                raise
        except SkeletonError as error:
            culprit = error.culprit if error.culprit is not None else innermost(error, opening.opened())
            if not opening.close(culprit, str(error)):
                raise


def _recorded(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], opening: Opening, tracking: bool
) -> Recording:
    with untouched(model):
        with draws_restored(model):
            run = _run(model, args, kwargs, opening, tracking)
        if run.changes:
            run = _settled(run, _run(model, args, kwargs, opening, tracking))
    recorder = run.recorder
    devices = {tensor.device for tensor in (*run.inputs, *model.parameters(), *model.buffers())}
    return Recording(
        calls=recorder.calls,
        inputs=[recorder.number(tensor) for tensor in run.inputs],
        state=recorder.state,
        constants=recorder.constants,
        output=run.output,
        output_spec=run.spec,
        joined=recorder.joined(run.output),
        autocast=autocast_now(),
        devices=frozenset(devices),
        result=pytree.tree_map_only(Tensor, Tensor.detach, run.result),
        scalars=frozenset(recorder.number(t) for t in tensors(run.result) if t.numel() == 1 and t.dim() == 0),
    )


def _settled(first: _Run, second: _Run) -> _Run:
    """Return the forward to keep of two in a row, of which the first has changed attributes.

    What only the first one changes is set up once. A tensor that is set aside in each is harmless if none reads what
    the one before has left.

    Raises:
        SkeletonError: the forwards depend on each other, or change more than that.
    """
    for change in second.changes:
        if change.tensor is None:
            raise change.refused()
    read = {id(tensor) for tensor in second.recorder.constants.values()}
    names = [[call.name for call in run.recorder.calls] for run in (first, second)]
    for change in first.changes:
        if change.tensor is None:
            continue
        again = any(one.module is change.module and one.name == change.name for one in second.changes)
        if again and (id(change.tensor) in read or names[0] != names[1]):
            raise change.refused("reads again what it has set as")
        if id(change.tensor) in read and first.recorder.varies(change.tensor):
            raise change.refused("reads again what it has set as")
    return second


class _Run(NamedTuple):
    """One forward under a recorder: its inputs and result, the latter with refs too, and what it has changed."""

    recorder: Recorder
    inputs: list[Tensor]
    result: Any
    output: list[Any]
    spec: Any
    changes: list[Change]


def _check_not_compiled(opening: Opening) -> None:
    """Check that no module whose forward is recorded is compiled.

    Raises:
        CaptureError: one is.
    """
    for path, module in opening.opened():
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
            raise CaptureError(
                f"{f'module {path!r}' if path else 'the model'} is compiled by torch.compile, whose graphs cannot be "
                "cut: pass the model as it was before. Pipeline(..., compile=True) compiles the layers of each stage"
            )


def _run(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], opening: Opening, tracking: bool
) -> _Run:
    _check_not_compiled(opening)
    values = tensors((args, kwargs))
    args, kwargs = own_copy((args, kwargs), to_meta if is_on_meta(model) else Tensor.clone)
    paths = {id(tensor): path for path, tensor in [*model.named_buffers(), *model.named_parameters()]}
    recorder = Recorder(paths, _held(model), opening.whole, tracking)
    inputs = list(tensors((args, kwargs)))
    for tensor, value in zip(inputs, values, strict=True):
        number = recorder.input(tensor)
        if tensor.is_meta and not value.is_meta:
            recorder.values[number] = value
    watched = Watched(opening.opened())
    with called_whole(recorder, model, opening.whole), patched_functions(recorder), recorder:
        result = model(*args, **kwargs)
    output, spec = recorder.output(result)
    return _Run(recorder, inputs, result, output, spec, watched.changes())


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Run the model on copies of its buffers within the block; afterwards it is as it was, random states included."""
    with restored(model):
        copies: dict[Tensor, Tensor] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(buffer, buffer.clone())
        yield


def _held(model: nn.Module) -> dict[int, str]:
    """Return where the model keeps attributes that are neither parameters nor buffers, by ids, tensors in them too."""
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            found[id(value)] = f"{path}.{name}"
            for leaf in pytree.tree_leaves(value) if isinstance(value, tuple | list | dict) else ():
                found[id(leaf)] = f"{path}.{name}"
    return found
