"""The names of a module's tables of hooks, and a check for hooks in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
HOOKS = tuple(
    name for name, table in vars(nn.Module()).items() if "_hooks" in name and isinstance(table, dict)
)
"""Attributes of a module that hold hooks of any kind."""

CALL_HOOKS = (*FORWARD_HOOKS, *BACKWARD_HOOKS)
"""Attributes of a module that hold what runs with its call."""


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """Return the hooks of a module that run with its call."""
    for table in CALL_HOOKS:
        yield from getattr(module, table).values()


def has_hooks(module: nn.Module, tables: tuple[str, ...] = CALL_HOOKS) -> bool:
    """Return True if a module (without its children) has hooks in one of these tables."""
    return any(getattr(module, table) for table in tables)
