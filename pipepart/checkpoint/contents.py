"""Contents: the state that one process saves, collected and checked before anything is written."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Self

from torch import Tensor

from .arguments import checked_scaler, optimizers_of, schedulers_of
from .model_state import Model, ModelState, model_state, module_of
from .optimizer_state import OptimizerState, optimizer_state
from .own_state import own_state
from .sharded import of_this_rank


class Contents(NamedTuple):
    """The state that one process saves.

    Attributes:
        model: the tensors of the stages that this process has.
        optimizer: the state of their optimizers; None if there are none.
        own: what belongs to the process: random states, schedulers, scaler, data position. Plain JSON.
        config: the configuration of a model of ``transformers``, plain JSON; None for another.
    """

    model: ModelState
    optimizer: OptimizerState | None
    own: Mapping[str, Any]
    config: Mapping[str, Any] | None

    @classmethod
    def of(cls, pipe: Model, optimizer: Any, scheduler: Any, scaler: Any, data: Any) -> Self:
        """Collect and check the state.

        Args:
            pipe: a pipeline or a module.
            optimizer, scheduler, scaler, data: as for :func:`pipepart.save`.

        Raises:
            TypeError: an argument is of another type, or a value cannot be saved; the message names it.
            ValueError: an optimizer has a parameter that is not the model's.
        """
        names = {parameter: name for name, parameter in pipe.named_parameters()}
        optimizers = [of_this_rank(one) for one in optimizers_of(pipe, optimizer)]
        return cls(
            model_state(pipe),
            optimizer_state(optimizers, names) if optimizers else None,
            own_state(schedulers_of(scheduler), checked_scaler(scaler), data),
            _config(pipe),
        )

    def without(self, tensors: Collection[str], optimized: Collection[str]) -> Self:
        """Return the contents without some tensors, and without the optimizer state of some parameters."""
        model, optimizer = self.model, self.optimizer
        left = {name: tensor for name, tensor in model.tensors.items() if name not in tensors}
        return self._replace(
            model=model._replace(tensors=left), optimizer=optimizer and optimizer.without(optimized)
        )

    def copied(self) -> Self:
        """Return the contents with copies of the tensors on the CPU, which later steps do not change."""
        optimizer = self.optimizer
        return self._replace(
            model=self.model._replace(tensors=_copied(self.model.tensors)),
            optimizer=optimizer and optimizer._replace(tensors=_copied(optimizer.tensors)),
        )


def _config(pipe: Model) -> dict[str, Any] | None:
    """Return what ``transformers`` needs beside the tensors to build the model."""
    module = module_of(pipe)
    to_json = getattr(getattr(module, "config", None), "to_json_string", None)
    return None if to_json is None else {**json.loads(to_json()), "architectures": [type(module).__name__]}


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
