"""Updates the running statistics of BatchNorm layers once a step, from the whole mini-batch.

Each micro-batch is normalised by its own statistics: a device has no other samples at that moment. The running
statistics, which evaluation uses, are updated once a step with the mean and variance of all samples. During the step
the layers do not track statistics; a hook on each layer sums up its inputs. A recomputed forward counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...input_error import InputError
from ...restoring import restoring
from ..stage import Stage

R = TypeVar("R")

_BatchNorm = nn.modules.batchnorm._BatchNorm


class DeferredBatchNorm:
    """The BatchNorm layers of a pipeline.

    Args:
        layers: of the model.
        stages: that they are in.

    Raises:
        ValueError: the model has replicas; statistics are gathered over one replica only.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]], stages: Sequence[Stage]) -> None:
        self._norms: list[tuple[_BatchNorm, Stage]] = []
        for name, layer in layers:
            norms = [part for part in layer.modules() if isinstance(part, _BatchNorm)]
            homes = [stage for stage in stages if name in dict(stage.layers)]
            if norms and len(homes) > 1:
                raise InputError(
                    f"layer {name!r} is in several copies of the model, and deferred_batch_norm gathers the statistics "
                    "of one: plan with one copy"
                )
            self._norms += [(part, homes[0]) for part in norms]

    def gathering(self, run: Callable[[], R]) -> R:
        """Call a function that runs forwards; if it succeeds, update the statistics of layers in training mode once."""
        sums = {
            norm: (_Sums(), stage)
            for norm, stage in self._norms
            if norm.training and norm.track_running_stats and norm.running_mean is not None
        }

        def gathered() -> R:
            for norm, (sum_here, stage) in sums.items():
                norm.register_forward_pre_hook(partial(sum_here.add, stage), with_kwargs=True)
                norm.track_running_stats = False
            return run()

        def restore() -> None:
            # By their functions: an interrupt may come before a handle of a hook is kept.
            for norm, (sum_here, _) in sums.items():
                norm.track_running_stats = True
                for key, hook in [*norm._forward_pre_hooks.items()]:
                    if getattr(hook, "func", None) == sum_here.add:
                        norm._forward_pre_hooks.pop(key, None)
                        norm._forward_pre_hooks_with_kwargs.pop(key, None)

        result = restoring(gathered, restore)
        for norm, (sum_here, _) in sums.items():
            if sum_here.count:
                _update(norm, sum_here)
        return result


class _Sums:
    """Count, mean and squared deviations of each channel's values, over several micro-batches."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0

    def add(self, stage: Stage, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Add a micro-batch, as a hook on the layer (pairwise update, Chan et al. 1979)."""
        if stage.repeats:
            return
        values: Tensor = (args[0] if args else kwargs["input"]).detach()
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            values = values if values.dtype is torch.float64 else values.float()
            apart = [dimension for dimension in range(values.dim()) if dimension != 1]
            variance, mean = torch.var_mean(values, apart, correction=0)
            new = values.numel() // values.shape[1]
            both = self.count + new
            delta = mean - self.mean
            self.squares = self.squares + variance * new + delta.square() * (self.count * new / both)
            self.mean = self.mean + delta * (new / both)
            self.count = both


def _update(norm: _BatchNorm, sums: _Sums) -> None:
    """Update the layer as it would do itself with the whole mini-batch."""
    assert isinstance(sums.mean, Tensor)
    assert isinstance(sums.squares, Tensor)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    with torch.inference_mode(False), torch.no_grad():
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        factor = norm.momentum
        if factor is None:  # an average over all mini-batches
            tracked = int(norm.num_batches_tracked) if norm.num_batches_tracked is not None else 0
            factor = 1 / tracked if tracked else 0.0
        unbiased = sums.squares / (sums.count - 1)
        for running, observed in ((norm.running_mean, sums.mean), (norm.running_var, unbiased)):
            running.mul_(1 - factor).add_(observed.to(running.dtype), alpha=factor)
