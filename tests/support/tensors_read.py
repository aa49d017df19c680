"""Which tensors of safetensors files a test has read."""

from typing import Any

import pytest
from torch import Tensor


def watched_reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the bytes of each tensor whose values are read from now on; reading one twice is an error."""
    import safetensors  # an extra

    found: dict[str, int] = {}
    opened: Any = safetensors.safe_open

    class Watched:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._file = opened(*args, **kwargs)

        def __enter__(self) -> "Watched":
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def get_tensor(self, name: str) -> Tensor:
            tensor = self._file.get_tensor(name)
            assert name not in found
            found[name] = tensor.nbytes
            return tensor

    monkeypatch.setattr(safetensors, "safe_open", Watched)
    return found
