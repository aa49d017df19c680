"""What the Python code between recorded calls can read: if any of it changes, a model is recorded again.

::

    def forward(self, x):
        for block in self.blocks:               the modules of the model, in their order
            x = block(x) * block.gain           attributes of whole modules that this code names
            x = self.act(x) * self.scales[0]    attributes of open modules, and what is in them
            x = x * SCALE + offset              globals and closures that this code names
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ...hooks import CALL_HOOKS
from .code import Code, is_of_torch
from .places import CLOSED, PLAIN, TABLES, Place
from .value_key import Same, value_key


class Surroundings:
    """Looks at what the forwards of a model's open modules can read. Their code is looked through once.

    Args:
        model: the user's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._codes: dict[Any, Code] = {}

    def state(self, opened: Sequence[nn.Module]) -> Hashable:
        """Return a key that changes with it."""
        names: set[str] = set()
        seen: set[int] = set()
        found: list[Hashable] = []
        codes: dict[Code, None] = {}
        for module in opened:
            code = self.code_of(module)
            codes[code] = None
            names |= code.names
            found.append(_state_of_open(module, code.names, seen))
        found += [_state_of_code(code, seen) for code in codes]
        is_open = set(opened)
        for module in self._model.modules():
            attributes = vars(module)
            if module not in is_open and (read := names.intersection(attributes) - TABLES):
                values = [(name, attributes[name]) for name in sorted(read)]
                plain = [
                    (name, value)
                    for name, value in values
                    if issubclass(type(value), Tensor) or not issubclass(type(value), CLOSED)
                ]
                found.append(tuple([(name, value_key(value, seen=seen)) for name, value in plain]))
        if "requires_grad" in names:
            found.append(tuple([parameter.requires_grad for parameter in self._model.parameters()]))
        return tuple(found)

    def places(self, opened: Iterable[nn.Module], within: nn.Module | None = None) -> Iterator[Place]:
        """Return the globals, classes and closures that the code of open modules uses, then those of all others.

        Args:
            opened: the open modules.
            within: a module whose parts are all the others; that of the model if None.
        """
        is_open = dict.fromkeys(opened)
        for module in is_open:
            yield from self.code_of(module).places(recorded=True)
        for module in (self._model if within is None else within).modules():
            if module not in is_open and not is_of_torch(type(module)):
                yield from self.code_of(module).places(recorded=False)

    def code_of(self, module: nn.Module) -> Code:
        """Return the code of the forward of a module."""
        forward = module.forward
        function = getattr(forward, "__func__", forward)
        called = type(module).__call__
        key = type(module), function
        if key not in self._codes:
            kinds = dict.fromkeys(type(one) for one in self._model.modules() if not is_of_torch(type(one)))
            self._codes[key] = Code([type(module), *kinds], [function, called])
        return self._codes[key]


def _state_of_open(module: nn.Module, names: set[str], seen: set[int]) -> Hashable:
    attributes = vars(module)
    kind = type(module)
    return (
        Same(kind),
        Same(getattr(module.forward, "__func__", module.forward)),
        tuple([(name, Same(child)) for name, child in module._modules.items()]),
        tuple([(name, value is None) for name, value in module._parameters.items()]),
        tuple([(name, value is None) for name, value in module._buffers.items()]),
        tuple([Same(hook) for table in CALL_HOOKS for hook in attributes[table].values()]),
        tuple(
            [
                (name, value_key(value, seen=seen))
                for name, value in attributes.items()
                if name not in TABLES and (name in names or name == "config" or isinstance(value, PLAIN))
            ]
        ),
    )


def _state_of_code(code: Code, seen: set[int]) -> Hashable:
    """Return a key of the attributes of classes and modules, of the globals and of the variables of closures."""
    return tuple(
        [
            tuple([value_key(value, seen=seen) for value in place.read().values()])
            for place in code.places(recorded=True)
        ]
    )
