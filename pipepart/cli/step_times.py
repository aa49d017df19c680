"""Times training steps of a plain model and of its pipeline, alternating between them."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..capture import own_loss
from ..data.arguments import Arguments, call
from ..data.split import batch_size, micro_batches_of
from ..pipeline import Pipeline
from ..planning import Plan
from ..profiling.progress import progress_bar
from ..reporting import BenchResult
from ..runtime.observe.trace import Trace
from .model import Loaded

_WARM_UP = 2


def time_steps(loaded: Loaded, plan: Plan, steps: int, **options: Any) -> tuple[BenchResult, Trace]:
    """Run steps of the plain model and the pipeline in turn, so that other load slows both.

    Args:
        loaded: the model, its mini-batch, target and loss. Its gradients and buffers change.
        plan: of the model.
        steps: of each kind, after two that warm up.
        options: keywords of the pipeline.

    Returns:
        The median seconds, and the pipeline's steps without those that warm up.
    """
    sample, first, model = Arguments.of(loaded.sample), plan.workers[0], type(loaded.model).__name__
    device = torch.device(first.torch_device or "cpu")
    plain = _plain_step(loaded, device)
    with (
        Pipeline(loaded.model, plan, loss_fn=loaded.loss_fn, **options) as pipe,
        progress_bar(None, f"timing {model}", after=1.0) as done,
        pipe.trace() as trace,
    ):

        def pipelined() -> None:
            pipe.step(*sample.args, target=loaded.target, **sample.kwargs)
            pipe.zero_grad()

        ways: dict[str, Callable[[], None]] = {
            "plain": lambda: plain(1),
            "micro_batched": lambda: plain(plan.micro_batches),
            "pipeline": pipelined,
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for index in range(_WARM_UP + steps):
            done(index / (_WARM_UP + steps))
            for name, step in list(ways.items()):
                threads = None if name == "pipeline" else first.threads
                try:
                    seconds[name].append(_timed(step, device, threads))
                except torch.OutOfMemoryError:
                    if name == "pipeline":
                        raise
                    del ways[name], seconds[name]
    medians = {name: statistics.median(times[_WARM_UP:]) for name, times in seconds.items()}
    result = BenchResult(
        model=model,
        samples=batch_size(sample, loaded.target),
        steps=steps,
        device=first.name,
        plain_seconds=medians.get("plain"),
        micro_batched_seconds=medians.get("micro_batched"),
        pipeline_seconds=medians["pipeline"],
        plan=plan,
    )
    return result, Trace(plan, trace.steps[_WARM_UP:])


def _plain_step(loaded: Loaded, device: torch.device) -> Callable[[int], None]:
    """Return a function that trains a copy of the model on one device, the mini-batch in a number of parts."""
    model, loss_fn = copy.deepcopy((loaded.model, loaded.loss_fn))
    model.to(device)
    if isinstance(loss_fn, torch.nn.Module):
        loss_fn.to(device)
    sample = Arguments.of(loaded.sample)
    args, kwargs, target = pytree.tree_map_only(
        Tensor, lambda tensor: tensor.to(device), (sample.args, sample.kwargs, loaded.target)
    )

    def step(parts: int) -> None:
        model.zero_grad(set_to_none=True)
        batch = micro_batches_of(Arguments(*args, **kwargs).input, target, parts)
        for value, part in zip(batch.inputs, batch.targets, strict=True):
            output = call(model, value)
            targets = () if part is None else (part,)
            loss = own_loss(output) if loss_fn is None else loss_fn(output, *targets)
            loss.backward()

    return step


def _timed(step: Callable[[], None], device: torch.device, threads: int | None) -> float:
    """Seconds of a step, with as many threads for each operation; None for those of this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
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
