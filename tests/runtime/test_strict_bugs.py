"""Strict virtual devices refuse what would fail on accelerators: bugs seeded in models and in the runtime."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from pipepart.autograd import graph_cut
from pipepart.autograd.own_copy import tensors
from pipepart.runtime.emulation.device import StrictDevice
from pipepart.runtime.emulation.memory import storages, tag_of
from tests.support import plain
from tests.support.chains import cut_by_hand, plan_by_hand

MIXED = "expected all tensors on one device"


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *layers, nn.Linear(4, 4))


def failure(model: nn.Module, borders: list[int], **options: Any) -> RuntimeError:
    with (
        cut_by_hand(model, borders, loss_fn=nn.MSELoss(), strict=True, **options) as pipe,
        pytest.raises(RuntimeError, match=MIXED) as caught,
    ):
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
    return caught.value


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def lives_on_a_device(message: Any) -> bool:
    return any(tag_of(storage) for tensor in tensors(message) for storage in storages(tensor))


def move_all_but(monkeypatch: pytest.MonkeyPatch, wanted: Callable[[Any], bool]) -> None:
    """The runtime forgets to move the messages that are ``wanted``, when they are sent and when they are used."""
    received = StrictDevice.received
    monkeypatch.setattr(StrictDevice, "received", lambda device, m: m if wanted(m) else received(device, m))


def test_a_missing_copy_of_a_message_names_operation_devices_shape_and_place(monkeypatch):
    move_all_but(monkeypatch, lives_on_a_device)
    error = failure(chain(), [2])
    text = str(error)
    assert "aten.addmm.default runs on virtual:1" in text
    assert "a tensor of shape (2, 4) that lives on virtual:0" in text
    assert "tensor.to(x.device)" in text
    assert "in the forward of layer '2' (Linear)" in notes(error)
    assert "stage 1 of 2 on virtual:1, micro-batch 0 of 3 (action 1F0)" in notes(error)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_missing_copy_of_a_gradient(monkeypatch, schedule):
    move_all_but(monkeypatch, lambda message: isinstance(message, list))  # as gradients are sent
    error = failure(chain(), [2], schedule=schedule)
    assert "runs on virtual:0 and was given a tensor of shape (2, 4) that lives on virtual:1" in str(error)
    assert "in the backward of layer '1' (Tanh)" in notes(error)


def test_a_missing_copy_of_the_input(monkeypatch):
    move_all_but(monkeypatch, lambda message: True)
    assert "lives on none, in the memory of the host" in str(failure(chain(), [2]))


def test_a_missing_copy_of_the_target(monkeypatch):
    move_all_but(monkeypatch, lambda message: message.shape[1:] == (3,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    with (
        cut_by_hand(model, [1], loss_fn=nn.MSELoss(), strict=True) as pipe,
        pytest.raises(
            RuntimeError, match=r"aten.mse_loss.default runs on virtual:1.*in the memory of the host"
        ) as caught,
    ):
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 3))
    assert "in the forward of the loss" in notes(caught.value)


def test_a_missing_copy_of_what_the_caller_goes_backward_from(monkeypatch):
    monkeypatch.setattr(graph_cut, "move_gradients", lambda gradients, device: gradients)
    with cut_by_hand(chain(), [2], strict=True) as pipe:
        out = pipe(torch.randn(6, 4))
        with pytest.raises(RuntimeError, match=r"runs on virtual:1 .* shape \(2, 4\) .* memory of the host"):
            (out * torch.randn(6, 4)).sum().backward()


def test_a_missing_copy_of_the_gradients_of_a_copy_of_the_model(monkeypatch):
    move_all_but(monkeypatch, lambda message: lives_on_a_device(message) and len(tensors(message)[0]) == 4)
    model = chain()
    plan = plan_by_hand(["0", "1", "2"], [2], replicas=2, micro_batches=4)
    with Pipeline(model, plan, nn.MSELoss(), strict=True) as pipe, pytest.raises(RuntimeError, match=MIXED):
        pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))


def test_a_parameter_on_the_device_of_another_stage():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), strict=True) as pipe:
        model[3].get_parameter("weight").data = model[0].get_parameter("weight").data
        with pytest.raises(
            RuntimeError, match="lives on virtual:0: parameter 'weight' of layer '0'"
        ) as caught:
            pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
    assert "in the forward of layer '3' (Linear)" in notes(caught.value)


class Masked(nn.Module):
    def __init__(self, buffer: bool = False) -> None:
        super().__init__()
        mask = torch.ones(4)
        if buffer:
            self.register_buffer("mask", mask)
        else:
            self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def test_a_mask_that_is_no_buffer_is_named():
    error = failure(chain(nn.Sequential(Masked())), [2])
    assert "shape (4,) that lives on none, in the memory of the host: attribute 'mask' of layer '2.0'" in str(
        error
    )
    assert "self.register_buffer('mask', ...)" in str(error)


def test_masks_in_a_list_of_a_part_of_a_layer_are_named():
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masks = [torch.ones(4), torch.ones(4)]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.masks[1]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    assert "attribute 'inner.masks' of layer '2' (Outer)" in str(failure(chain(Outer()), [2]))


def test_a_mask_that_is_a_buffer_may_be_used():
    model = chain(Masked(buffer=True))
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), strict=True) as pipe:
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))


def test_a_tensor_that_a_layer_keeps_from_an_earlier_stage():
    kept: list[Tensor] = []

    class Keep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept[:] = [x]
            return x

    class Add(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + kept[0]

    error = failure(nn.Sequential(nn.Linear(4, 4), Keep(), nn.Tanh(), Add(), nn.Linear(4, 4)), [2])
    assert (
        "aten.add.Tensor runs on virtual:1 and was given a tensor of shape (2, 4) that lives on virtual:0"
        in str(error)
    )


def test_weights_of_the_loss_that_it_holds_in_no_buffer():
    weight = torch.ones(4)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target).square() * weight).mean()

    with (
        cut_by_hand(chain(), [2], loss_fn=loss_fn, strict=True, reduction="mean") as pipe,
        pytest.raises(
            RuntimeError, match=r"shape \(4,\) .* in the memory of the host: made outside of the step"
        ),
    ):
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))


class Spoil(nn.Module):
    """Writes over what it is given, by a way that autograd does not see."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.zero_()
        return x * 1


