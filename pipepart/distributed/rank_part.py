"""RankPart: the parameters and the state of the stages of one rank, under the names of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.model_part import ModelPart
from ..workers.ranks import Ranks
from .ownership import Ownership


class RankPart(ModelPart):
    """What belongs to one rank. All ranks call the methods that need the whole model.

    Args:
        model: the user's.
        ownership: of its tensors.
        ranks: the processes.
    """

    def __init__(self, model: nn.Module, ownership: Ownership, ranks: Ranks) -> None:
        super().__init__(model)
        self._ownership = ownership
        self._ranks = ranks
        self._empty = nn.Parameter(torch.empty(0))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank."""
        for name, parameter in self.model.named_parameters():
            if self._ownership.is_mine(parameter):
                yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank; an empty one if it has none, as torch's optimizers refuse that."""
        yield from [parameter for _, parameter in self.named_parameters()] or [self._empty]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's stages."""
        state = self.model.state_dict()
        return {name: state[name] for name in self._ownership.names(self.model)}

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model on every rank, in the memory of the host."""
        own = {
            name: value.cpu() if isinstance(value, Tensor) else value
            for name, value in self.state_dict().items()
        }
        found = {name: value for part in self._ranks.gather(own) for name, value in part.items()}
        return {name: found[name] for name in self.model.state_dict() if name in found}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> Any:
        """Load the part of this rank from a state dict of the whole model."""
        full = self.model.state_dict()
        missing = [name for name in full if name not in state]
        unknown = [name for name in state if name not in full]
        if strict and (missing or unknown):
            return self.model.load_state_dict(state, strict=True)  # raises, with torch's own words
        wanted = set(self._ownership.names(self.model)) | self._ownership.used_here(self.model)
        self.model.load_state_dict(
            {name: value for name, value in state.items() if name in wanted}, strict=False
        )
        return nn.modules.module._IncompatibleKeys(missing, unknown)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
    ) -> Tensor:
        """Scale the gradients of this rank by the norm of all; return the norm, the same as in one process."""
        own = [
            (name, parameter.grad)
            for name, parameter in self.named_parameters()
            if parameter.grad is not None
        ]
        # Of one gradient each: the sum over all of them is then taken in the order of the model's parameters.
        norms = {
            name: nn.utils.get_total_norm([gradient], norm_type, foreach=foreach).cpu()
            for name, gradient in own
        }
        known = {name: norm for part in self._ranks.gather(norms) for name, norm in part.items()}
        ordered = [known[name] for name, _ in self.model.named_parameters() if name in known]
        total = torch.linalg.vector_norm(torch.stack(ordered), norm_type) if ordered else torch.tensor(0.0)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the total norm of order {norm_type} of all gradients is not finite, so they cannot be clipped; pass "
                "error_if_nonfinite=False to scale them anyway"
            )
        nn.utils.clip_grads_with_norm_(
            [parameter for _, parameter in self.named_parameters()], max_norm, total, foreach
        )
        return total

    def share_tied(self) -> None:
        """Copy parameters that stages of several ranks use from the rank that they belong to to the others.

        Raises:
            RankError: a rank is lost.
        """
        for tensor, (owner, *_) in self._ownership.shared.items():
            value = tensor.detach()
            sent = value.cpu().contiguous() if self._ownership.is_mine(tensor) else None
            if sent is None:
                sent = torch.empty(value.shape, dtype=value.dtype)
            self._ranks.broadcast(sent, owner)
            if not self._ownership.is_mine(tensor) and not value.is_meta:
                with torch.no_grad():
                    value.copy_(sent)
