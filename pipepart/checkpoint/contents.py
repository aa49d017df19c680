"""Contents: all that one process saves, collected and checked before anything is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from .model_state import Model, ModelState, model_state, module_of
from .optimizer_state import OptimizerState, optimizer_state
from .own_state import own_state


class Contents(NamedTuple):
    """What one process saves.

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
        """Collect what is saved.

        Args:
            pipe: a pipeline or a module.
            optimizer, scheduler, scaler, data: as for :func:`pipepart.save`.

        Raises:
            TypeError: an argument is of another type, or a value cannot be saved; the message names it.
            ValueError: an optimizer has a parameter that is not the model's.
        """
        names = {parameter: name for name, parameter in pipe.named_parameters()}
        optimizers = optimizers_of(pipe, optimizer)
        model = model_state(pipe)
        optimizing = optimizer_state(optimizers, names) if optimizers else None
        mesh = None if isinstance(pipe, nn.Module) else getattr(pipe, "mesh", None)
        if mesh is not None and mesh.get_local_rank("dp"):
            # A further replica, whose tensors the first one writes.
            model = model._replace(tensors={}, tied={})
            optimizing = optimizing and OptimizerState([], {}, {})
        return cls(
            model,
            optimizing,
            own_state(schedulers_of(scheduler), checked_scaler(scaler), data),
            _config(pipe),
        )

    def copied(self) -> Self:
        """Return the contents with copies of the tensors on the CPU, which later steps do not change."""
        optimizer = self.optimizer
        return self._replace(
            model=self.model._replace(tensors=_copied(self.model.tensors)),
            optimizer=optimizer and optimizer._replace(tensors=_copied(optimizer.tensors)),
        )


def check_model(pipe: Any) -> None:
    """Check that a model can be saved and loaded.

    Raises:
        TypeError: it is neither a pipeline nor a module.
    """
    if not (isinstance(pipe, nn.Module) or isinstance(getattr(pipe, "module", None), nn.Module)):
        raise TypeError(f"a Pipeline or an nn.Module is saved and loaded, got {type(pipe).__name__}")


def optimizers_of(pipe: Any, optimizer: Any) -> list[Optimizer]:
    """Return the optimizers that are given, or those of a pipeline's stages.

    Raises:
        TypeError: ``optimizer`` is neither an optimizer of torch nor a sequence of them.
        ValueError: the stages have optimizers, and others are given.
    """
    of_stages: Sequence[Optimizer] = () if isinstance(pipe, nn.Module) else pipe.optimizers
    given = [] if optimizer is None else _several(optimizer)
    if of_stages and given:
        raise ValueError(
            "the stages of the pipeline have optimizers of their own, which are taken: pass no optimizer"
        )
    for one in given:
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"optimizer must be an optimizer of torch, or a list of them, got {type(one).__name__}"
            )
    return given or list(of_stages)


def schedulers_of(scheduler: Any) -> list[Any]:
    """Return the learning-rate schedulers as a list.

    Raises:
        TypeError: one has no state dict.
    """
    found = [] if scheduler is None else _several(scheduler)
    for one in found:
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise TypeError(
                "scheduler must be a scheduler of torch.optim.lr_scheduler, or a list of them, got "
                f"{type(one).__name__}"
            )
    return found


def checked_scaler(scaler: Any) -> Any:
    """Return a GradScaler, or None for None.

    Raises:
        TypeError: it is none.
    """
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    return scaler


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _config(pipe: Model) -> dict[str, Any] | None:
    """Return what ``transformers`` needs beside the tensors to build the model."""
    module = module_of(pipe)
    to_json = getattr(getattr(module, "config", None), "to_json_string", None)
    return None if to_json is None else {**json.loads(to_json()), "architectures": [type(module).__name__]}


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
