"""One optimizer per stage: it steps on the stage's device as soon as the stage's gradients are complete."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from itertools import islice

from torch import nn
from torch.optim import Optimizer

from ...capture import Chain
from ...input_error import InputError, InputTypeError
from ...planning import Plan

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]

_LIKE_THIS = "Pipeline(..., optimizer=lambda params: torch.optim.SGD(params, lr=0.1))"
_OTHERWISE = "make the pipeline without optimizer=, and step one optimizer over pipe.parameters()"


def check_optimizer(factory: OptimizerFactory | None, plan: Plan | None = None) -> None:
    """Check the optimizer factory before anything is moved."""
    if factory is not None and not callable(factory):
        raise InputTypeError(
            f"optimizer must make an optimizer of the parameters of a stage, got {type(factory).__name__}: {_LIKE_THIS}"
        )
    if factory is None and plan is not None and plan.asynchronous:
        raise InputError(
            f"schedule {plan.schedule!r} is asynchronous: stages change their weights within a step, by an optimizer "
            f"each; {_LIKE_THIS}. Its numbers are not those of plain training: for these choose '1f1b', or another"
        )


def is_sharded(optimizer: object) -> bool:
    """Return True for a ``ZeroRedundancyOptimizer``, whose module is not imported for this: that takes a second."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


class StageOptimizers:
    """The optimizers of a pipeline's stages.

    Args:
        factory: called once a stage with its parameters, those of an earlier stage left out; None for no optimizers.
        chain: the model, whose parameters are on their devices, and its layers.
        plan: has the stages.
        here: the stages of this process; None for all.

    Attributes:
        by_stage: the optimizer of each stage, None for one without parameters or of another process; empty where there
            is no factory.

    Raises:
        TypeError: the factory returns no optimizer of torch.
        ValueError: it returns one that has other parameters.
    """

    def __init__(
        self,
        factory: OptimizerFactory | None,
        chain: Chain,
        plan: Plan,
        here: Container[int] | None = None,
    ) -> None:
        self.by_stage: list[Optimizer | None] = []
        taken: set[nn.Parameter] = set()
        layers = iter(chain.layers)
        if factory is None:
            return
        for number, stage in enumerate(plan.stages):
            mine = islice(layers, len(stage.layers))
            parameters = dict.fromkeys(parameter for _, layer in mine for parameter in layer.parameters())
            left = [parameter for parameter in parameters if parameter not in taken]
            taken.update(left)
            self.by_stage.append(
                _made(factory, left, number) if left and (here is None or number in here) else None
            )

    @property
    def all(self) -> list[Optimizer]:
        """Return the optimizers in the order of the stages."""
        return [optimizer for optimizer in self.by_stage if optimizer is not None]

    def refuse(self, what: str) -> None:
        """Raise for an operation that needs all gradients before any weight changes, if stages have optimizers."""
        if self.by_stage:
            raise InputError(
                f"{what} needs all gradients before any weight changes, and each stage's own optimizer steps as soon "
                f"as the stage has its own: {_OTHERWISE}"
            )

    def zero_grad(self) -> None:
        """Clear the gradients of all their parameters."""
        for optimizer in self.all:
            optimizer.zero_grad()


def _made(factory: OptimizerFactory, parameters: list[nn.Parameter], stage: int) -> Optimizer:
    optimizer = factory(list(parameters))
    if not isinstance(optimizer, Optimizer):
        raise InputTypeError(
            f"optimizer must return a torch.optim.Optimizer, got {type(optimizer).__name__} for stage {stage}: "
            f"{_LIKE_THIS}"
        )
    if is_sharded(optimizer):
        raise InputError(
            "a ZeroRedundancyOptimizer waits for the other replicas, which a stage cannot within its step: "
            + _OTHERWISE
            + ", as in ZeroRedundancyOptimizer(pipe.parameters(), torch.optim.Adam, "
            'process_group=pipe.mesh.get_group("dp"), lr=0.1)'
        )
    if any(
        parameter not in set(parameters) for group in optimizer.param_groups for parameter in group["params"]
    ):
        raise InputError(
            f"the optimizer of stage {stage} has parameters that are not the stage's: use those that it is called with"
        )
    return optimizer
