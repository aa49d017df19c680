"""Compares a replay of a recording with the model: what they return, and the gradients of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...autograd.own_copy import own_copy, tensors
from .gradients import Gradients, differing_gradient, projected_gradients
from .placing import at, home, is_parted, together
from .python_state.values import Holder
from .recording.session import untouched
from .refusal import CaptureError
from .replay.comparing import CHANGES, changed
from .replay.given import Arguments
from .replay.layers import BoundCall, finish
from .replay.outputs import same_outputs
from .replay.recording import Recording

_ELSE = (
    "pipepart.check names the first module that differs; layers=[...] says which modules stay whole; "
    'verify="never" trains without this check'
)


class _Run(NamedTuple):
    """What a forward returned, detached, and the gradients of a random projection of it, if gradients are compared."""

    result: Any
    gradients: Gradients | None


def verify(
    model: nn.Module,
    layers: Sequence[nn.Module],
    recording: Recording,
    arguments: Arguments,
    holders: Callable[[], Iterable[Holder]],
    again: Callable[[], Recording],
    known_way: bool,
) -> None:
    """Compare outputs and gradients of a replay with those of the model, from the same random states.

    What they return is compared bit for bit on the CPU; elsewhere kernels may add in any order. A model whose layers
    are on several devices is not called: what it returned while it was recorded takes the place of its output.

    Args:
        model: the user's.
        layers: of the chain.
        recording: of a forward with these arguments.
        given: the arguments.
        holders: returns what the model's code uses beside what the model holds.
        again: records the model with the same arguments once more, to find out what changes from forward to forward.
        known_way: whether a recording with the same calls was compared with the model. Then what the model returned
            while it was recorded takes the place of its output, too.

    Raises:
        CaptureError: they differ.
    """
    exactly = all(device.type == "cpu" for device in recording.devices)
    kind, parted = type(model).__name__, is_parted(model)

    def run(forward: Callable[..., Any], gradients: bool) -> _Run:
        grad = torch.is_grad_enabled() and (gradients or recording.hooks)
        with torch.set_grad_enabled(grad), untouched(model, holders()):
            args, kwargs = own_copy(arguments)
            result = forward(*args, **kwargs)
            projected = projected_gradients(result, model) if gradients and grad else None
            return _Run(pytree.tree_map_only(Tensor, Tensor.detach, result), projected)

    def replay(*args: Any, **kwargs: Any) -> Any:
        live, rest = BoundCall.of(recording, tensors((args, kwargs)))
        value: Any = live
        for layer in layers:  # on the device of its stage, or where its tensors are
            value = layer(together(at(home(layer), value)))
        return value if recording.loss is None else finish(*together((value, rest)))

    if parted or known_way:
        recorded = recording.result
        if recorded is None or same_outputs(recorded, run(replay, gradients=False).result, exactly):
            return
    if not parted:
        ours, theirs = run(replay, gradients=True), run(model, gradients=True)
        if same_outputs(theirs.result, ours.result, exactly):
            if differs := differing_gradient(theirs.gradients, ours.gradients):
                raise CaptureError(
                    f"a replay of {kind} gives another gradient of {differs[0]!r} than the model, by {differs[1]:.0%}, "
                    "though both return the same. The code between modules does something to gradients that a replay "
                    f"does not see, such as a hook on grad_fn: move it into a module of its own. {_ELSE}"
                )
            return
    why = (
        changed(recording.calls, again().calls)
        or f"The code between modules depends on what a replay does not see: {CHANGES}"
    )
    raise CaptureError(f"a replay of {kind} gives other numbers than the model. {why}. {_ELSE}")
