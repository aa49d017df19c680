"""Strict virtual devices refuse what would fail on accelerators, and count the memory that these would need."""

from __future__ import annotations

import gc
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Cluster, Pipeline
from pipepart.autograd import graph_cut
from pipepart.autograd.own_copy import tensors
from pipepart.emulation.device import StrictDevice
from pipepart.emulation.memory import storages, tag_of
from tests.support import plain
from tests.support.chains import cut_by_hand, plan_by_hand
from tests.support.in_backward import with_gradient
from tests.support.two_parts import Calls

MIXED = "expected all tensors on one device"
ON_HOST = "lives on none, in the memory of the host"


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *layers, nn.Linear(4, 4))


def check_refused(model: nn.Module, *words: str, **options: Any) -> None:
    """A step says all of the words in its error or the notes of that."""
    with (
        cut_by_hand(model, [2], loss_fn=nn.MSELoss(), strict=True, **options) as pipe,
        pytest.raises(RuntimeError, match=MIXED) as caught,
    ):
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert not [one for one in words if one not in text], text


def lives_on_a_device(message: Any) -> bool:
    return any(tag_of(storage) for tensor in tensors(message) for storage in storages(tensor))


def move_all_but(monkeypatch: pytest.MonkeyPatch, wanted: Callable[[Any], bool]) -> None:
    """The runtime forgets to move the messages that are ``wanted``, when they are sent and when they are used."""
    received = StrictDevice.received
    monkeypatch.setattr(StrictDevice, "received", lambda device, m: m if wanted(m) else received(device, m))


FORGOTTEN: dict[str, tuple[Callable[[Any], bool], str, tuple[str, ...]]] = {
    "message": (
        lives_on_a_device,
        "1f1b",
        (
            "aten.addmm.default runs on virtual:1",
            "a tensor of shape (2, 4) that lives on virtual:0",
            "tensor.to(x.device)",
            "in the forward of layer '2' (Linear)",
            "stage 1 of 2 on virtual:1, micro-batch 0 of 3 (action 1F0)",
        ),
    ),
    "gradient": (
        lambda message: isinstance(message, list),  # as gradients are sent
        "zb-h1",
        ("runs on virtual:0 and was given a tensor of shape (2, 4) that lives on virtual:1", "(action 0"),
    ),
    "input": (lambda message: True, "1f1b", (ON_HOST,)),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_a_missing_copy_names_operation_devices_shape_and_place(monkeypatch, what):
    wanted, schedule, words = FORGOTTEN[what]
    move_all_but(monkeypatch, wanted)
    check_refused(chain(), *words, schedule=schedule)


def test_a_missing_copy_of_what_the_caller_goes_backward_from(monkeypatch):
    monkeypatch.setattr(graph_cut, "move_gradients", lambda gradients, device: gradients)
    with cut_by_hand(chain(), [2], strict=True) as pipe:
        out = pipe(torch.randn(6, 4))
        with pytest.raises(RuntimeError, match=r"runs on virtual:1 .* shape \(2, 4\) .* memory of the host"):
            (out * torch.randn(6, 4)).sum().backward()


def test_a_parameter_on_the_device_of_another_stage():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), strict=True) as pipe:
        model[3].get_parameter("weight").data = model[0].get_parameter("weight").data
        with pytest.raises(
            RuntimeError, match="lives on virtual:0: parameter 'weight' of layer '0'"
        ) as caught:
            pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
    assert "in the forward of layer '3' (Linear)" in "\n".join(caught.value.__notes__)


