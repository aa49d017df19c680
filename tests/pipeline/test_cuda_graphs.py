"""cuda_graphs=True, on a stand-in that records on the CPU: stages replay what they launched to the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart import Pipeline
from pipepart.runtime import together
from tests.support.chains import cut_by_hand, on_device, plan_by_hand
from tests.support.pieces import PIECES, WIDTH, Branches, Noise, linear
from tests.support.plain import (
    assert_close,
    assert_same,
    copied,
    gradients,
    in_double,
    micro_batched_step,
    twin,
)
from tests.support.recorded import StandIn

WARM = 2  # steps before the one that records
loss_fn = nn.MSELoss()


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch):
    """Makes a pipeline record on the CPU; returns the stand-ins of its stages."""

    def on(model: nn.Module) -> list[StandIn]:
        made: list[StandIn] = []

        def recorder(device: torch.device) -> StandIn:
            made.append(StandIn(model))
            return made[-1]

        monkeypatch.setattr(together, "CudaRecorder", recorder)
        monkeypatch.setattr(together, "check_cuda_graphs", lambda plan: None)
        return made

    return on


def mini_batch(samples: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, WIDTH).double(), torch.randn(samples, WIDTH).double()


def assert_trains_alike(
    pipe: Pipeline, plain: nn.Module, parts: int = 3, steps: int = WARM + 2, samples: int = 6, **how: Any
) -> None:
    model = pipe.module
    for step in range(steps):
        x, y = mini_batch(samples)
        torch.manual_seed(step)
        loss = pipe.step(copied(x), target=y)
        torch.manual_seed(step)
        expected = micro_batched_step(plain, copied(x), y, loss_fn, parts, **how)
        assert float((loss - expected).abs()) < 1e-14
        assert_same(gradients(model), gradients(plain))
        assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b"])
def test_chains_of_all_sorts_of_layers_have_the_gradients_and_buffers_of_the_plain_model(record, schedule):
    # Without the piece that autograd refuses plain, and the one that looks at a value.
    layers = [layer for number, make in enumerate(PIECES) if number != 3 for layer in make()]
    model = in_double(layer for layer in layers if not isinstance(layer, Branches))
    plain = twin(model)
    chunks = 2 if schedule == "interleaved-1f1b" else 1
    borders = [len(model) // 4, len(model) // 2, 3 * len(model) // 4]
    made = record(model)
    with cut_by_hand(
        model, borders, loss_fn=loss_fn, micro_batches=6, schedule=schedule, chunks=chunks, cuda_graphs=True
    ) as pipe:
        assert_trains_alike(pipe, plain, 6, samples=12)
        pipe.zero_grad()
        plain.zero_grad()
        assert_trains_alike(pipe, plain, 6, steps=2, samples=12)
    assert all(stand_in.replays == 4 * 6 * 2 for stand_in in made)


@pytest.mark.parametrize(("schedule", "in_flight"), [("1f1b", [3, 2, 1]), ("gpipe", [6, 6, 6])])
def test_there_are_as_many_recordings_as_micro_batches_in_flight(record, schedule, in_flight):
    model = in_double([linear(), linear(), linear()])
    made = record(model)
    x, y = mini_batch()
    with cut_by_hand(
        model, [1, 2], loss_fn=loss_fn, micro_batches=6, schedule=schedule, cuda_graphs=True
    ) as pipe:
        for _ in range(WARM + 3):
            pipe.step(x, target=y)
    assert [stand_in.recordings for stand_in in made] == [2 * slots for slots in in_flight]


def test_a_replay_runs_no_python(record):
    class Counts(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * 2

    layer = Counts()
    model = in_double([linear(), layer, linear()])
    record(model)
    x, y = mini_batch()
    with cut_by_hand(model, [], loss_fn=loss_fn, micro_batches=3, cuda_graphs=True) as pipe:
        for _ in range(WARM + 1):
            pipe.step(x, target=y)
        assert layer.calls == 3 * WARM + 1
        pipe.step(x, target=y)
    assert layer.calls == 3 * WARM + 1


def test_micro_batches_of_another_shape_run_as_ever(record):
    model = in_double([linear(), nn.BatchNorm1d(WIDTH), linear()])
    plain = twin(model)
    made = record(model)
    with cut_by_hand(model, [1], loss_fn=loss_fn, cuda_graphs=True) as pipe:
        assert_trains_alike(pipe, plain)
        before = [(stand_in.recordings, stand_in.replays) for stand_in in made]
        assert_trains_alike(pipe, plain, samples=9)
        assert [(stand_in.recordings, stand_in.replays) for stand_in in made] == before
        assert_trains_alike(
            pipe, plain, samples=7, steps=1
        )  # of which two parts have the shape that is recorded
        assert [stand_in.replays for stand_in in made] == [replays + 4 for _, replays in before]


def test_layers_that_draw_have_hooks_or_add_losses_run_by_themselves(record):
    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pipepart.add_loss(x.square().mean())
            return x

    model = in_double(
        [linear(), nn.Dropout(0.5), linear(), Noise(), linear(), Adds(), linear(), nn.Tanh(), linear()]
    )
    plain = twin(model)
    made = record(model)
    seen: list[int] = []
    for chain in (model, plain):
        chain.get_submodule("7").register_forward_hook(lambda *_: seen.append(1))
    with (
        cut_by_hand(model, [4], loss_fn=loss_fn, cuda_graphs=True) as pipe,
        cut_by_hand(plain, [4], loss_fn=loss_fn) as other,
    ):
        for step in range(WARM + 2):
            x, y = mini_batch()
            losses = []
            for one in (pipe, other):
                torch.manual_seed(step)
                losses.append(one.step(x, target=y))
            assert losses[0] == losses[1]
            assert_same(gradients(model), gradients(plain))
    assert len(seen) == 2 * 3 * (WARM + 2)
    assert [stand_in.replays for stand_in in made] == [2 * 3 * 2 * 2, 3 * 3 * 2 * 2]


def test_gradients_and_outputs_that_the_caller_keeps_stay_what_they_were(record):
    model = in_double([linear(), nn.Tanh(), linear()])
    record(model)
    x, y = mini_batch()
    with cut_by_hand(model, [1], loss_fn=loss_fn, micro_batches=1, cuda_graphs=True) as pipe:
        for _ in range(WARM + 1):
            pipe.zero_grad()
            pipe.step(x, target=y)
        kept, values = [p.grad for p in pipe.parameters()], gradients(model)
        pipe.zero_grad()
        pipe.step(2 * x, target=y)
        for gradient, before in zip(kept, values.values(), strict=True):
            assert gradient is not None
            assert before is not None
            assert torch.equal(gradient, before)
        with torch.no_grad():
            outputs = [pipe(x * scale) for scale in (1, 1, 1, 2, 3)]
    assert torch.equal(outputs[2], outputs[0])
    assert not torch.equal(outputs[3], outputs[2])


class ByColumn(nn.Module):
    """Gives its input a gradient in another memory layout, which is passed on as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ x.t().contiguous()).t()


