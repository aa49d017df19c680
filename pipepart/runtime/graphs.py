"""Layers that run together by replaying what they launched once, instead of going through their Python again.

::

    message ──copy──▶ static input ──replay──▶ static output ──copy──▶ message for the next stage     F
    gradient ─copy──▶ static gradient ─replay─▶ gradient of the input, copied; of weights, added      B

What is recorded reads and writes the same memory each time, so it holds one micro-batch. A stage that has several in
flight needs as many recordings, *slots*: one is taken at a forward and comes back at the backward, and where none is
free another is recorded. Schedules with fewer micro-batches in flight need fewer.

Only the shape that came first in a mode is recorded, in the run behind the one where it came: that one warmed up what
kernels make at their first call. Everything else goes through Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .regions import Together
from .slots import GraphRecorder, Slot

_PLAIN = (bool, int, float, str, type(None))


class _Mode(NamedTuple):
    """What a recording holds for, apart from shapes."""

    training: tuple[bool, ...]
    grad: bool
    autocast: torch.dtype | None


class _Shape(NamedTuple):
    """What a message must be for a recording to take it in."""

    nest: Any
    items: Sequence[Any]

    @classmethod
    def of(cls, nest: Any, items: Sequence[Any]) -> _Shape | None:
        """None for what no recording takes in."""
        described = []
        for item in items:
            if type(item) is Tensor and item.layout is torch.strided:
                described.append((item.shape, item.stride(), item.dtype, item.device, item.requires_grad))
            elif isinstance(item, _PLAIN):
                described.append((type(item), item))
            else:
                return None
        return cls(nest, described)


class Graphed:
    """Some layers of a stage, recorded and replayed. Used by the stage's worker alone.

    Args:
        run: runs them.
        modules: the layers.
        recorder: records what they launch.
    """

    def __init__(self, run: Together, modules: Sequence[nn.Module], recorder: GraphRecorder) -> None:
        self._run = run
        self._modules = modules
        self._parts = [part for module in modules for part in module.modules()]
        self._training: tuple[bool, ...] = ()
        self._recorder = recorder
        self._parameters: list[nn.Parameter] = []
        self._memory: Sequence[Any] = ()
        self._shapes: dict[_Mode, _Shape] = {}
        self._warm: set[_Mode] = set()
        self._free: dict[_Mode, deque[Slot]] = {}

    def begin(self) -> None:
        """What came in the last run is warm now; what layers have been given other memory is recorded anew."""
        self._run.begin()
        self._warm.update(self._shapes)
        self._training = tuple(part.training for part in self._parts)
        self._parameters = list(dict.fromkeys(p for module in self._modules for p in module.parameters()))
        buffers = (buffer for module in self._modules for buffer in module.buffers())
        memory = [(t.data_ptr(), t.shape, t.stride(), t.requires_grad) for t in (*self._parameters, *buffers)]
        if memory != self._memory:
            self._memory = memory
            self._free = {}  # slots that are still taken come back to where nobody looks

    def __call__(self, value: Any) -> Any:
        items, nest = pytree.tree_flatten(value)
        shape = None if torch.is_inference_mode_enabled() else _Shape.of(nest, items)
        mode = self._mode()
        if shape is None or self._shapes.setdefault(mode, shape) != shape or mode not in self._warm:
            return self._run(value)
        free = self._free.setdefault(mode, deque())
        slot = free.pop() if free else Slot(self._run, value, self._parameters, self._recorder)
        given = [item for item in items if isinstance(item, Tensor)]
        made = _Replay.apply(_Lease(slot, free), len(given), *given, *slot.trained)
        return slot.output_with(made)

    def _mode(self) -> _Mode:
        kind = self._recorder.device.type
        return _Mode(
            self._training,
            torch.is_grad_enabled(),
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        )


class _Lease:
    """A slot that is taken by one micro-batch, until its backward is done or nobody waits for that any more."""

    def __init__(self, slot: Slot, free: deque[Slot]) -> None:
        self.slot = slot
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.slot)


class _Replay(torch.autograd.Function):
    """The node that stands for the layers in the graph: autograd adds the gradients that it returns to the weights'."""

    @staticmethod
    def forward(ctx: Any, lease: _Lease, inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.lease = lease
        made = lease.slot.forward(tensors[:inputs])
        wanting = zip(made, lease.slot.wanting, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, wants in wanting if not wants))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        lease: _Lease | None = ctx.lease
        if lease is None:
            raise RuntimeError("backward through a recorded stage a second time: its memory is in use again")
        ctx.lease = None
        return (None, None, *lease.slot.backward(gradients))