class SpoilCopy(nn.Module):
    """Computes the same from a copy."""

    def forward(self, x: Tensor) -> Tensor:
        copy = x.clone()
        copy.data.zero_()
        return copy * 1


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_layer_that_writes_over_a_message_writes_over_a_copy(recompute):
    """The Tanh before it has saved its output, and would have another gradient."""
    model, reference = chain(Spoil()), chain(SpoilCopy())
    reference.load_state_dict(model.state_dict())
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), strict=True, recompute=recompute) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


def test_a_write_into_a_message_that_was_not_copied(monkeypatch):
    move_all_but(monkeypatch, lives_on_a_device)
    assert "aten.zero_.default runs on virtual:1" in str(failure(chain(Spoil()), [2]))


def test_a_layer_that_writes_into_the_input_writes_into_a_copy():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    x = torch.randn(6, 4)
    before = x.clone()
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), strict=True) as pipe:
        pipe.step(x, target=torch.randn(6, 4))
    assert x.equal(before)


def test_numbers_of_the_host_without_dimensions_may_be_read_and_not_written():
    class Counting(nn.Module):
        def __init__(self, writes: bool) -> None:
            super().__init__()
            self.count = torch.ones(())
            self.writes = writes

        def forward(self, x: Tensor) -> Tensor:
            if self.writes:
                self.count.add_(x.detach().sum())
            return x * self.count

    with cut_by_hand(chain(Counting(False)), [2], loss_fn=nn.MSELoss(), strict=True) as pipe:
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
    assert "attribute 'count' of layer '2' (Counting)" in str(failure(chain(Counting(True)), [2]))


def test_what_a_layer_copies_to_its_device_or_to_the_host_itself():
    """As on accelerators; its gradient comes back the same way."""

    class There(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.arange(4.0)

        def forward(self, x: Tensor) -> Tensor:
            back = (x.cpu() * self.table).to(x.device)
            return back + self.table.to(x.device) + x.new_ones(4) + torch.ones(4, device=x.device)

    model = chain(There())
    reference = plain.twin(model)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), strict=True) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


class Tenfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 10

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.full((4,), 10.0)


MAKES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "ones": ("forward", lambda x: x * torch.ones(4)),
    "positions": ("forward", lambda x: x + torch.arange(4)),
    "noise": ("forward", lambda x: x + torch.randn(4)),
    "of a list": ("forward", lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0])),
    "in a backward": ("backward", lambda x: Tenfold.apply(x)),
}


class Makes(nn.Module):
    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return self.make(x)


@pytest.mark.parametrize("made", MAKES)
def test_what_a_layer_makes_without_a_word_of_the_device(made):
    where, make = MAKES[made]
    error = failure(chain(Makes(make)), [2])
    assert (
        "lives on none, in the memory of the host: made outside of the step, or in it without device="
        in str(error)
    )
    assert f"in the {where} of layer '2' (Makes)" in notes(error)


def test_what_a_hook_makes_without_a_word_of_the_device():
    def hooked(x: Tensor) -> Tensor:
        y = x * 1
        y.register_hook(lambda gradient: gradient * torch.ones(4))
        return y

    error = failure(chain(Makes(hooked)), [2])
    assert "in the memory of the host" in str(error)
    assert "in the backward of layer '2' (Makes)" in notes(error)


def test_what_a_layer_makes_for_its_device_and_numbers_may_be_used():
    def make(x: Tensor) -> Tensor:
        x = x * torch.ones(4, device=x.device) + torch.zeros(4).type_as(x)
        return x * torch.tensor(2.0) + torch.as_tensor(torch.arange(4), device=x.device)

    with cut_by_hand(chain(Makes(make)), [2], loss_fn=nn.MSELoss(), strict=True) as pipe:
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))


def test_indices_of_the_host_may_be_used():
    class Pick(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.order = torch.tensor([3, 2, 1, 0])

        def forward(self, x: Tensor) -> Tensor:
            return x[:, self.order]

    with cut_by_hand(chain(Pick()), [2], loss_fn=nn.MSELoss(), strict=True) as pipe:
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))


def test_the_next_step_works():
    model = chain(Masked())
    reference = chain(Masked())
    reference.load_state_dict(model.state_dict())
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), strict=True) as pipe:
        with pytest.raises(RuntimeError, match=re.escape(MIXED)):
            pipe.step(x, target=y)
        del model[2].mask
        model[2].register_buffer("mask", torch.ones(4))
        pipe.zero_grad()
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


@pytest.mark.parametrize("bug", [Masked, Spoil])
def test_without_strict_nothing_is_looked_at(bug):
    with cut_by_hand(chain(bug()), [2], loss_fn=nn.MSELoss()) as pipe:
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
