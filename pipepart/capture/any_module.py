"""Builds the chain of layers of any module: reads it from an ``nn.Sequential``, and records other modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..autograd import graph_cut
from ..input_error import InputError, InputTypeError
from .chain import WHOLE, Chain, Whole
from .describing import describe, tensor_specs
from .layer_info import LayerInfo
from .recorded.chain import RecordedChain, Verify
from .recorded.live_values import live_tensors
from .recorded.replay.recording import Group
from .restore import shadow_parameters
from .sequential import flatten, refuse_lazy, runs_children_in_order
from .shared_values import share_values

if TYPE_CHECKING:
    from .graph import LayerGraph


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
    _refuse_skippable(model)
    if runs_children_in_order(model) and layers is None:
        found = flatten(model)
        if not share_values(model, found):
            return Chain(model, found)
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


def _refuse_skippable(model: nn.Module) -> None:
    """Refuse modules that pass values to others by yielding ``stash`` and ``pop``, as in torchgpipe and fairscale.

    Raises:
        ValueError: the model has one.
    """
    for path, module in model.named_modules():
        if hasattr(type(module), "stashable_names") and hasattr(type(module), "poppable_names"):
            raise InputError(
                f"module {path!r} was made by the decorator skippable of torchgpipe or fairscale: write a model whose "
                "forward passes the tensor on, y = self.first(x); self.last(self.middle(y), y). It is recorded as it is"
            )


def capture(model: nn.Module, /, *args: Any, **kwargs: Any) -> LayerGraph:
    """Capture the layer graph of a model by running it once.

    The layers run forward on copies of their parameters and buffers, with gradients enabled and in the mode that the
    model is in. The model and all random states stay as they are.

    Args:
        model: an ``nn.Sequential``, of which nested ones are opened, or any other module, which is recorded. Names are
            those of the model.
        args, kwargs: the arguments of the model: tensors or nests of tensors.

    Raises:
        CaptureError: ``model`` cannot be recorded.
        Exception: whatever a layer raises, with a note that names the layer.
    """
    from .graph import LayerGraph  # networkx takes half a second to import

    chain = chain_of(model, split_loss=False)
    outputs = []
    given = graph_cut.cut((args, kwargs))[0]
    values = chain.bind(*given).live if isinstance(chain, RecordedChain) else None
    if values is not None:
        given = ((values,), {})
    with shadow_parameters(model), torch.enable_grad():
        for name, layer in chain.layers:
            positional, named = graph_cut.alias(given)
            try:
                output = layer(*positional, **named)
            except Exception as error:
                error.add_note(
                    f"pipepart: in the forward of layer {name!r} ({type(layer).__name__}), while the model was captured"
                )
                raise
            outputs.append(tensor_specs(output))
            given = ((graph_cut.cut(output)[0],), {})
    infos, inputs = describe(chain, outputs), tensor_specs((args, kwargs))
    if values is None:
        return LayerGraph.chain(infos, inputs)
    made = [one for one in live_tensors(values, outputs) if not one.is_argument]
    return LayerGraph.recorded(infos, [(one.layers, one.spec.bytes, one.spec) for one in made], inputs)
