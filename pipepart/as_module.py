"""AsModule: the methods that a pipeline has in common with its model: parameters, state, modes and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn

from .distributed.model_part import ModelPart
from .dtensors import local_leaf
from .input_error import InputTypeError
from .restoring import restoring
from .runtime.state.optimizers import StageOptimizers

R = TypeVar("R")


class AsModule:
    """A model under its own names, and the optimizers of a pipeline's stages.

    Args:
        part: the part of the user's model that this process has.
        layers: the modules that its stages consist of, with their paths.
        optimizers: the optimizers of the stages.
    """

    def __init__(
        self, part: ModelPart, layers: Sequence[tuple[str, nn.Module]], optimizers: StageOptimizers
    ) -> None:
        model = part.model
        self._part = part
        self._model = model
        self._optimizers = optimizers
        self._places = [_place(model, name, layer) for name, layer in layers]
        self._lengths = {id(parent): (parent, len(parent._modules)) for parent, _, _, _ in self._places}

    def check_layers(self) -> None:
        """Check that the model still has the layers of the stages.

        Raises:
            RuntimeError: a layer was replaced, removed or added.
        """
        for parent, key, name, layer in self._places:
            present = parent._modules.get(key)
            if present is not layer:
                raise RuntimeError(
                    f"layer {name!r} was replaced after the pipeline was made: its stage runs the "
                    f"{type(layer).__name__} that was there, the model has "
                    f"{'none' if present is None else f'a {type(present).__name__}'}. Make another Pipeline"
                )
        for parent, count in self._lengths.values():
            if len(parent._modules) != count:
                raise RuntimeError(
                    f"the {type(parent).__name__} had {count} layers when the pipeline was made and has "
                    f"{len(parent._modules)}. Make another Pipeline"
                )

    @property
    def module(self) -> nn.Module:
        """The user's model."""
        return self._model

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's parameters; under torchrun those of this rank's stages, at least one empty parameter."""
        return self._part.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters with their names in the model; under torchrun those of this rank's stages."""
        return self._part.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """The model's state under its own names; under torchrun that of this rank's stages."""
        return self._part.state_dict()

    def full_state_dict(self) -> dict[str, Any]:
        """The state of the whole model under its own names. Under torchrun every rank calls it and gets all of it."""
        return self._part.full_state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a state dict of the whole model, as ``nn.Module.load_state_dict`` does; a rank loads its stages."""
        return self._part.load_state_dict(state, strict)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise TypeError: threads cannot be pickled or copied.

        Raises:
            TypeError: always.
        """
        raise InputTypeError(
            "a Pipeline has threads, which cannot be pickled or copied: pipepart.save(folder, pipe, optimizer, "
            "step=n) and pipe.plan.save(path) save it, and another Pipeline of such a model and that plan can load it"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        self._part.zero_grad(set_to_none)

    def _evaluating(self, run: Callable[[], R]) -> R:
        """Call a function with the model in evaluation mode; afterwards each module is in its own mode again."""
        modes = [(module, module.training) for module in self._model.modules()]

        def evaluated() -> R:
            self._model.eval()
            return run()

        def restore() -> None:
            for module, training in modes:
                module.training = training

        return restoring(evaluated, restore)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale all gradients so that their total norm is at most ``max_norm``; return the norm before.

        The arguments are those of ``nn.utils.clip_grad_norm_``, and the result equals that of the model on one device.

        Raises:
            ValueError: each stage has its own optimizer, which has stepped already.
        """
        self._optimizers.refuse("clipping by the norm of all gradients")
        return self._part.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, foreach)

    def clip_grad_value_(self, clip_value: float, foreach: bool | None = None) -> None:
        """Clamp every entry of all gradients to ``[-clip_value, clip_value]``.

        Raises:
            ValueError: as :meth:`clip_grad_norm_`.
        """
        self._optimizers.refuse("clipping")
        nn.utils.clip_grad_value_(map(local_leaf, self.parameters()), clip_value, foreach)

    def train(self, mode: bool = True) -> Self:
        """Put the model in training mode."""
        self._model.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model in evaluation mode."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """True if the model is in training mode."""
        return self._model.training

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of the stages in their order, for learning-rate schedulers; empty without ``optimizer=``."""
        return self._optimizers.all


def _place(model: nn.Module, name: str, layer: nn.Module) -> tuple[nn.Module, str, str, nn.Module]:
    """A layer, its parent module, its key in the parent, and its name."""
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key, name, layer
