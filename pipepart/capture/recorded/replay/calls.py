"""Call: a recorded call of a torch function or module, with its arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ....autograd.own_copy import tensors
from ..refusal import CaptureError
from .given import DeviceRule, Env, Given, Ref, same_value

Autocast = tuple[tuple[str, bool, torch.dtype], ...]  # for each kind of device

HOOKS = frozenset(("register_hook", "register_post_accumulate_grad_hook", "retain_grad"))


@dataclass(slots=True, eq=False)
class Call:
    """One call of a recording.

    Attributes:
        func: the function or module.
        given: its arguments.
        outs: what it returned, leaf by leaf: refs for tensors, other values as they were.
        spec: how the leaves were nested; None for one tensor.
        new: the numbers that the call made, unlike those of tensors that it was given and returned.
        writes: the numbers of tensors that it wrote in place.
        grad: whether gradients were enabled.
        autocast: as it was.
        module: path of the module in the user's model; empty for a function.
        line: of the user's code.
        draws: whether it draws random numbers.
        asked: whether what it reads must be the same at each replay.
        shapes: of tensors that it returned, by their numbers, where the model has read the size.
    """

    func: Callable[..., Any]
    given: Given
    outs: tuple[Any, ...]
    spec: Any
    new: frozenset[int]
    writes: frozenset[int]
    grad: bool
    autocast: Autocast
    module: str = ""
    line: str = ""
    draws: bool = False
    asked: bool = True
    shapes: Mapping[int, torch.Size] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the function or the path of the module."""
        return self.module or getattr(self.func, "__name__", repr(self.func))

    def __str__(self) -> str:
        """Return one line, such as ``%4 = blocks.0(%3)  # model.py:12``."""
        arguments = ", ".join(map(as_text, self.given.leaves))
        notes = [self.line, "" if self.grad else "no gradients", "writes" if self.writes else ""]
        return f"{', '.join(map(as_text, self.outs))} = {self.name}({arguments})  # {', '.join(filter(None, notes))}"

    @property
    def made(self) -> set[int]:
        """The numbers of the tensors that it returned."""
        return {out.number for out in self.outs if type(out) is Ref}

    @property
    def acts(self) -> bool:
        """True if the call may do more than compute what it returns."""
        return bool(self.module or self.writes or self.name in HOOKS)

    @property
    def reads(self) -> bool:
        """True if the call returned no tensor: the model has read a value from its arguments."""
        return not (self.acts or self.made)

    def run(self, env: Env, func: Callable[..., Any], ambient: Autocast, device: DeviceRule | None) -> None:
        """Run the call again, and store its results in ``env``.

        Raises:
            CaptureError: it returned other values than when it was recorded.
        """
        args, kwargs = self.given.filled(env, device)
        try:
            if self.autocast == ambient and (self.grad or not torch.is_grad_enabled()):
                result = func(*args, **kwargs)
            else:
                with self._modes(ambient):
                    result = func(*args, **kwargs)
        except RuntimeError:
            if self.reads and any(tensor.is_meta for tensor in tensors((args, kwargs))):
                return  # the recording was made from real arguments, of which it was asked
            raise
        if self.spec is None:
            env[self.outs[0].number] = result
            self._check_shapes(env)
            return
        leaves = pytree.tree_leaves(result)
        if len(leaves) != len(self.outs):
            raise CaptureError(f"{self._where()} returned another structure than when the model was recorded")
        for out, leaf in zip(self.outs, leaves, strict=True):
            if type(out) is Ref:
                env[out.number] = leaf
            elif self.asked and not same_value(out, leaf):
                raise self._other(leaf, out)
        self._check_shapes(env)

    def _check_shapes(self, env: Env) -> None:
        if self.shapes and not torch.compiler.is_compiling():
            for number, shape in self.shapes.items():
                if env[number].shape != shape:
                    raise self._other(list(env[number].shape), list(shape))

    def _other(self, now: Any, was: Any) -> CaptureError:
        return CaptureError(
            f"{self._where()} gave {now!r:.60}, and {was!r:.60} when the model was recorded: "
            "the code that follows may take another branch. Keep the module that reads it whole, layers=[...], "
            "or move the code that reads into a module of its own, or compute with tensors (torch.where)"
        )

    def _modes(self, ambient: Autocast) -> ExitStack:
        stack = ExitStack()
        if not self.grad:
            stack.enter_context(torch.no_grad())
        if self.autocast != ambient:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        return stack

    def _where(self) -> str:
        return f"module {self.module!r}" if self.module else f"{self.name}() at {self.line}"


def autocast_now() -> Autocast:
    """Return the present autocast state of the CPU and the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def as_text(leaf: Any) -> str:
    """Format an argument or a result for the text of a recording."""
    return f"%{leaf.number}" if isinstance(leaf, Ref) else f"{leaf!r:.40}"


def is_plain_function(call: Call) -> bool:
    """Return True for a pure function: it computes new tensors or values from its arguments alone."""
    return not (call.module or call.draws or call.writes or isinstance(call.func, nn.Module))
