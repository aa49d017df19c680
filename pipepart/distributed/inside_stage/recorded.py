"""Records a model as it was before its layers were parallelized, whose hooks would send between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...capture import HOOKS


class ModelBefore:
    """The attributes and hooks of a model's modules before they were parallelized.

    Args:
        model: whose layers will be parallelized.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables = [table for module in model.modules() for table in _tables(module)]
        self._before = [set(table) for table in self._tables]
        self._added: list[tuple[dict[Any, Any], set[Any]]] = []

    def find_added(self) -> None:
        """Note what was added since."""
        pairs = zip(self._tables, self._before, strict=True)
        added = [(table, set(table) - before) for table, before in pairs]
        self._added = [(table, keys) for table, keys in added if keys]

    @contextmanager
    def without_added(self) -> Iterator[None]:
        """Context manager within which the modules have none of that. Their parameters stay shards."""
        # Of hooks the order counts, so all of a table are kept.
        hidden = [(table, dict(table)) for table, _ in self._added]
        for table, keys in self._added:
            for key in keys & table.keys():
                del table[key]
        try:
            yield
        finally:
            for table, entries in hidden:
                now = dict(table)
                table.clear()
                table.update(entries | now)


def _tables(module: nn.Module) -> list[dict[Any, Any]]:
    held = vars(module)
    return [held, *(held[name] for name in HOOKS if name in held)]
