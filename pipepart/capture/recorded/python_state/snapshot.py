"""Snapshot: the Python values that a model holds at one time, to find and undo the changes of a forward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .access import ITEMS, MISSING, Access, access_to
from .values import Holder, differing, module_holders, unchanged, walk


class Difference(NamedTuple):
    """One value that has changed.

    Attributes:
        holder, key: where.
        was, now: the values; MISSING for none.
    """

    holder: Holder
    key: Any
    was: Any
    now: Any

    @property
    def attribute(self) -> Any:
        """The attribute of a module that has the value, or has the object that it is in."""
        keys = [self.key, *(holder.key for holder in self.holder.chain())]
        return keys[-2]  # the last holder is a root, which has no key

    @property
    def names(self) -> set[Any]:
        """The attribute that has the value, or the collection that it is in, and the keys in that."""
        names: set[Any] = set()
        key = self.key
        for holder in self.holder.chain():
            names.add(key)
            if isinstance(key, str) and key.isidentifier() and not isinstance(holder.owner, dict):
                break
            key = holder.key
        return names

    @property
    def is_of_another(self) -> bool:
        """True if a module has the value that is not part of the model, and that an object in it refers to."""
        chain = self.holder.chain()
        return any(isinstance(holder.owner, nn.Module) and not holder.is_module for holder in chain)


class Snapshot:
    """The values that a model holds at one time.

    Args:
        model: the user's.
        around: holders of other values that its code uses.
        others: reads modules that are not part of the model and that an object in it refers to.
        copies: keep copies of small tensors that are neither parameters nor buffers, to restore their values.

    Attributes:
        found: the holders, with what is in them.
    """

    def __init__(
        self,
        model: nn.Module,
        around: Iterable[Holder] = (),
        others: Access | None = None,
        copies: bool = False,
    ) -> None:
        state = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        modules = [
            holder for path, module in model.named_modules() for holder in module_holders(path, module)
        ]
        # Libraries collect outputs in context variables, which they set for the time of a forward.
        self.found = walk([*modules, *around], state, contexts=False, others=others)
        self._values = {
            holder: holder.owner.detach().clone()
            for holder, _ in self.found
            if copies and isinstance(holder.owner, Tensor) and holder.owner.numel() <= ITEMS
        }

    def held(self) -> dict[int, str]:
        """Map the ids of objects held by modules and of tensors held by globals to their labels in code."""
        return {
            id(value): holder.label_of(key)
            for holder, contents in self.found
            for key, value in contents.items()
            if isinstance(value, Tensor) or (holder.root is not None and access_to(value) is not None)
        }

    def differences(self) -> list[Difference]:
        """Return the values that have changed since the snapshot."""
        result = []
        for holder, was in self.found:
            if not unchanged(holder, was):
                now = holder.read()
                result += [
                    Difference(holder, key, was.get(key, MISSING), now.get(key, MISSING))
                    for key in differing(now, was)
                ]
        return result

    def restore(self) -> None:
        """Restore all values that have changed since the snapshot."""
        for holder, was in self.found:
            if unchanged(holder, was):
                continue
            holder.access.write(holder.owner, was)
            if holder in self._values:
                with torch.no_grad():
                    holder.owner.copy_(self._values[holder])
