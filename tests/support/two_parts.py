"""A layer that is made of a function, and whether this torch lets its backward be split."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# An older torch does not say whether a saved tensor is made by a hook: all is left to autograd there.
_NODE: Any = nn.Linear(1, 1)(torch.ones(1, 1)).grad_fn
SPLITS = hasattr(_NODE._raw_saved_mat1, "unpack_hook")
splits = pytest.mark.skipif(not SPLITS, reason="this torch does not say how a saved tensor comes about")


class Calls(nn.Module):
    """A layer that is one function of its input and of its members: modules, buffers, and tensors to train."""

    def __init__(self, function: Callable[..., Any], **members: nn.Module | Tensor) -> None:
        super().__init__()
        self.function, self.names = function, tuple(members)
        for name, value in members.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Buffer):
                value = nn.Parameter(value)
            setattr(self, name, value)

    def forward(self, x: Any) -> Any:
        return self.function(x, **{name: getattr(self, name) for name in self.names})
