"""Captures an ``nn.Sequential``: finds its layers in order, describes them, and runs them once for their shapes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..autograd import graph_cut
from ..autograd.own_copy import tensors
from ..autograd.sparse import bytes_of
from .chain import WHOLE, Chain, Whole
from .hooks import has_hooks
from .layer_info import LayerInfo, SharedTensor, TensorSpec
from .recorded.chain import RecordedChain, Verify
from .recorded.recording.opening import is_skippable
from .recorded.replay.recording import Group
from .restore import shadow_parameters

if TYPE_CHECKING:
    from .graph import LayerGraph

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


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
        model: the user's. An ``nn.Sequential`` is taken as it is; any other module is recorded when it is first called.
        infos: the layers that the chain of a recorded model must have, as a profile has them.
        layers: as for :class:`RecordedChain`; ``[""]`` makes the model one layer, without recording it.
        verify, split_loss: as for :class:`RecordedChain`.

    Raises:
        TypeError, ValueError: ``model`` is no module, or has no layers.
    """
    if isinstance(model, Chain):
        return model
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}: {model!r:.80}")
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise TypeError(
            f"{type(model).__name__} has no forward, so it cannot be called: pass a model that can"
        )
    if _runs_children_in_order(model) and layers is None and not any(map(is_skippable, model.modules())):
        return Chain(model, flatten(model))
    _refuse_lazy(model)
    if layers is not None and "" in layers:
        if len(layers) > 1:
            raise ValueError(
                f'layers: "" is the model itself, which cannot be a layer beside {list(layers)!r:.80}'
            )
        return Whole(model)
    groups = {info.name: Group(info.modules, info.tensors) for info in infos}
    if [*groups.values()] == [WHOLE]:
        return Whole(model)
    known = groups if any(group.modules or group.tensors for group in groups.values()) else None
    return RecordedChain(model, known, layers=layers, verify=verify, split_loss=split_loss)


def flatten(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of an ``nn.Sequential`` in execution order, each with its path in ``model``.

    A nested ``nn.Sequential`` is opened, unless it has hooks or a ``forward`` of its own.

    Raises:
        TypeError: ``model`` is not an ``nn.Sequential``, or has a ``forward`` of its own.
        ValueError: it has no layers, or a lazy layer whose parameters have no shape yet.
    """
    layers = _checked_layers(model)
    if has_hooks(model):
        warnings.warn(
            f"hooks on the outermost {type(model).__name__} do not run in a pipeline: put them on its layers",
            stacklevel=3,
        )
    return layers


def describe(
    model: nn.Module | Chain, outputs: Sequence[tuple[TensorSpec, ...]] | None = None
) -> list[LayerInfo]:
    """Describe the layers of a chain without running them.

    Args:
        model: the chain, or an ``nn.Sequential``.
        outputs: the specs of each layer's outputs, if they are known.

    Raises:
        TypeError, ValueError: as :func:`flatten` does.
    """
    chain = model if isinstance(model, Chain) else Chain(model, _checked_layers(model))
    owners: dict[Tensor, tuple[str, str]] = {}
    specs = [()] * len(chain.layers) if outputs is None else outputs
    infos = [
        _info(name, layer, owners, made) for (name, layer), made in zip(chain.layers, specs, strict=True)
    ]
    return [
        info.model_copy(update=chain.groups[info.name]._asdict()) if chain.groups else info for info in infos
    ]


def _checked_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Sequential, got {type(model).__name__}: {model!r:.80}")
    if not _runs_children_in_order(model):
        why = "has a forward of its own" if isinstance(model, nn.Sequential) else "is no nn.Sequential"
        raise TypeError(
            f"{type(model).__name__} {why}, so its layers cannot be cut apart: "
            "write it as nn.Sequential(layer, layer, ...)"
        )
    _refuse_lazy(model)
    layers = list(_layers(model, ""))
    if not layers:
        raise ValueError(f"the {type(model).__name__} holds no layers")
    return layers


def _refuse_lazy(model: nn.Module) -> None:
    if any(isinstance(tensor, UninitializedParameter | UninitializedBuffer) for tensor in state_of(model)):
        raise ValueError("the model holds lazy layers without shapes: call it once on a sample first")


def _layers(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        if child is None:
            continue
        if _runs_children_in_order(child) and not has_hooks(child) and len(child._modules):
            yield from _layers(child, f"{path}{name}.")
        else:
            yield f"{path}{name}", child


def _runs_children_in_order(module: nn.Module) -> bool:
    if not isinstance(module, nn.Sequential):
        return False
    return "forward" not in vars(module) and type(module).forward is nn.Sequential.forward


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
    if isinstance(chain, RecordedChain):
        given = ((chain.enter(*given).live,), {})
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
    return LayerGraph.chain(describe(chain, outputs), tensor_specs((args, kwargs)))


def state_of(layer: nn.Module) -> Iterator[Tensor]:
    """Return the parameters and buffers of a layer."""
    yield from layer.parameters()
    yield from layer.buffers()


def tensor_specs(value: Any) -> tuple[TensorSpec, ...]:
    """Return the specs of all tensors in a nest."""
    return tuple(map(TensorSpec.of, tensors(value)))


def _info(
    name: str, layer: nn.Module, owners: dict[Tensor, tuple[str, str]], outputs: tuple[TensorSpec, ...]
) -> LayerInfo:
    """Describe one layer. ``owners`` maps each tensor to the first layer that holds it, and its path there."""
    parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())
    state = [*parameters.values(), *buffers.values()]
    shared = tuple(
        SharedTensor(
            layer=owners[tensor][0],
            name=owners[tensor][1],
            bytes=bytes_of(tensor),
            gradient_bytes=bytes_of(tensor) if tensor.requires_grad else 0,
        )
        for tensor in state
        if tensor in owners
    )
    own = [p for p in parameters.values() if p not in owners]
    own_buffers = [b for b in buffers.values() if b not in owners]
    for path, tensor in (*parameters.items(), *buffers.items()):
        owners.setdefault(tensor, (name, path))
    return LayerInfo(
        name=name,
        kind=type(layer).__name__,
        description=_describe(layer),
        parameter_bytes=sum(p.nbytes for p in own),
        gradient_bytes=sum(p.nbytes for p in own if p.requires_grad),
        buffer_bytes=sum(bytes_of(b) for b in own_buffers),
        dtypes=_dtypes(state),
        shared=shared,
        outputs=outputs,
    )


def _dtypes(state: Sequence[Tensor]) -> tuple[str, ...]:
    counting = {t.dtype for t in state if t.dtype.is_floating_point or t.dtype.is_complex}
    return tuple(sorted(str(dtype).removeprefix("torch.") for dtype in counting))


def _describe(layer: nn.Module) -> str:
    """Return the class and its arguments, without memory addresses, which differ between processes."""
    text = _ADDRESS.sub("", repr(layer).split("\n", 1)[0])
    return text if text.endswith(")") else type(layer).__name__
