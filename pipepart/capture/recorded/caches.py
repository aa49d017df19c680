"""Has models of transformers make no cache of keys and values in training, where nothing would use it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import nn

_said: WeakSet[nn.Module] = WeakSet()


@contextmanager
def no_cache_in_training(model: nn.Module) -> Iterator[None]:
    """Take ``config.use_cache`` as False within the block if the model is in training; say so once for each model.

    Their default is True, and a cache is an object that layers of different stages cannot share.
    """
    configs = _with_cache(model) if model.training else []
    if configs and model not in _said:
        _said.add(model)
        warnings.warn(
            f"config.use_cache of {type(model).__name__} is True and is taken as False in training, where no cache is "
            "used: pass use_cache=False or set it to silence this",
            stacklevel=2,
        )
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config in configs:
            config.use_cache = True


def _with_cache(model: nn.Module) -> list[Any]:
    """Return the settings of the modules that say to make a cache."""
    found = {
        id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None
    }
    return [config for config in found.values() if getattr(config, "use_cache", None) is True]
