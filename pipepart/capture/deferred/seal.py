"""Seals deferred tensors after their construction: refuses those whose values are unknown or were written too late."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ..recorded.refusal import CaptureError
from .log import Memory

_VERSION = "_pipepart_version"
_TABLES = frozenset({"_parameters", "_buffers", "_modules"})


class SealedParameter(nn.Parameter):
    """A parameter without memory, after its construction: a write through ``data`` shows in its version, too.

    On the meta device a write has no effect, so one behind the block of ``deferred_init`` would be lost.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The parameter, detached."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        nn.Parameter.data.__set__(self, value)  # type: ignore[attr-defined]


def seal(modules: Iterable[nn.Module]) -> None:
    """Note the versions of all deferred tensors of modules, to find out later writes."""
    for module in modules:
        own = (*module._parameters.values(), *module._buffers.values())
        for tensor in (*own, *(tensor for _, tensor in attributes_of(module))):
            if tensor is None or Memory.of(tensor) is None or tensor.is_inference():
                continue  # a tensor of inference mode has no version
            if type(tensor) is nn.Parameter:
                tensor.__class__ = SealedParameter
            setattr(tensor, _VERSION, tensor._version)


@contextmanager
def writes_allowed(model: nn.Module) -> Iterator[None]:
    """Let a forward on the meta device write attributes of deferred modules, which has no effect."""
    own = (tensor for module in model.modules() for _, tensor in attributes_of(module))
    sealed = tuple(tensor for tensor in own if hasattr(tensor, _VERSION))
    with _unsafe_preserve_version_counter(sealed):
        yield


def unseal(tensor: Tensor) -> None:
    """Take the mark of :func:`seal` off a tensor, before it gets its values."""
    if type(tensor) is SealedParameter:
        tensor.__class__ = nn.Parameter  # type: ignore[assignment]
    vars(tensor).pop(_VERSION, None)


def refuse_unknown(tensors: Iterable[tuple[str, Tensor]], weights: bool) -> None:
    """Check that the values of tensors on the meta device are known.

    Args:
        tensors: with what they are called in the error, as ``"parameter 'head.weight'"``.
        weights: whether they are those that files of weights do not have.

    Raises:
        CaptureError: names the first one whose values are not.
    """
    for what, tensor in tensors:
        if is_lazy(tensor):
            raise CaptureError(
                f"{what} is of a lazy layer without shapes: call the model once on a sample in the block"
            )
        if Memory.of(tensor) is None:
            others = "" if weights else "; or pass weights='folder or file.safetensors'"
            raise CaptureError(
                f"{what} is on the meta device and its initial values are unknown"
                f"{', weights do not have it' if weights else ''}. Construct the model within `with "
                "pipepart.deferred_init():`, with all copies, initialisation and conversion to other dtypes in the "
                f"block{others}; or give the model real tensors (model.to_empty(device='cpu'), then load_state_dict)"
            )
        noted = vars(tensor).get(_VERSION)
        if noted is not None and noted != tensor._version:
            others = "" if weights else "pass weights='folder or file.safetensors', or "
            raise CaptureError(
                f"{what} was written after the block of deferred_init, where writes have no effect: move this "
                f"initialisation into the block. To load values, {others}call model.load_state_dict(state, assign=True)"
            )


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors on the meta device among the attributes of a module, also in lists, tuples and dicts."""
    own: dict[str, Any] = {name: value for name, value in vars(module).items() if name not in _TABLES}
    for name, value in own.items():
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                yield name, leaf
