"""Records a model as it was before its layers were parallelized, whose hooks would send between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...capture import HOOKS, Group
from ...dtensors import is_dtensor, mesh_names
from ...input_error import InputError
from .units import Unit


class HooksBefore:
    """The hooks of a model's modules before they were parallelized.

    Args:
        model: whose layers will be parallelized.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables = [table for module in model.modules() for table in _tables(module)]
        self._before = [set(table) for table in self._tables]
        self._added: list[tuple[dict[Any, Any], set[Any]]] = []

    def find_added(self) -> None:
        """Note which hooks were added since."""
        pairs = zip(self._tables, self._before, strict=True)
        self._added = [(table, set(table) - before) for table, before in pairs if len(table) > len(before)]

    @contextmanager
    def without_added(self) -> Iterator[None]:
        """Context manager within which these hooks do not run."""
        whole = [(table, dict(table)) for table, _ in self._added]
        for table, added in self._added:
            for key in added & table.keys():
                del table[key]
        try:
            yield
        finally:
            for table, entries in whole:
                table.clear()
                table.update(entries)


def check_functions(model: nn.Module, groups: Mapping[str, Group], units: list[Unit]) -> None:
    """Check that no sharded parameter is used beside the modules of a recorded model.

    Args:
        model: the user's.
        groups: what each layer of this rank calls, by its name.
        units: of FSDP, of this rank.

    Raises:
        ValueError: a function of the model takes one.
    """
    gathered = {one for unit in units if not unit.reshards for one in unit.parameters}
    for name, group in groups.items():
        for path in group.tensors:
            owner, _, key = path.rpartition(".")
            tensor = getattr(model.get_submodule(owner), key)
            if is_dtensor(tensor) and (tensor not in gathered or "tp" in mesh_names(tensor)):
                raise InputError(
                    f"layer {name!r} uses parameter {path!r} in a function, not in a module that parallelize has "
                    "changed, and gets a shard of it: leave the parameter as it is, or use it in a module of its own"
                )


def _tables(module: nn.Module) -> list[dict[Any, Any]]:
    held = vars(module)
    return [held[name] for name in HOOKS if name in held]
