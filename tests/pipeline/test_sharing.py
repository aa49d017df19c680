"""What stages share, and values that go past stages: all are followed whatever the caller does."""

from collections import Counter
from operator import is_
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipepart import Arguments
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.pieces import WIDTH, Recurrent, linear
from tests.support.recorded import assert_same_step, piped
from tests.support.skipping import WIDTH as SKIPPING
from tests.support.skipping import Hourglass, Woven
from tests.support.tied import Head, Rotated, cut_apart, language_model, loss_fn, words

each_cut = pytest.mark.parametrize("cut", [cut_by_hand, cut_apart], ids=["on one device", "on devices apart"])
LOSS = nn.MSELoss()


def tied(head: type[Head], between: nn.Module | None = None) -> nn.Sequential:
    """An embedding, two layers, and a head of this kind with its weight."""
    embedding = nn.Embedding(9, 4)
    return nn.Sequential(embedding, between or nn.Tanh(), nn.Linear(4, 4), head(embedding.weight))


def test_hooks_see_one_parameter_with_the_whole_gradient():
    model = language_model()
    reference = plain.twin(model)
    seen: dict[str, list[Tensor]] = {"ours": [], "theirs": []}
    for side, root in (("ours", model), ("theirs", reference)):
        weight = root.get_parameter("0.weight")
        weight.register_hook(lambda gradient, side=side: seen[side].append(gradient.clone()))
        weight.register_post_accumulate_grad_hook(lambda p, side=side: seen[side].append(p.grad.clone()))
    x, y = words()
    with cut_by_hand(model, [1, 3, 5], loss_fn=loss_fn) as pipe:
        pipe.step(x, target=y)
    plain.micro_batched_step(reference, x, y, loss_fn, 3)
    assert len(seen["ours"]) == len(seen["theirs"]) == 6
    assert all(a.equal(b) for a, b in zip(seen["ours"], seen["theirs"], strict=True))


@each_cut
def test_writing_a_parameter_before_the_backward_is_refused_as_torch_refuses_it(cut):
    """On devices apart the copy that the first forward has saved is written before a second forward."""
    model = language_model()
    x, y = words()
    with cut(model, [1, 3, 5], loss_fn=loss_fn) as pipe:
        loss = loss_fn(pipe(x), y)
        with torch.no_grad():
            model.get_parameter("0.weight").add_(1)
        pipe(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@each_cut
def test_other_parameters_than_those_that_were_shared_are_followed(cut):
    model = language_model()
    x, y = words()
    with cut(model, [1, 3, 5], loss_fn=loss_fn) as pipe:
        pipe.step(x, target=y)
        state = {name: tensor.clone() for name, tensor in language_model().state_dict().items()}
        model.load_state_dict(state, assign=True)
        plain.check_step(pipe, x, y, loss_fn)
        model.double()
        plain.check_step(pipe, x, y, loss_fn)


@each_cut
def test_the_flat_weights_of_a_recurrent_layer_stay_its_own(cut):
    """A stage that ends its step first must not put its replicas where another stage still runs the layer."""
    layer = Recurrent()
    with cut(nn.Sequential(linear(), layer, nn.Tanh(), layer, linear()), [2], loss_fn=LOSS) as pipe:
        pipe.step(torch.randn(6, WIDTH), target=torch.randn(6, WIDTH))
        assert all(map(is_, layer.inner._flat_weights, layer.inner.parameters()))


def test_what_a_layer_sets_on_itself_is_set_on_the_users():
    class Remembering(Head):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last

    model = tied(Remembering)
    with cut_by_hand(model, [2], micro_batches=1) as pipe, torch.no_grad():
        output = pipe(words()[0])
    last = model.get_submodule("3").last
    assert isinstance(last, Tensor)
    assert last.equal(output)


def test_a_hook_that_is_a_method_of_the_layer_sets_what_its_forward_reads():
    class Hooked(Head):
        scale = 1.0

        def __init__(self, weight: Any) -> None:
            super().__init__(weight)
            self.register_forward_pre_hook(self.measure)

        def measure(self, module: nn.Module, args: tuple[Tensor]) -> None:
            self.scale = float(args[0].detach().mean())

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    with cut_by_hand(tied(Hooked), [2], loss_fn=loss_fn) as pipe:
        plain.check_step(pipe, *words(), loss_fn)


@each_cut
def test_what_stages_that_share_a_layer_must_not_do_is_refused_by_name(cut):
    """Write a buffer, keep running statistics, or have a part or a parameter replaced."""

    class Counting(Rotated):
        def forward(self, x: Tensor) -> Tensor:
            self.get_buffer("table").add_(1)
            return super().forward(x)

    x, y = torch.randn(2, 6, 4)
    counting, norm, holds = Counting(torch.zeros(4)), nn.BatchNorm1d(4), Rotated(torch.zeros(4))
    says = r"buffer [02]\.table is shared by layers of stages 0, 1, which write it"
    with (
        cut(nn.Sequential(counting, nn.Tanh(), counting), [2], loss_fn=LOSS) as pipe,
        pytest.raises(RuntimeError, match=says),
    ):
        pipe.step(x, target=y)
    with pytest.raises(ValueError, match=r"buffer 1\.running_mean is shared by layers of stages 0, 1"):
        cut(nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm), [2], loss_fn=LOSS)
    with cut(nn.Sequential(nn.Linear(4, 4), holds, nn.Tanh(), holds), [2], loss_fn=LOSS) as pipe:
        was = holds.linear
        holds.linear = nn.Linear(4, 4)
        with pytest.raises(ValueError, match=r"layer '3' \(Rotated\).* has other modules"):
            pipe.step(x, target=y)
        holds.linear = was
        pipe.step(x, target=y)
        was.load_state_dict({name: tensor.clone() for name, tensor in was.state_dict().items()}, assign=True)
        with pytest.raises(ValueError, match=r"layer '3' \(Rotated\).* load values without assign=True"):
            pipe.step(x, target=y)


