"""Records the tensors that a test reads from safetensors files."""

import pytest
from torch import Tensor

from pipepart.tensor_file import TensorFile


def watched_reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the bytes of each tensor whose values are read from now on; reading one twice is an error."""
    found: dict[str, int] = {}
    window = TensorFile.window

    def watched(self: TensorFile, name: str) -> Tensor:
        tensor = window(self, name)
        assert name not in found
        found[name] = tensor.nbytes
        return tensor

    monkeypatch.setattr(TensorFile, "window", watched)
    return found
