# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""If a value read by Python code between blocks changes, the next step is right or raises an error."""

import types
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from enum import Enum
from functools import partial, update_wrapper
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipepart.capture import CaptureError, RecordedChain, chain_of
from tests.capture import other_file
from tests.support.awkward import Base
from tests.support.recorded import piped, plainly

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(4))
SCALE = 1.0
SCALES = {"all": 1.0}
FACTOR: ContextVar[float] = ContextVar("FACTOR", default=1.0)


class Mode(Enum):
    ONE = 1
    TWO = 2


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0

    def value(self) -> float:
        return self.scale


class OfClass:
    scale = 1.0


class Block(nn.Linear):
    of_blocks = 1.0

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.gain = 1.0
        self.hidden = 1.0
        self.settings = {"scale": 1.0}
        self.unread = 1.0

    def factor(self) -> float:
        return self.hidden * self.of_blocks * self.settings["scale"]


class Model(nn.Module):
    """Reads one attribute of every kind between its blocks."""

    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.number = 1.0
        self.limit = 0.0
        self.numbers = [1.0, 1.0]
        self.named = {"scale": (1.0,)}
        self.settings = types.SimpleNamespace(scale=1.0)
        self.mode = Mode.ONE
        self.act: Any = torch.tanh
        self.none: Any = None
        self.slotted = Slotted()
        self.value = Slotted().value
        self.part: Any = partial(torch.mul, other=1.0)
        self.array = np.ones(2)
        self.kind: Any = OfClass
        self.tensor = torch.ones(6)
        self.number_in_a_tensor = torch.ones(())
        self.deep = {"a": {"b": {"c": {"d": types.SimpleNamespace(e=types.SimpleNamespace(scale=1.0))}}}}
        inside = 1.0

        def closed(x: Tensor) -> Tensor:
            return x * inside

        def set_inside(value: float) -> None:
            nonlocal inside
            inside = value

        self.closed, self.set_inside = closed, set_inside

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.act(block(x)) * block.gain * (2.0 if block.weight.requires_grad else 1.0)
            x = (x if block.training else -x) * block.factor()
        x = x * self.number * self.numbers[0] * self.named["scale"][0] * self.settings.scale
        x = x * self.mode.value * self.of_class * self.tensor * SCALE * self.scaled(1.0)
        x = self.part(x) * self.slotted.scale * self.value() * float(self.array[0]) * self.kind.scale
        x = x * 2 if "added" in self._buffers else x
        x = other_file.scaled(x) * FACTOR.get() * getattr(self.blocks[1], "by_name", 1.0)
        x = x * self.number_in_a_tensor.item() * self.deep["a"]["b"]["c"]["d"].e.scale
        x = x if self.limit == self.limit else x * 3
        return self.closed(x if self.none is None else x * 5)

    def scaled(self, factor: float) -> float:
        return factor * SCALES["all"]


def _hook(model: Model) -> None:
    model.register_forward_hook(lambda module, args, output: output * 3)


def _forward(model: Model) -> None:
    original = model.forward
    model.forward = lambda x: original(x) * 2


def _without_unread(model: Model) -> nn.Module:
    del model.blocks[1].unread
    return model.blocks[1]


CHANGES: dict[str, Callable[[Model], Any]] = {
    "number": lambda model: setattr(model, "number", 2.0),
    "not a number": lambda model: setattr(model, "limit", float("nan")),
    "list": lambda model: model.numbers.__setitem__(0, 2.0),
    "another list": lambda model: setattr(model, "numbers", [2.0]),
    "nest": lambda model: model.named.update(scale=(2.0,)),
    "object": lambda model: setattr(model.settings, "scale", 2.0),
    "enum": lambda model: setattr(model, "mode", Mode.TWO),
    "function": lambda model: setattr(model, "act", torch.sigmoid),
    "none": lambda model: setattr(model, "none", object()),
    "tensor": lambda model: setattr(model, "tensor", torch.full((6,), 2.0)),
    "closure": lambda model: model.set_inside(2.0),
    "block": lambda model: setattr(model.blocks[1], "gain", 2.0),
    "training of a block": lambda model: model.blocks[1].eval(),
    "frozen block": lambda model: model.blocks[1].requires_grad_(False),
    "slots": lambda model: setattr(model.slotted, "scale", 2.0),
    "owner of a method": lambda model: setattr(model.value.__self__, "scale", 2.0),
    "partial": lambda model: model.part.keywords.update(other=2.0),
    "array": lambda model: model.array.fill(2.0),
    "method of a block": lambda model: setattr(model.blocks[1], "hidden", 2.0),
    "dict of a block": lambda model: model.blocks[1].settings.update(scale=2.0),
    "added buffer": lambda model: model.register_buffer("added", torch.ones(1)),
    "hook": _hook,
    "forward": _forward,
    "attribute by its name": lambda model: setattr(model.blocks[1], "by_name", 2.0),
    "attribute in place of another": lambda model: setattr(_without_unread(model), "by_name", 2.0),
    "tensor filled in place": lambda model: model.number_in_a_tensor.fill_(2.0),
    "deep in settings": lambda model: setattr(model.deep["a"]["b"]["c"]["d"].e, "scale", 2.0),
}