@pytest.mark.parametrize("first", [linear, ByColumn])
def test_each_micro_batch_has_the_gradient_of_its_own_input(record, first):
    model = in_double([first(), nn.Tanh(), linear()])
    plain = twin(model)
    record(model)
    with cut_by_hand(model, [], loss_fn=loss_fn, micro_batches=3, cuda_graphs=True) as pipe:
        for _ in range(WARM + 2):
            x, y = mini_batch()
            ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            pipe.step(ours, target=y)
            micro_batched_step(plain, theirs, y, loss_fn, 3)
            assert_same({"x": ours.grad}, {"x": theirs.grad})


def test_hooks_of_parameters_see_each_gradient(record):
    model = in_double([linear(), nn.Tanh(), linear()])
    plain = twin(model)
    record(model)
    for chain in (model, plain):
        chain.get_parameter("0.weight").register_hook(lambda gradient: gradient * 2)
    with cut_by_hand(model, [2], loss_fn=loss_fn, cuda_graphs=True) as pipe:
        assert_trains_alike(pipe, plain)


def test_an_output_that_is_differentiated(record):
    model = in_double([linear(), nn.Tanh(), linear()])
    plain = twin(model)
    made = record(model)
    with cut_by_hand(model, [1], micro_batches=3, cuda_graphs=True) as pipe:
        for _ in range(WARM + 2):
            x, y = mini_batch()
            loss_fn(pipe(x), y).backward()
            loss_fn(plain(x), y).backward()
            assert_close(gradients(model), gradients(plain))
            pipe(x)  # whose backward never comes
    assert [stand_in.recordings for stand_in in made] == [6, 6]


