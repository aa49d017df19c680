"""Builds the chain of layers of any module: reads it from an ``nn.Sequential``, and records other modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..input_error import InputError, InputTypeError
from .chain import WHOLE, Chain, Whole
from .layer_info import LayerInfo
from .recorded.chain import RecordedChain, Verify
from .recorded.replay.recording import Group
from .sequential import flatten, refuse_lazy, runs_children_in_order
from .shared_values import share_values


def chain_of(
    model: nn.Module | Chain,
    infos: Sequence[LayerInfo] = (),
    *,
    layers: Sequence[str] | None = None,
    verify: Verify = "first",
    split_loss: bool = True,
) -> Chain:
    """Return the chain of layers of a model.

    Args:
        model: the user's. An ``nn.Sequential`` is taken as it is, unless its layers share Python values; any other
            module is recorded when it is first called.
        infos: the layers that the chain of a recorded model must have, as a profile has them.
        layers: as for :class:`RecordedChain`; ``[""]`` makes the model one layer, without recording it.
        verify, split_loss: as for :class:`RecordedChain`.

    Raises:
        TypeError, ValueError: ``model`` is no module, or has no layers.
    """
    if isinstance(model, Chain):
        return model
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model must be an nn.Module, got {type(model).__name__}: {model!r:.80}")
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise InputTypeError(
            f"{type(model).__name__} has no forward, so it cannot be called: pass a model that can"
        )
    if runs_children_in_order(model) and layers is None:
        flat = flatten(model)
        if not share_values(model, flat):
            return Chain(model, flat)
    refuse_lazy(model)
    if layers is not None and "" in layers:
        if len(layers) > 1:
            raise InputError(
                f'layers: "" is the model itself, which cannot be a layer beside {list(layers)!r:.80}'
            )
        return Whole(model)
    groups = {info.name: Group(info.modules, info.tensors) for info in infos}
    if [*groups.values()] == [WHOLE]:
        return Whole(model)
    known = groups if any(group.modules or group.tensors for group in groups.values()) else None
    return RecordedChain(model, known, layers=layers, verify=verify, split_loss=split_loss)
