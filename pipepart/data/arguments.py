"""Arguments: the positional and keyword arguments of one call of a model."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from ..input_error import InputTypeError


class Arguments:
    """The arguments of one call of a model: ``Arguments(ids, attention_mask=mask)`` stands for that call.

    A pipeline calls the first layer of an ``nn.Sequential`` with them, and each later layer with the one value that
    the layer before it returned. Tensors in them have the shape ``[samples, ...]``.

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments.
    """

    __slots__ = ("args", "kwargs")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    @classmethod
    def of(cls, sample: Any) -> Arguments:
        """Convert a sample to arguments.

        A tuple holds positional arguments, a dict keyword arguments, and anything else is the first argument.

        Raises:
            TypeError: a key of the dict is not a string.
        """
        if isinstance(sample, Arguments):
            return sample
        if isinstance(sample, dict):
            if wrong := [key for key in sample if not isinstance(key, str)]:
                raise InputTypeError(
                    f"a sample that is a dict holds keyword arguments by name, got the key {wrong[0]!r}: write "
                    "pipepart.Arguments(sample) if the dict is the first argument"
                )
            return cls(**sample)
        if type(sample) is tuple:
            return cls(*sample)
        return cls(sample)

    @classmethod
    def of_input(cls, value: Any) -> Arguments:
        """Return the arguments whose :attr:`input` is ``value``."""
        return value if isinstance(value, Arguments) else cls(value)

    @property
    def input(self) -> Any:
        """The value to split into micro-batches: the first argument if it is the only one, else the arguments."""
        return self.args[0] if len(self.args) == 1 and not self.kwargs else self

    def __repr__(self) -> str:
        named = [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"Arguments({', '.join([*map(repr, self.args), *named])})"


def _flatten(arguments: Arguments) -> tuple[list[Any], tuple[int, tuple[str, ...]]]:
    return [*arguments.args, *arguments.kwargs.values()], (len(arguments.args), tuple(arguments.kwargs))


def _unflatten(values: Any, names: tuple[int, tuple[str, ...]]) -> Arguments:
    remaining = list(values)
    return Arguments(*remaining[: names[0]], **dict(zip(names[1], remaining[names[0] :], strict=True)))


def _flatten_with_keys(arguments: Arguments) -> tuple[list[tuple[Any, Any]], tuple[int, tuple[str, ...]]]:
    values, names = _flatten(arguments)
    keys = [*map(pytree.SequenceKey, range(names[0])), *map(pytree.MappingKey, names[1])]
    return list(zip(keys, values, strict=True)), names


pytree.register_pytree_node(Arguments, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)


def call(layer: Any, value: Any) -> Any:
    """Call a layer with one value, or with :class:`Arguments`."""
    return layer(*value.args, **value.kwargs) if type(value) is Arguments else layer(value)


def check_arguments(name: str, layer: nn.Module, arguments: Arguments, target: Any = None) -> None:
    """Check that the first layer of a model accepts these arguments.

    Nothing is checked if the layer has hooks that may change its arguments, or no signature.

    Args:
        name: the name of the layer in the model; empty for the model itself.
        layer: the layer.
        given: the arguments of the call.
        target: the target of the call, if there is one.

    Raises:
        TypeError: an argument is missing, unknown, or one too many.
    """
    if layer._forward_pre_hooks:
        return
    try:
        signature = inspect.signature(layer.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments.args, **arguments.kwargs)
    except TypeError as error:
        hint = ""
        if arguments.kwargs and not arguments.args:
            hint = ". If its argument is a dict, the sample is (dict,) or pipepart.Arguments(dict)"
        elif target is None and len(arguments.args) > 1:
            hint = ". Pass the target of the loss by its name: target=..."
        named = f" and the keywords {', '.join(arguments.kwargs)}" if arguments.kwargs else ""
        who = f"the model's first layer {name!r}" if name else "the model"
        raise InputTypeError(
            f"{who} ({type(layer).__name__}) takes {signature} and was given {len(arguments.args)} positional "
            f"arguments{named}: {error}{hint}"
        ) from None