def test_a_model_whose_layers_share_a_buffer_can_change_its_dtype():
    """It gets a buffer for each layer. A copy on another device would not follow, and is refused."""
    table = torch.randn(4)
    model = nn.Sequential(Rotated(table), nn.Tanh(), Rotated(table))
    x, y = torch.randn(2, 6, 4)
    with cut_by_hand(model, [2], loss_fn=LOSS) as pipe:
        pipe.step(x, target=y)
        pipe.zero_grad()
        reference = plain.twin(model.double())
        pipe.step(x.double(), target=y.double())
    plain.micro_batched_step(reference, x.double(), y.double(), LOSS, 3)
    plain.assert_same(plain.gradients(model), plain.gradients(reference))
    model = nn.Sequential(Rotated(table), nn.Tanh(), Rotated(table))
    with cut_by_hand(model, [2], loss_fn=LOSS, strict=True) as pipe:
        model.double()
        with pytest.raises(ValueError, match=r"buffer 2\.table, .* change the model first"):
            pipe.step(x.double(), target=y.double())


X, Y = torch.ones(4, SKIPPING), torch.zeros(4, SKIPPING)
MASK = torch.ones(4, SKIPPING, dtype=torch.int64)
VALUE = 2 * SKIPPING * 4  # bytes of a value for one of two micro-batches


def moved(model: nn.Module, sample: Any, **options: Any) -> Counter[tuple[str, int, int]]:
    """The bytes of a step by (kind, sender, receiver)."""
    found: Counter[tuple[str, int, int]] = Counter()
    with piped(model, sample, loss_fn=F.mse_loss, parts=2, trace=True, **options) as pipe:
        pipe.step(Arguments.of(sample), target=Y)
        assert pipe.last_trace is not None
        for one in pipe.last_trace.transfers:
            found[str(one.kind), one.source, one.target] += int(one.bytes)
    return found


def test_values_go_from_their_maker_to_their_users_and_their_gradients_back() -> None:
    found = moved(Hourglass(6), X, stages=4)  # layers 0 1 2 | 3 4 5 | 5 4 3 | 2 1 0
    forward = {
        (0, 1): 2 * VALUE,  # the output of layer 2, which layer 3 uses
        (0, 3): 2 * 2 * VALUE,  # those of layers 0 and 1
        (1, 2): 3 * 2 * VALUE,  # those of layers 3, 4 and 5
        (1, 3): 2 * VALUE,  # that of layer 2 again
        (2, 3): 2 * VALUE,
    }
    assert {ends[1:]: size for ends, size in found.items() if ends[0] == "F"} == forward
    assert {ends[:0:-1]: size for ends, size in found.items() if ends[0] == "B"} == forward


def test_masks_have_no_way_back_and_a_value_with_several_uses_hops() -> None:
    found = moved(Woven(), (X, MASK), stages=9)
    past = {ends: size for ends, size in found.items() if abs(ends[1] - ends[2]) > 1}
    gradients = {("B", 4, 1): 2 * VALUE, ("B", 6, 4): 2 * VALUE, ("B", 7, 2): 2 * VALUE}
    values = {("F", 1, 4): 2 * VALUE, ("F", 4, 6): 2 * VALUE, ("F", 2, 7): 2 * VALUE}
    assert past == {("F", 0, 3): 2 * 2 * VALUE, ("F", 3, 8): 2 * 2 * VALUE, **values, **gradients}


def test_stages_on_one_device_hand_values_over() -> None:
    found = moved(Hourglass(4), X, stages=4, schedule="zb-v", chunks=2)  # stages 0 and 3 are on device 0
    assert ("F", 0, 3) not in found
    assert ("F", 1, 2) not in found
    assert found["F", 0, 1] == found["F", 2, 3] == 2 * VALUE


def test_micro_batches_of_other_recordings_have_their_own_ways() -> None:
    class Shifting(Hourglass):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = []
            for block in self.down:
                kept.append(x := block(x))
            order = kept if len(x) > 2 else kept[::-1]  # so the size of the batch decides how far values skip
            for block, skip in zip(self.up, order, strict=True):
                x = block(torch.cat([x, skip], dim=-1))
            return x

    x, y = torch.randn(5, SKIPPING), torch.randn(5, SKIPPING)  # micro-batches of 3 and 2 samples
    assert_same_step(Shifting(4), x, target=y, loss_fn=F.mse_loss, stages=4, parts=2)


def test_a_write_into_memory_of_a_value_that_went_past_the_writer_is_found() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x * 2
            return y, y.view(-1, SKIPPING)

    class Writer(nn.Module):
        writes = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.writes:
                with torch.no_grad():
                    x.mul_(2.0)
            return x.sin()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Twice(), Writer(), nn.Linear(SKIPPING, SKIPPING), nn.Tanh()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept, x = self.blocks[0](x)
            return self.blocks[3](self.blocks[2](self.blocks[1](x)) * kept)

    with piped(Model(), X, loss_fn=F.mse_loss, stages=4, parts=2) as pipe:
        pipe.step(X, target=Y)
        Writer.writes = True
        with pytest.raises(RuntimeError, match="overwritten"):
            pipe.step(X, target=Y)
