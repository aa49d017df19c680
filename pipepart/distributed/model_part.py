"""ModelPart: the parameters, state and gradients of one process: of the whole model, or of its rank's stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn


class StandIn(nn.Parameter):
    """What optimizers get on a rank that trains no parameter: they refuse an empty list of parameters.

    It is one zero in float32, in no layer and no checkpoint. Under a ``GradScaler`` its gradient is zero, or infinite
    if gradients of another rank overflow.
    """


class ModelPart:
    """The whole of a model, in a pipeline of one process.

    Args:
        model: the user's.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with their names in the model."""
        yield from self.model.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear all gradients."""
        self.model.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state under its names in the model."""
        return self.model.state_dict()

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model."""
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> Any:
        """Load a state dict of the whole model."""
        return self.model.load_state_dict(state, strict=strict)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
    ) -> Tensor:
        """Scale the gradients of the whole model so that their norm is at most ``max_norm``; return the norm."""
        return nn.utils.clip_grad_norm_(
            self.model.parameters(), max_norm, norm_type, error_if_nonfinite, foreach
        )