def test_weights_in_other_memory_or_frozen_are_recorded_anew(record):
    model = in_double([linear(), nn.Tanh(), linear()])
    plain = twin(model)
    made = record(model)
    with cut_by_hand(model, [2], loss_fn=loss_fn, cuda_graphs=True) as pipe:
        assert_trains_alike(pipe, plain)
        before = made[0].recordings
        for chain in (model, plain):
            weight = chain.get_parameter("0.weight")
            weight.data = weight.data * 2
        assert_trains_alike(pipe, plain, steps=1)
        assert made[0].recordings == 2 * before
        for chain in (model, plain):
            chain.zero_grad()
            chain.get_submodule("0").requires_grad_(False)
        assert_trains_alike(pipe, plain, steps=2)


def test_steps_of_an_optimizer_change_the_weights_that_are_read(record):
    model = in_double([linear(), nn.BatchNorm1d(WIDTH), nn.Tanh(), linear()])
    plain = twin(model)
    record(model)
    optimizers = [torch.optim.SGD(chain.parameters(), lr=0.1) for chain in (model, plain)]
    with cut_by_hand(model, [2], loss_fn=loss_fn, cuda_graphs=True) as pipe:
        for _ in range(WARM + 3):
            x, y = mini_batch()
            pipe.step(x, target=y)
            micro_batched_step(plain, x, y, loss_fn, 3)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same(model.state_dict(), plain.state_dict())


