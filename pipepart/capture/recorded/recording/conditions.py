"""Checks, at each recorded call, that the code between modules does nothing that a replay cannot repeat."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence, Set
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..refusal import SkeletonError, line_of_user
from ..replay.calls import HOOKS
from .tables import is_fixed, modules_in

_ASSIGNED = ("data", "grad", "requires_grad")
_IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__")
_NODE_HOOKS = ("register_hook", "register_prehook")
_OWN = __name__.partition(".")[0] + "."
_MOVE = "Move that code into a module of its own, which is called as it is"


class Conditions:
    """Checks of one recording.

    Args:
        paths: path of each parameter and buffer of the model, by its id.
        model: the user's.
    """

    def __init__(self, paths: Mapping[int, str], model: nn.Module) -> None:
        self._storages = {
            p.untyped_storage()._cdata: paths[id(p)] for p in model.parameters() if p.layout is torch.strided
        }
        self._draws = _draws()
        self._modes = _modes()

    def check_modes(self, name: str) -> None:
        """Check that a call is made in the modes of the forward as a whole.

        Raises:
            SkeletonError: the code around it has entered one that may change numbers, which a replay would not enter.
        """
        if _modes() != self._modes:
            raise SkeletonError(
                f"{name} is called at {line_of_user()} in a mode that the forward enters (sdpa_kernel, "
                f"saved_tensors_hooks), and a replay would not. Enter it around the step. {_MOVE}"
            )

    def check_function(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        """Check a function of torch before it is called.

        Raises:
            SkeletonError: it changes a parameter, draws from a generator, or is a hook that keeps something of this
                forward.
        """
        if name in HOOKS and not all(is_fixed(argument) for argument in args):
            raise SkeletonError(
                f"{name}() at {line_of_user()} is given a function that holds on to a tensor or an object of this "
                "forward: a replay would call it with that of the forward that was recorded. Put the hook on the "
                "module, or move that code into a module of its own"
            )
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise SkeletonError(
                f"{name}() at {line_of_user()} draws from a generator, which another micro-batch may do between. "
                f"Draw without one. {_MOVE}"
            )
        target = args[0] if args else None
        assigned = getattr(func.__self__, "__name__", "") if name == "__set__" else ""
        written = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        for tensor in (target if written or assigned in _ASSIGNED else None, kwargs.get("out")):
            if isinstance(tensor, Tensor) and (path := self._storages.get(_storage(tensor))):
                raise SkeletonError(
                    f"{assigned or name}{'' if assigned else '()'} at {line_of_user()} changes the parameter {path!r} "
                    f"in the forward, where stages work on several micro-batches at the same time. {_MOVE}, or do it "
                    "between the steps"
                )

    def check_metadata(self, name: str, names: Set[str], reader: FrameType) -> None:
        """Check what the code between modules may do with an attribute of a tensor.

        Args:
            name: of the attribute.
            names: all that this code names.
            reader: the frame that reads it.

        Raises:
            SkeletonError: it may hook the node of the graph that made the tensor, which no recorded call shows.
        """
        if name != "grad_fn" or names.isdisjoint(_NODE_HOOKS):
            return
        if not reader.f_globals.get("__name__", "").startswith(_OWN):
            raise SkeletonError(
                f"grad_fn is read at {line_of_user()} in code that registers hooks: a replay has another graph, where "
                "a hook on this node would not be called. Hook the tensor, by tensor.register_hook(...), or the "
                f"module. {_MOVE}"
            )

    def check_custom(self, name: str, arguments: Sequence[Any], whole: Mapping[nn.Module, str]) -> None:
        """Check the arguments of a custom autograd function.

        Raises:
            SkeletonError: it would call a module, or a function that holds on to something of this forward.
        """
        for value in arguments:
            if called := [whole[module] for module in modules_in(value) if module in whole]:
                why = f"calls module {called[0]!r}, whose stage would not know: use torch.utils.checkpoint"
            elif not is_fixed(value):
                why = (
                    "holds on to a tensor or an object of this forward: a replay would call it with that of the "
                    "forward that was recorded"
                )
            else:
                continue
            raise SkeletonError(f"{name}() at {line_of_user()} is given a function that {why}. {_MOVE}")

    def check_draws(self, where: str) -> None:
        """Check that no number was drawn from Python's ``random`` or numpy, and no seed set, since the last module.

        Raises:
            SkeletonError: something was.
        """
        if _draws() != self._draws:
            raise SkeletonError(
                f"random numbers of Python's random or of numpy are drawn, or a seed is set, {where}, between modules "
                "that are recorded: a replay would not do so again. Draw with torch, or in a module of its own"
            )

    def note_draws(self) -> None:
        """Store the states of the generators after a module, which may draw random numbers."""
        self._draws = _draws()


def _modes() -> tuple[Any, ...]:
    """Return the modes that may change what functions compute, apart from those that are stored with each call.

    The hooks of torch itself, of checkpoints and of ``save_on_cpu``, leave values as they are.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    kernels = torch.backends.cuda
    return (
        None if hooks is None or hooks[0].__module__.startswith("torch.") else hooks,
        kernels.math_sdp_enabled(),
        kernels.flash_sdp_enabled(),
        kernels.mem_efficient_sdp_enabled(),
        kernels.cudnn_sdp_enabled(),
    )


def _draws() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return torch.initial_seed(), random.getstate(), kind, keys.tobytes(), *rest  # type: ignore[union-attr]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
