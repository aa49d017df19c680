"""A ``TorchDispatchMode`` that does not import torch's compiler when it is entered."""

from __future__ import annotations

from collections.abc import Iterable

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A ``TorchDispatchMode`` that skips the import of ``torch._dynamo`` at its first operation (seconds)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the compiler skips code under such a mode anyway


def on_shards(types: Iterable[type]) -> bool:
    """Return True if an operation is on DTensors. A mode that returns ``NotImplemented`` then gets those on shards."""
    return any(kind.__name__ == "DTensor" for kind in types)