class Exact(nn.Module):
    """Computes in single precision under autocast, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x.float())


def test_evaluation_and_autocast_have_recordings_of_their_own(record):
    model = nn.Sequential(linear(), nn.Tanh(), Exact(), linear())
    plain = twin(model)
    record(model)
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    with cut_by_hand(model, [2], loss_fn=loss_fn, cuda_graphs=True) as pipe:
        other = cut_by_hand(plain, [2], loss_fn=loss_fn)
        for kept in (True, False, True, True, False, False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kept):
                assert pipe.step(x, target=y) == other.step(x, target=y)
            assert_same(gradients(model), gradients(plain))
            for one in (pipe, other):
                one.eval()
            with torch.no_grad():
                assert torch.equal(pipe(x), other(x))
            for one in (pipe, other):
                one.train()
        other.close()


def test_weights_that_autocast_has_cast_for_another_layer_are_cast_again(record):
    hooked, tied = linear(), linear()
    tied.weight = hooked.weight
    hooked.register_forward_hook(lambda *_: None)
    model = nn.Sequential(hooked, nn.Tanh(), tied)
    plain = twin(model)
    record(model)
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    with (
        cut_by_hand(model, [], loss_fn=loss_fn, micro_batches=3, cuda_graphs=True) as pipe,
        cut_by_hand(plain, [], loss_fn=loss_fn, micro_batches=3) as other,
    ):
        for _ in range(WARM + 2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert pipe.step(x, target=y) == other.step(x, target=y)
            with torch.no_grad():
                for chain in (model, plain):
                    chain.get_parameter("0.weight").mul_(1.1)


def test_compiled_layers_are_recorded(record):
    model = in_double([linear(), nn.BatchNorm1d(WIDTH), nn.Tanh(), linear()])
    plain = twin(model)
    made = record(model)
    with cut_by_hand(model, [2], loss_fn=loss_fn, cuda_graphs=True, compile={"backend": "eager"}) as pipe:
        assert_trains_alike(pipe, plain)
    assert [stand_in.recordings for stand_in in made] == [4, 2]


def test_a_failed_step_gives_its_slots_back(record):
    class Armed(nn.Module):
        armed = False

        def forward(self, x: Tensor) -> Tensor:
            if self.armed:
                raise KeyError("boom")
            return x * 2

    layer = Armed()
    layer.register_forward_hook(lambda *_: None)
    model = in_double([linear(), linear(), layer])
    plain = twin(model)
    made = record(model)
    with cut_by_hand(model, [1], loss_fn=loss_fn, schedule="gpipe", cuda_graphs=True) as pipe:
        assert_trains_alike(pipe, plain)
        for _ in range(3):
            layer.armed = True
            with pytest.raises(KeyError, match="boom"):
                pipe.step(*mini_batch()[:1], target=mini_batch()[1])
        layer.armed = False
        pipe.zero_grad()
        plain.zero_grad()
        assert_trains_alike(pipe, plain, steps=2)
    assert [stand_in.recordings for stand_in in made] == [6, 6]


def test_a_layer_that_looks_at_a_value_is_named_with_what_to_do(record):
    model = in_double([linear(), linear(), Branches()])
    record(model)
    x, y = mini_batch()
    with cut_by_hand(model, [1], loss_fn=loss_fn, cuda_graphs=True) as pipe:
        for _ in range(WARM):
            pipe.step(x, target=y)
        with pytest.raises(RuntimeError, match=r"recorded as CUDA graphs .*a forward hook") as raised:
            pipe.step(x, target=y)
        model[2].register_forward_hook(lambda *_: None)
        pipe.step(x, target=y)
    notes = raised.value.__notes__
    assert notes[0] == "pipepart: in the forward of layer '1' (Linear) or layer '2' (Branches)"
    assert notes[1].startswith("pipepart: on stage 1 of 2")


def test_a_layer_that_begins_to_add_losses_is_refused(record):
    class Adds(nn.Module):
        adding = False

        def forward(self, x: Tensor) -> Tensor:
            if self.adding:
                pipepart.add_loss(x.square().mean())
            return x

    layer = Adds()
    model = in_double([linear(), layer])
    record(model)
    x, y = mini_batch()
    with cut_by_hand(model, [], loss_fn=loss_fn, micro_batches=2, cuda_graphs=True) as pipe:
        for _ in range(WARM):
            pipe.step(x, target=y)
        layer.adding = True
        with pytest.raises(ValueError, match="add_loss"):
            pipe.step(x, target=y)


def test_devices_that_have_no_cuda_graphs_are_refused():
    model = nn.Sequential(linear(), linear())
    with pytest.raises(ValueError, match=r"cuda_graphs=True needs CUDA devices; stage 0 is on .*cpu"):
        cut_by_hand(model, [1], cuda_graphs=True)


def test_stages_that_are_recomputed_are_refused():
    plan = plan_by_hand(["0", "1"], [1], micro_batches=2, recompute=("never", "always"))
    with pytest.raises(ValueError, match=r"stage 1 compute it again.*recompute='never'"):
        Pipeline(nn.Sequential(linear(), linear()), on_device(plan, "cuda:0"), cuda_graphs=True)


def test_versions_of_weights_are_refused():
    plan = plan_by_hand(["0", "1"], [1], micro_batches=2, schedule="pipedream")
    with pytest.raises(ValueError, match=r"'pipedream' has several versions"):
        Pipeline(
            nn.Sequential(linear(), linear()),
            on_device(plan, "cuda:0"),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            cuda_graphs=True,
        )
