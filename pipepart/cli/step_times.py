"""Times training steps of a plain model and of its pipeline, alternating between them."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..capture import own_loss
from ..data.arguments import Arguments, call
from ..data.split import micro_batches_of
from ..pipeline import Pipeline
from ..planning import Plan
from ..profiling.progress import progress_bar
from ..runtime.observe.trace import Trace
from .model import Given

_WARM_UP = 2


class StepTimes(NamedTuple):
    """Median seconds of a forward and backward of the mini-batch.

    Attributes:
        plain: of the model on one device like the pipeline's first, the mini-batch as a whole; None if that does not
            fit its memory.
        micro_batched: the same, one micro-batch after the other; None likewise.
        pipeline: of the pipeline.
        trace: the pipeline's steps, without those that warm up.
    """

    plain: float | None
    micro_batched: float | None
    pipeline: float
    trace: Trace


def time_steps(
    given: Given, loss_fn: Callable[..., Tensor] | None, plan: Plan, steps: int, **options: Any
) -> StepTimes:
    """Run steps of the plain model and the pipeline alternately, so that other load slows both.

    Args:
        given: the model, its mini-batch and the target. Its gradients and buffers change.
        loss_fn: the loss; None for a model that returns it.
        plan: of the model.
        steps: of each, after two that warm up.
        options: keywords of the pipeline.
    """
    sample, first = Arguments.of(given.sample), plan.workers[0]
    device = torch.device(first.torch_device or "cpu")
    plain = _Plain(*copy.deepcopy((given.model, loss_fn)), sample.input, given.target, device)
    ways = {1: first.threads, plan.micro_batches: first.threads}
    with (
        Pipeline(given.model, plan, loss_fn=loss_fn, **options) as pipe,
        progress_bar(None, f"timing {type(given.model).__name__}", after=1.0) as done,
    ):

        def pipelined() -> None:
            pipe.step(*sample.args, target=given.target, **sample.kwargs)
            pipe.zero_grad()

        def one_round() -> dict[int, float]:
            """Seconds of a step in 1 part, in several, and (0) of the pipeline."""
            found = {}
            for parts, threads in list(ways.items()):
                try:
                    found[parts] = _timed(lambda parts=parts: plain.step(parts), device, threads)
                except torch.OutOfMemoryError:
                    del ways[parts]
            return {**found, 0: _timed(pipelined, device, None)}

        for index in range(_WARM_UP):
            done(index / (_WARM_UP + steps))
            one_round()
        rounds = []
        with pipe.trace() as trace:
            for index in range(steps):
                done((_WARM_UP + index) / (_WARM_UP + steps))
                rounds.append(one_round())

    def median(parts: int) -> float | None:
        seconds = [each[parts] for each in rounds if parts in each]
        return statistics.median(seconds) if seconds else None

    return StepTimes(median(1), median(plan.micro_batches), median(0) or 0.0, trace)


class _Plain:
    """A copy of the model on one device, trained without a pipeline."""

    def __init__(self, model: nn.Module, loss_fn: Any, value: Any, target: Any, device: torch.device) -> None:
        self._model, self._loss_fn = model.to(device), loss_fn
        if isinstance(loss_fn, nn.Module):
            loss_fn.to(device)
        self._value, self._target = (_moved(each, device) for each in (value, target))

    def step(self, parts: int) -> None:
        """Run forward and backward of the mini-batch, in as many parts."""
        self._model.zero_grad(set_to_none=True)
        batch = micro_batches_of(self._value, self._target, parts)
        for value, target in zip(batch.inputs, batch.targets, strict=True):
            output = call(self._model, value)
            if self._loss_fn is None:
                loss = own_loss(output)
            else:
                loss = self._loss_fn(output) if target is None else self._loss_fn(output, target)
            loss.backward()


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Arguments):
        args, kwargs = _moved((value.args, value.kwargs), device)
        return Arguments(*args, **kwargs)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def _timed(step: Callable[[], None], device: torch.device, threads: int | None) -> float:
    """Seconds of a step, with as many threads for each operation; None for those of this process."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        _wait_for(device)
        start = time.perf_counter()
        step()
        _wait_for(device)
        return time.perf_counter() - start
    finally:
        torch.set_num_threads(before)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