def _assert_right_after(change: Callable[[Any], Any], kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, plain = kind(), kind()
    plain.load_state_dict(model.state_dict())
    with piped(model, X, loss_fn=nn.functional.mse_loss) as pipe:
        pipe.step(X, target=Y)
        model.zero_grad()
        change(model)
        loss = pipe.step(X, target=Y)
    change(plain)
    expected = plainly(plain, X, target=Y, loss_fn=nn.functional.mse_loss)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or other.grad is None or torch.equal(one.grad, other.grad)


class _Reads:
    def times(self, x: Tensor) -> Tensor:
        return x * SCALES["all"]


class _OfReads(_Reads):
    def times(self, x: Tensor) -> Tensor:
        return super().times(x)


class _Operator:
    def __mul__(self, x: Tensor) -> Tensor:
        return x * SCALES["all"]


def _decorated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def decorated(x: Tensor) -> Tensor:
        return function(x) * SCALES["all"]

    return decorated


class _Holds(Base):
    """Calls what it holds after its blocks."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def after(self, x: Tensor) -> Tensor:
        return self.held.times(x)


class _CallsItsBaseClass(_Holds):
    def after(self, x: Tensor) -> Tensor:
        return super().after(x)


def _holding(held: Any, after: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: type("Holds", (_Holds,), {"after": after})(held)


class _OfClasses(type):
    gain = 1.0


class _Gives:
    value = 1.0

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.value


class _Inherited(metaclass=_OfClasses):
    scale = 1.0
    given = _Gives()


class _Inherits(_Inherited):
    pass


def _defaulted(scale: float = 1.0) -> float:
    return scale


NAMES = ("other", "scale")


def _reads(held: Any, read: Callable[[Any], float]) -> Callable[[], nn.Module]:
    return _holding(held, lambda self, x: x * read(self.held))


class _Hooked:
    """A forward that is an object, as libraries put it in the place of a method."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.old = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.old(*args, **kwargs)


def _hooked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._old_forward(*args, **kwargs)


def _replaced(way: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: Any = Model()
        model._old_forward = old = model.forward
        model.forward = update_wrapper(way(model), old)
        return model

    return make


class _Gains(nn.Linear):
    calls, gain_2 = 0, 1.0

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.gain_0 = self.gain_1 = 1.0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input)


class _ByName(Base):
    """Reads attributes by names that it computes, of blocks that count for themselves."""

    Block = _Gains

    def __init__(self, read: Callable[[Any, int], float]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x) * self.read(block, index)
        return x


BY_NAME: dict[str, Callable[[Any, int], float]] = {
    "getattr": lambda block, index: getattr(block, f"gain_{index}"),
    "with a default": lambda block, index: getattr(block, "gain_" + str(index), block.bias.dim() / 2),
    "a function that is passed on": lambda block, index: next(map(getattr, [block], [f"gain_{index}"])),
    "hasattr": lambda block, index: 2.0 if hasattr(block, f"more_{index}") else 1.0,
}


def _gain(model: Any) -> None:
    model.blocks[1].gain_1, model.blocks[1].more_1 = 2.0, True


def _attribute(owner: Any, name: str, value: Any = 2.0) -> Callable[[pytest.MonkeyPatch], Any]:
    return lambda patch: patch.setattr(owner, name, value)


class _Part(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * SCALES["all"]


class _CallsAPart(nn.Module):
    """Calls a part of a block beside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([nn.Sequential(_Part(6, 6), nn.Tanh()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0][0](self.blocks[0](x)))


ALL, OF_INHERITED = (SCALES, "all"), _attribute(_Inherited, "scale")
# Makes of a model, and the global dict and key or the attribute that changes.
OUTSIDE: dict[str, tuple[Callable[[], nn.Module], tuple[Any, str] | Callable[[pytest.MonkeyPatch], Any]]] = {
    "a global": (Model, (globals(), "SCALE")),
    "inside a global that a method reads": (Model, ALL),
    "in another file": (Model, (other_file.SCALE, "all")),
    "a context variable": (Model, lambda _: FACTOR.set(2.0)),
    "the class": (Model, _attribute(Model, "of_class")),
    "the class of blocks": (Model, _attribute(Block, "of_blocks")),
    "a class that is held": (Model, _attribute(OfClass, "scale")),
    "a method of an object": (lambda: _Holds(_Reads()), ALL),
    "a method of a base class": (lambda: _Holds(_OfReads()), ALL),
    "a method of the model's base class": (lambda: _CallsItsBaseClass(_Reads()), ALL),
    "a method of an object in a list": (_holding([_Reads()], lambda self, x: self.held[0].times(x)), ALL),
    "an operator": (_holding(_Operator(), lambda self, x: self.held * x), ALL),
    "a decorated function": (_holding(_decorated(torch.tanh), lambda self, x: self.held(x)), ALL),
    "the class of an object": (_reads(_Inherits(), lambda held: held.scale), OF_INHERITED),
    "a base class": (_reads([_Inherits], lambda held: held[0].scale), OF_INHERITED),
    "a class in a namespace": (
        _reads(types.SimpleNamespace(inner={"kind": OfClass}), lambda held: held.inner["kind"].scale),
        _attribute(OfClass, "scale"),
    ),
    "a metaclass": (_reads(_Inherits, lambda held: held.gain), _attribute(_OfClasses, "gain")),
    "a descriptor": (_reads(_Inherits(), lambda held: held.given), _attribute(_Gives, "value")),
    "a name in a table": (_reads(_Inherits(), lambda held: getattr(held, NAMES[1])), OF_INHERITED),
    "a default": (_reads(_defaulted, lambda held: held()), _attribute(_defaulted, "__defaults__", (2.0,))),
    "in a part of a block": (_CallsAPart, ALL),
    "behind a forward that is a partial": (_replaced(lambda model: partial(_hooked, model)), ALL),
    "behind a forward that is an object": (_replaced(lambda model: _Hooked(model.forward)), ALL),
    "a class by a computed name": (lambda: _ByName(BY_NAME["getattr"]), _attribute(_Gains, "gain_2")),
}


@pytest.mark.parametrize("name", [*CHANGES, *OUTSIDE])
def test_a_change_is_noticed(name, monkeypatch):
    kind, where = OUTSIDE[name] if name in OUTSIDE else (Model, CHANGES[name])

    def change(model: Any) -> None:
        if isinstance(where, tuple):
            monkeypatch.setitem(*where, 2.0)
        else:
            where(model if name in CHANGES else monkeypatch)

    copy_context().run(_assert_right_after, change, kind)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_change_that_is_read_by_a_computed_name_is_noticed(name):
    _assert_right_after(_gain, lambda: _ByName(BY_NAME[name]))
    chain = chain_of(_ByName(BY_NAME[name]), split_loss=False)
    assert isinstance(chain, RecordedChain)
    chain.use_fake_parameters()
    first, again = (chain.bind((X,), {}).live.recording for _ in range(2))
    assert first is again
    _gain(chain.model)
    assert chain.bind((X,), {}).live.recording is not first


def test_another_order_of_the_blocks_is_refused():
    model = Model()
    with piped(model, X, loss_fn=nn.functional.mse_loss) as pipe:
        pipe.step(X, target=Y)
        model.blocks = nn.ModuleList(list(model.blocks)[::-1])
        with pytest.raises(CaptureError, match=r"calls module 'blocks\.1' where its layers do not"):
            pipe.step(X, target=Y)


def test_a_value_that_changes_again_and_again_is_named():
    model = _Holds(types.SimpleNamespace(step=0, times=lambda x: x))
    chain = chain_of(model, split_loss=False)
    for _ in range(16):
        chain.bind((X,), {})
        model.held.step += 1
    with pytest.warns(UserWarning, match="was recorded for 16 values .* because held.step changed"):
        chain.bind((X,), {})
