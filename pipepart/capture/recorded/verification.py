"""Compares a replay of a recording with the model, and reports the first call that differs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...autograd.own_copy import own_copy, tensors
from .gradients import Gradients, differing_gradient, projected_gradients
from .placing import at, home, is_parted, together
from .python_state.snapshot import Snapshot
from .python_state.surroundings import Surroundings
from .recording.interception import called_whole
from .recording.opening import Opening
from .recording.session import untouched
from .refusal import CaptureError
from .replay.calls import Call
from .replay.comparing import changed
from .replay.given import Env
from .replay.layers import replayed
from .replay.outputs import same_outputs
from .replay.recording import Recording

CHANGES = (
    "a counter, a clock, a generator of random numbers or a mode that the forward sets. Move that code into a module "
    "of its own, which is called as it is, or compute it before the step and pass it as an argument"
)
_ELSE = 'layers=[...] says which modules stay whole; verify="never" trains without this check'


def verify(run: Runs, again: Callable[[], Recording], known_way: bool) -> None:
    """Compare outputs and gradients of a replay with those of the model, from the same random states.

    What they return is compared bit for bit on the CPU; elsewhere kernels may add in any order. The gradients are those
    of a random projection of it. A model whose layers are on several devices is not called: what it returned while it
    was recorded takes the place of its output.

    Args:
        run: runs of the model and of its recording.
        again: records the model with the same arguments once more, to find out what changes from forward to forward.
        known_way: whether a recording with the same calls was compared with the model. Then what the model returned
            while it was recorded takes the place of its output, too.

    Raises:
        CaptureError: they differ.
    """
    parted = is_parted(run.on)
    if parted and run.recording.result is None:
        return
    if parted or known_way:
        found = run.replay()
        if run.same(run.recording.result, found):
            return
    if parted:
        expected = run.recording.result
    else:
        run.differentiate()
        found, expected = run.replay(), run.model()
        if run.same(expected, found):
            run.check_left()
            run.check_gradients()
            return
    why = changed(run.recording, again(), CHANGES)
    # A model that is parted over devices cannot be called.
    why = why or ("" if parted else _first_difference(run)) or f"They differ now and then: {CHANGES}"
    raise CaptureError(
        f"a replay of {type(run.on).__name__} gives other numbers than the model. {why}. {_ELSE}"
    )


class _Seen(NamedTuple):
    """One call of a whole module in a forward."""

    path: str
    given: list[Tensor]
    returned: list[Tensor]


class Runs:
    """Runs a model and its recording on copies of the same arguments, without changing the model.

    Args:
        model: the user's.
        recording: of a forward with these arguments.
        args, kwargs: the arguments.
        opening: which modules are whole.
        surroundings: what the model's code uses beside what the model holds.
    """

    def __init__(
        self,
        model: nn.Module,
        recording: Recording,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        opening: Opening,
        surroundings: Surroundings,
    ) -> None:
        self.on, self.recording, self._given = model, recording, (args, kwargs)
        self._opening, self._surroundings = opening, surroundings
        self._exactly = all(device.type == "cpu" for device in recording.devices)
        self._left_by_model: set[tuple[str, Any]] | None = None
        self._left_by_replay: set[tuple[str, Any]] = set()
        self._grad = torch.is_grad_enabled() and recording.hooks
        self._of_model: Gradients | None = None
        self._of_replay: Gradients | None = None
        self._differentiates = False

    def same(self, one: Any, other: Any) -> bool:
        return same_outputs(one, other, self._exactly)

    def _untouched(self) -> AbstractContextManager[Snapshot]:
        return untouched(self.on, self._surroundings.holders(module for _, module in self._opening.opened()))

    def kind(self, path: str) -> str:
        return type(self.on.get_submodule(path)).__name__

    def model(self) -> Any:
        with torch.set_grad_enabled(self._grad), self._untouched() as before:
            args, kwargs = own_copy(self._given)
            result = self.on(*args, **kwargs)
            self._of_model = self._gradients(result)
            result = pytree.tree_map_only(Tensor, Tensor.detach, result)
            self._left_by_model = {(found.holder.label, found.key) for found in before.differences()}
            return result

    def model_with_gradients(self, seen: list[_Seen] | None = None) -> Any:
        """Run the model with gradients enabled between its whole modules, as in the recording."""
        with (
            self._untouched(),
            called_whole(_CallNotes(self._opening.whole, seen), self._opening.whole),
        ):
            args, kwargs = own_copy(self._given)
            return self.on(*args, **kwargs)

    def replay(self, seen: list[_Seen] | None = None) -> Any:
        """Replay each call on the device of its module or arguments."""
        recording = self.recording

        def called(call: Call) -> Callable[..., Any]:
            module = self.on.get_submodule(call.module) if call.module else None
            device = None if module is None else home(module)

            def placed(*args: Any, **kwargs: Any) -> Any:
                args, kwargs = together(args, kwargs) if device is None else at(device, args, kwargs)
                if module is None or seen is None:
                    return (call.func if module is None else module)(*args, **kwargs)
                given = _kept((args, kwargs))
                result = module(*args, **kwargs)
                seen.append(_Seen(call.module, given, _kept(result)))
                return result

            return placed

        with torch.set_grad_enabled(self._grad), self._untouched() as before:
            passed = dict(zip(recording.inputs, tensors(own_copy(self._given)), strict=True))
            env: Env = {}
            values: Sequence[Tensor] = [passed[number] for number in recording.parts[0].takes]
            for part in recording.parts:
                env = replayed(recording, part, values, called, self.on.get_submodule, None)
                values = [env[number] for number in part.gives]
            if recording.loss is not None:
                values = [env[number] for number in recording.end.takes]
                values += [passed[number] for number in recording.end_inputs]
                env = replayed(recording, recording.end, values, called, self.on.get_submodule, None)
            self._left_by_replay = {(found.holder.label, found.key) for found in before.differences()}
            result = recording.completed(env)
            self._of_replay = self._gradients(result)
            return pytree.tree_map_only(Tensor, Tensor.detach, result)

    def differentiate(self) -> None:
        """Compute gradients in later runs, if gradients are enabled."""
        self._grad = self._differentiates = torch.is_grad_enabled()

    def _gradients(self, result: Any) -> Gradients | None:
        return projected_gradients(result, self.on) if self._differentiates else None

    def check_gradients(self) -> None:
        """Check that model and replay have the same gradients, up to rounding.

        Raises:
            CaptureError: they differ.
        """
        if found := differing_gradient(self._of_model, self._of_replay):
            name, share = found
            raise CaptureError(
                f"a replay of {type(self.on).__name__} gives another gradient of {name!r} than the model, by "
                f"{share:.0%}, though both return the same. The code between modules does something to gradients that "
                f"a replay does not see, such as a hook on grad_fn: move it into a module of its own. {_ELSE}"
            )

    def check_left(self) -> None:
        """Check that the replay leaves no value changed that the model's forward restores.

        Raises:
            CaptureError: it does.
        """
        if self._left_by_model is None:
            return
        for label, key in sorted(self._left_by_replay - self._left_by_model, key=str):
            raise CaptureError(
                f"the forward of {type(self.on).__name__} puts {label}.{key} back after its modules have changed it; a "
                "replay would not. Pass it as an argument, or keep both in one module, which is called as it is"
            )


class _CallNotes:
    """Takes the calls of whole modules in a forward, in place of a recorder.

    Args:
        whole: their paths.
        seen: where each call is noted; None to note nothing.
    """

    def __init__(self, whole: Mapping[nn.Module, str], seen: list[_Seen] | None) -> None:
        self._whole, self._seen = whole, seen
        self._inside = False
        self._thread = threading.get_ident()

    @property
    def here(self) -> bool:
        return not self._inside and threading.get_ident() == self._thread

    def module(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = [] if self._seen is None else _kept((args, kwargs))
        self._inside = True
        try:
            with torch.no_grad():
                result = call(module, *args, **kwargs)
        finally:
            self._inside = False
        if self._seen is not None:
            self._seen.append(_Seen(self._whole[module], given, _kept(result)))
        return result


def _first_difference(run: Runs) -> str:
    """Run the model and the replay again, and name the first whole module that gets or gives other values."""
    of_model: list[_Seen] = []
    of_replay: list[_Seen] = []
    expected, found = run.model_with_gradients(of_model), run.replay(of_replay)
    lines = [call.line for call in run.recording.calls if call.module]
    before = "before the first module"
    for line, one, other in zip(lines, of_model, of_replay, strict=False):
        kind = run.kind(one.path)
        where = f"module {one.path!r} ({kind}), called at {line}"
        if one.path != other.path:
            return f"The model calls {one.path!r} where the replay calls {other.path!r}: {CHANGES}"
        if what := _difference(one.given, other.given, run):
            return (
                f"The first difference is what {where}, is given: {what}. The code {before} depends on something "
                f"that a replay does not see: {CHANGES}"
            )
        if what := _difference(one.returned, other.returned, run):
            return (
                f"The first difference is what {where}, returns from equal arguments: {what}. It depends on something "
                "that the code between modules sets around the call, such as a mode, a global or a context variable: "
                "pass it as an argument, or keep both in one module, which is called as it is"
            )
        before = f"after {one.path!r}"
    if what := _difference(tensors(expected), tensors(found), run):
        return (
            f"All modules return equal values; the output differs: {what}. The code {before} depends on something "
            f"that a replay does not see: {CHANGES}"
        )
    return ""


def _difference(expected: Sequence[Tensor], found: Sequence[Tensor], run: Runs) -> str:
    """Describe the first tensor that differs; empty if none does."""
    if len(expected) != len(found):
        return f"{len(expected)} tensors in the model, {len(found)} in the replay"
    for one, other in zip(expected, found, strict=True):
        if run.same(one, other):
            continue
        kinds = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (one, other)]
        if kinds[0] != kinds[1]:
            return f"{kinds[0]} in the model, {kinds[1]} in the replay"
        if not one.is_floating_point():
            return f"{kinds[0]}"
        largest = (one.double() - other.to(one.device).double()).abs().max().item()
        return f"{kinds[0]}, largest difference {largest:.2g}"
    return ""


def _kept(value: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors(value)]
