"""Decides which modules of a model are whole (recorded as single calls) and which are open (recorded inside).

::

    LlamaForCausalLM          opened: its forward is recorded
    ├── model                 opened, as the way to the blocks
    │   ├── embed_tokens      whole, beside the way
    │   ├── layers.0 ...      whole: blocks, the children of a ModuleList
    │   └── norm              whole
    └── lm_head               whole
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

import torch
from torch import nn

from ...hooks import BACKWARD_HOOKS, has_hooks
from ..python_state.code import is_of_torch
from ..refusal import CaptureError


class Opening:
    """The modules of a model that are whole: recorded as single calls.

    Args:
        model: the user's.
        layers: paths of modules that stay whole, with what stands beside the ways to them; None for the children of
            the outermost ModuleLists and Sequentials.
        opened: paths of other modules that do not stay whole.

    Attributes:
        whole: path of each module that stays whole.
        notes: what was opened or left whole beyond that, and why.

    Raises:
        CaptureError: the model has no module of a path in ``layers``.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[str] | None = None, opened: Sequence[str] = ()
    ) -> None:
        self._model = model
        self.notes: list[str] = []
        paths = list(_blocks(model, "")) if layers is None else list(layers)
        known = {path for path, _ in model.named_modules(remove_duplicate=False)}
        if missing := [path for path in paths if path not in known]:
            raise CaptureError(f"layers: the {type(model).__name__} has no module {missing[0]!r}")
        self._tried: set[str] = set()
        self.whole: dict[nn.Module, str] = {}
        for path, module in _beside(model, {*_ways([*paths, *opened]), *opened}, ""):
            self.whole.setdefault(module, path)

    def open(self, path: str, why: str, alone: bool = False) -> bool:
        """Open a whole module and all whole modules of the same class, or this module alone.

        Returns:
            False if it has no parts that could be recorded, or was opened or left whole on purpose before.
        """
        culprit = self._model.get_submodule(path)
        kind = type(culprit)
        opened = {
            module: list(_beside(module, set(), f"{where}."))
            for module, where in self.whole.items()
            if module is culprit or (type(module) is kind and not alone)
        }
        if path in self._tried or not all(opened.values()):
            return False
        self._tried.update(self.whole[module] for module in opened)
        opened_now: dict[nn.Module, str] = {}
        for module, where in self.whole.items():
            for part, name in (
                (module_here, at) for at, module_here in opened.get(module, [(where, module)])
            ):
                opened_now.setdefault(part, name)
        self.whole = opened_now
        self.notes.append(f"{kind.__name__} opened ({path}): {why}")
        return True

    def make_whole(self, path: str, why: str) -> bool:
        """Make an open module whole; return False if it is the model itself or was opened on purpose."""
        if not path or path in self._tried:
            return False
        self._tried.add(path)
        module = self._model.get_submodule(path)
        inside = set(module.modules())
        self.whole = {part: where for part, where in self.whole.items() if part not in inside} | {
            module: path
        }
        self.notes.append(f"{path} left whole: {why}")
        return True

    def open_loss(self, path: str) -> bool:
        """Open a module without parameters that computes a loss, so that the loss can be traced."""
        module = self._model.get_submodule(path)
        if any(True for _ in (*module.parameters(), *module.buffers())):
            return False
        del self.whole[module]
        self.whole |= {part: where for where, part in _beside(module, set(), f"{path}.")}
        return True

    def copy(self) -> Opening:
        """Return an independent copy, for a trial."""
        copied = copy(self)
        copied.whole, copied.notes, copied._tried = dict(self.whole), list(self.notes), set(self._tried)
        return copied

    def forbid(self, path: str) -> None:
        """Do not open this module from now on."""
        self._tried.add(path)

    def to_open_next(self, calls: Sequence[str]) -> tuple[str, str] | None:
        """Return a whole module with more than half of the parameters, and why it should be opened; None without one.

        Parameters stand for time, so those of embeddings do not count, and shared ones count at each call.

        Args:
            calls: paths of the modules that are called, in order.
        """
        sizes = {path: _parameters(self._model.get_submodule(path)) for path in dict.fromkeys(calls)}
        total = sum(sizes[path] for path in calls)
        for path, size in sizes.items():
            if 2 * size > total and path not in self._tried and self._model.get_submodule(path)._modules:
                return path, f"it has {size / total:.0%} of the parameters"
        return None

    def opened(self) -> Iterator[tuple[str, nn.Module]]:
        """Return (path, module) of each open module."""
        waiting = [("", self._model)]
        seen: set[nn.Module] = set()
        while waiting:
            path, module = waiting.pop()
            if module in self.whole or module in seen:
                continue
            seen.add(module)
            yield path, module
            waiting += [
                (f"{path}.{name}" if path else name, child)
                for name, child in module._modules.items()
                if child is not None
            ]

    def parts(self) -> dict[nn.Module, str]:
        """Return the modules inside of whole ones, each with the path of the whole one.

        Modules of torch without hooks are left out: they read nothing that the user may change in Python. So are those
        with compiled code inside, which must not see the recorder.
        """
        others = {*self.whole, *(module for _, module in self.opened())}
        return {
            part: path
            for module, path in self.whole.items()
            if not any(map(is_compiled, module.modules()))
            for part in module.modules()
            if part not in others and (has_hooks(part) or not is_of_torch(type(part)))
        }


def is_compiled(module: nn.Module) -> bool:
    """Return True for a module that torch.compile has compiled, in place or as a module around it."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _blocks(module: nn.Module, prefix: str) -> Iterator[str]:
    """Return the paths of the outermost repeated blocks."""
    for name, child in module._modules.items():
        if child is None:
            continue
        path = f"{prefix}{name}"
        if has_hooks(child, BACKWARD_HOOKS):
            continue
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > 1:
            yield from (f"{path}.{key}" for key, block in child._modules.items() if block is not None)
        else:
            yield from _blocks(child, f"{path}.")


def _parameters(module: nn.Module) -> int:
    parts = (part for part in module.modules() if not isinstance(part, nn.Embedding))
    return sum(p.numel() for part in parts for p in part.parameters(recurse=False))


def _ways(paths: Sequence[str]) -> set[str]:
    """Return the paths of all modules on the way to these."""
    return {path[:place] for path in paths for place, letter in enumerate(path) if letter == "."}


def _beside(module: nn.Module, ways: set[str], prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Return the modules that stay whole: the ends of the ways, and what stands beside them."""
    for name, child in module._modules.items():
        if child is None:
            continue
        path = f"{prefix}{name}"
        if path in ways or not is_called(child):
            yield from _beside(child, ways, f"{path}.")
        elif not isinstance(child, nn.modules.loss._Loss):  # whose calls tell how to weigh a loss
            yield path, child


def is_called(module: nn.Module) -> bool:
    """Return False for a container, which does not define ``forward``."""
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
        return True
    return type(module).forward is not nn.Module.forward and not isinstance(
        module, nn.ModuleList | nn.ModuleDict
    )
