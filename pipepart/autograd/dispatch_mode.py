"""The base class of modes that see each operation of torch: entering one does not import torch's compiler."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A ``TorchDispatchMode`` without the import of ``torch._dynamo`` at its first operation, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the compiler skips code under such a mode anyway
