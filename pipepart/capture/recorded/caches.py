"""Turns off the key/value cache of transformers models, which stages cannot share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import nn

_said: WeakSet[nn.Module] = WeakSet()


@contextmanager
def without_cache(model: nn.Module, settings: Sequence[Any]) -> Iterator[None]:
    """Set ``use_cache`` of the model's configs to False within the block; warn once.

    The default of transformers is True, and a cache is an object that layers of different stages cannot share.

    Args:
        model: the user's.
        settings: those of :func:`settings_of` the model.
    """
    configs = [each for each in settings if getattr(each, "use_cache", None) is True]
    if configs and model not in _said:
        _said.add(model)
        warnings.warn(
            f"config.use_cache of {type(model).__name__} is True and is taken as False, as stages cannot share a "
            "cache: pass use_cache=False or set it to silence this",
            stacklevel=2,
        )
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config in configs:
            config.use_cache = True


def settings_of(model: nn.Module) -> list[Any]:
    """Return the distinct ``config`` objects of a model's modules."""
    configs = (vars(module).get("config") for module in model.modules())
    return list({id(config): config for config in configs if config is not None}.values())
