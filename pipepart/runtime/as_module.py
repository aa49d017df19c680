"""What a pipeline has of the model that it runs: parameters and state under the model's own names, modes, gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from . import StageOptimizers


class Wrapped:
    """The part of a pipeline that is as an ``nn.Module``'s, and the optimizers of its stages.

    Args:
        model: the user's.
        optimizers: of the stages.
    """

    def __init__(self, model: nn.Module, optimizers: StageOptimizers) -> None:
        self._model = model
        self._optimizers = optimizers

    @property
    def module(self) -> nn.Module:
        """The user's model."""
        return self._model

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's parameters."""
        return self._model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters with their names in the model."""
        return self._model.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """The model's state under its own names."""
        return self._model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Loads a state dict of the model, as ``nn.Module.load_state_dict`` does."""
        return self._model.load_state_dict(state, strict=strict)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses to be pickled or copied: threads cannot be.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a Pipeline has threads, which cannot be pickled or copied. Save pipe.state_dict(), "
            "pipe.optimizer_state_dict() and pipe.plan.save(path), and make another Pipeline from a copy of the model "
            "and the plan"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients."""
        self._model.zero_grad(set_to_none)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale all gradients so that their total norm is at most ``max_norm``; return the norm before.

        The arguments are those of ``torch.nn.utils.clip_grad_norm_``. It cannot be used with stage optimizers, which
        step before all gradients are known.
        """
        self._optimizers.refuse("clipping by the norm of all gradients")
        return nn.utils.clip_grad_norm_(
            self._model.parameters(), max_norm, norm_type, error_if_nonfinite, foreach
        )

    def clip_grad_value_(self, clip_value: float, foreach: bool | None = None) -> None:
        """Clamps every entry of all gradients to ``[-clip_value, clip_value]``; refused as above."""
        self._optimizers.refuse("clipping")
        nn.utils.clip_grad_value_(self._model.parameters(), clip_value, foreach)

    def train(self, mode: bool = True) -> Self:
        """Puts the model in training mode."""
        self._model.train(mode)
        return self

    def eval(self) -> Self:
        """Puts the model in evaluation mode."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self._model.training

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those of the stages, in their order, as for learning rate schedulers; none without ``optimizer``."""
        return self._optimizers.all

    def optimizer_state_dict(self) -> dict[str, Any]:
        """State and settings of the stages' optimizers, by the names of the parameters."""
        return self._optimizers.state_dict()

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what :meth:`optimizer_state_dict` returned for this cut or another; ValueError if a name is missing."""
        self._optimizers.load_state_dict(state)