class Masked(nn.Module):
    """Multiplies by a tensor that it holds in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.linspace(1, 2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def masked_by_a_buffer() -> Calls:
    return Calls(lambda x, mask: x * mask, mask=nn.Buffer(torch.linspace(1, 2, 4)))


def tenfold(x: Tensor) -> Tensor:
    return with_gradient(x, lambda gradient: gradient * torch.full((4,), 10.0), lambda x: x * 10)


def kept_from_an_earlier_stage() -> nn.Sequential:
    kept: SimpleQueue[Tensor] = SimpleQueue()

    def keep(x: Tensor) -> Tensor:
        kept.put(x)
        return x

    return nn.Sequential(nn.Linear(4, 4), Calls(keep), Calls(lambda x: x + kept.get()), nn.Linear(4, 4))


UNSAID = f"{ON_HOST}: made outside of the step, or in it without device="
IN_FORWARD, IN_BACKWARD = "in the forward of layer '2' (Calls)", "on stage 1 of 2"
REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "a mask that is no buffer": (
        lambda: chain(nn.Sequential(Masked())),
        (f"shape (4,) that {ON_HOST}: attribute 'mask' of layer '2.0'", "self.register_buffer('mask', ...)"),
    ),
    "a tensor of an earlier stage": (
        kept_from_an_earlier_stage,
        ("aten.add.Tensor runs on virtual:1", "a tensor of shape (2, 4) that lives on virtual:0"),
    ),
    "made ones": (lambda: chain(Calls(lambda x: x * torch.ones(4))), (UNSAID, IN_FORWARD)),
    "made in a backward": (lambda: chain(Calls(tenfold)), (UNSAID, IN_BACKWARD)),
}


@pytest.mark.parametrize("bug", REFUSED)
def test_a_bug_of_a_layer_is_named(bug):
    make, words = REFUSED[bug]
    check_refused(make(), *words)


def spoil(x: Tensor) -> Tensor:
    """Writes over what it is given by a way that autograd does not see."""
    x.data.zero_()
    return x * 1


def spoil_a_copy(x: Tensor) -> Tensor:
    return spoil(x.clone())


def there_and_back(x: Tensor) -> Tensor:
    """Copies to the device or to the host itself, whose gradient comes back the same way."""
    table = torch.arange(4.0)
    return (
        (x.cpu() * table).to(x.device) + table.to(x.device) + x.new_ones(4) + torch.ones(4, device=x.device)
    )


def made_for_the_device(x: Tensor) -> Tensor:
    x = x * torch.ones(4, device=x.device) + torch.zeros(4).type_as(x)
    return x * torch.tensor(2.0) + torch.as_tensor(torch.arange(4), device=x.device)


def turned(x: Tensor) -> Tensor:
    return x[:, torch.tensor([3, 2, 1, 0])]


# Layers that may be used, and what computes the same by itself; the Tanh before a message has saved its output.
ALLOWED: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    **{
        name: (lambda layer=layer: Calls(layer), lambda same=same: Calls(same), recompute)
        for name, layer, same, recompute in (
            ("copies of its own", there_and_back, there_and_back, "never"),
            ("made for the device", made_for_the_device, made_for_the_device, "never"),
            ("indices", turned, turned, "never"),
            ("a write over a message", spoil, spoil_a_copy, "never"),
            ("a write over a message, twice", spoil, spoil_a_copy, "always"),
        )
    },
    "a mask in a buffer": (masked_by_a_buffer, masked_by_a_buffer, "never"),
}


@pytest.mark.parametrize("what", ALLOWED)
def test_what_accelerators_allow_has_the_numbers_of_the_plain_model(what):
    make, same, recompute = ALLOWED[what]
    model, reference = chain(make()), chain(same())
    reference.load_state_dict(model.state_dict())
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), strict=True, recompute=recompute) as pipe:  # type: ignore[arg-type]
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, nn.MSELoss(), 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))


WIDTH = 64
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
ROW = 4 * WIDTH
LOSSES = 100  # some numbers that a worker lets go of when it is idle, just after the take_step


def linears(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


def batch(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)


def take_step(pipe: Pipeline) -> None:
    x, y = batch(6)
    pipe.step(x, target=y)


def limited(model: nn.Module, memory: int, micro_batches: int = 2) -> Pipeline:
    plan = plan_by_hand(["0", "1", "2", "3"], [3], micro_batches=micro_batches, schedule="gpipe")
    plan = plan.model_copy(update={"cluster": Cluster.virtual(2, memory=memory, threads=1)})
    return Pipeline(model, plan, nn.MSELoss(), strict=True)


def test_parameters_are_counted_at_once_and_gradients_after_a_step_and_no_more():
    with cut_by_hand(linears(), [1], loss_fn=nn.MSELoss(), strict=True) as pipe:
        assert {name: one.allocated for name, one in pipe.memory().items()} == {
            "virtual:0": LAYER,
            "virtual:1": 3 * LAYER,
        }
        for _ in range(3):
            take_step(pipe)
            found = pipe.memory()["virtual:1"]
            assert (found.by_category["parameters"], found.by_category["gradients"]) == (3 * LAYER, 3 * LAYER)
            assert found.allocated - 6 * LAYER <= LOSSES
        pipe.zero_grad()
        assert pipe.memory()["virtual:1"].allocated - 3 * LAYER <= LOSSES


def test_one_parameter_of_several_stages_of_a_device_counts_once():
    model = linears()
    model[2].weight = model[0].weight
    how: dict[str, Any] = {"schedule": "interleaved-1f1b", "chunks": 2, "micro_batches": 2}
    with cut_by_hand(model, [1, 2, 3], loss_fn=nn.MSELoss(), strict=True, **how) as pipe:
        take_step(pipe)
        parameters = pipe.memory()["virtual:0"].by_category["parameters"]
    assert parameters == LAYER + ROW


def test_what_does_not_fit_is_refused_with_what_is_in_use_and_a_smaller_step_works():
    model = linears()
    with limited(model, 7 * LAYER + 40 * ROW) as pipe:
        x, y = batch(384)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            pipe.step(x, target=y)
        text, notes = str(caught.value), "\n".join(caught.value.__notes__)
        assert (
            "virtual:0 is out of memory: aten.addmm.default, which makes a tensor of shape (192, 64)" in text
        )
        assert "96.8 KiB of its 123.8 KiB are in use" in text
        assert "in the forward of layer '0' (Linear)" in notes
        assert "stage 0 of 2 on virtual:0, micro-batch 0 of 2 (action 0F0)" in notes
        del caught
        gc.collect()
        pipe.zero_grad()
        assert pipe.memory()["virtual:0"].allocated - 3 * LAYER <= LOSSES
        plain.check_step(pipe, *batch(6), nn.MSELoss(), 2)
        assert pipe.memory()["virtual:0"].peak <= 7 * LAYER + 40 * ROW


def test_parameters_that_do_not_fit_to_the_byte_are_refused_when_the_pipeline_is_made():
    limited(linears(), 3 * LAYER).close()
    with pytest.raises(
        torch.OutOfMemoryError, match="virtual:0 is out of memory: one of the parameters of stage 0"
    ):
        limited(linears(), 3 * LAYER - 1)


@pytest.mark.parametrize(("recompute", "kept"), [("never", 2), ("always", 1)])
def test_an_output_that_will_be_differentiated_keeps_the_stash_of_each_stage(recompute, kept):
    """The inputs of two layers, or of the first alone."""
    with cut_by_hand(linears(), [2], micro_batches=6, recompute=recompute, strict=True) as pipe:
        output = pipe(torch.randn(60, WIDTH))
        found = [one.by_category["other"] for one in pipe.memory().values()]
        assert output.requires_grad
    assert found == [pytest.approx(kept * 60 * ROW, abs=LOSSES)] * 2
