"""cuda_graphs=True on a GPU: what is recorded replays to the numbers of layers that run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from pipepart.runtime.cuda_graphs import CudaRecorder
from tests.support.chains import on_device, plan_by_hand
from tests.support.pieces import WIDTH, Branches, InPlace, Noise, Parallel, linear
from tests.support.plain import assert_close, assert_same, gradients, in_double, micro_batched_step, twin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
DEVICE = "cuda:0"
PARTS = 4
STEPS = 5  # of which the third records
loss_fn = nn.MSELoss()


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.double() for name, buffer in model.named_buffers()}


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each that is made."""
    made: list[object] = []
    record = CudaRecorder.record

    def counted(self: CudaRecorder, work, memory):
        made.append(memory)
        return record(self, work, memory)

    monkeypatch.setattr(CudaRecorder, "record", counted)
    return made


def chain() -> nn.Sequential:
    return in_double(
        [nn.BatchNorm1d(WIDTH), nn.Tanh(), linear(), InPlace(), Parallel(), nn.LayerNorm(WIDTH), linear()]
    )


def piped(model: nn.Module, border: int = 3, schedule: str = "1f1b", cuda_graphs: bool = True) -> Pipeline:
    names = [name for name, _ in model.named_children()]
    plan = plan_by_hand(names, [border], micro_batches=PARTS, schedule=schedule)
    return Pipeline(model, on_device(plan, DEVICE), loss_fn, cuda_graphs=cuda_graphs)


def mini_batch(samples: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, WIDTH).double().to(DEVICE), torch.randn(samples, WIDTH).double().to(DEVICE)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_gradients_and_buffers_are_those_of_the_plain_model(recordings, schedule):
    model = chain().to(DEVICE)
    plain = twin(model)
    with piped(model, schedule=schedule) as pipe:
        for step in range(STEPS):
            if step == STEPS - 1:
                pipe.zero_grad()
                plain.zero_grad()
            x, y = mini_batch()
            pipe.step(x, target=y)
            micro_batched_step(plain, x, y, loss_fn, PARTS)
            assert_close(gradients(model), gradients(plain), 1e-10)
            assert_close(statistics(model), statistics(plain), 1e-10)
    in_flight = {"1f1b": 2 + 1, "gpipe": 2 * PARTS, "zb-h1": 2 + 1}[schedule]
    assert len(recordings) == 2 * in_flight


def test_layers_that_draw_draw_the_same_beside_recorded_ones(recordings):
    model = in_double([linear(), nn.Tanh(), nn.Dropout(0.5), linear(), Noise(), linear()]).to(DEVICE)
    plain = twin(model)
    with piped(model) as pipe, piped(plain, cuda_graphs=False) as other:
        for step in range(STEPS):
            x, y = mini_batch()
            for one in (pipe, other):
                torch.manual_seed(step)
                one.step(x, target=y)
            assert_close(gradients(model), gradients(plain), 1e-10)
    assert recordings


def test_gradients_that_the_caller_keeps_stay_what_they_were():
    model = chain().to(DEVICE)
    with piped(model) as pipe:
        for _ in range(STEPS):
            pipe.zero_grad()
            pipe.step(*mini_batch()[:1], target=mini_batch()[1])
        kept, values = {name: p.grad for name, p in pipe.named_parameters()}, gradients(model)
        pipe.zero_grad()
        pipe.step(*mini_batch()[:1], target=mini_batch()[1])
        assert_same(kept, values)


def test_an_optimizer_trains_what_is_recorded():
    model = chain().to(DEVICE)
    plain = twin(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    with piped(model) as pipe:
        for _ in range(STEPS):
            x, y = mini_batch()
            pipe.step(x, target=y)
            micro_batched_step(plain, x, y, loss_fn, PARTS)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        pipe.eval()
        plain.eval()
        x, _ = mini_batch()
        with torch.no_grad():
            for _ in range(STEPS):
                assert_close({"output": pipe(x)}, {"output": plain(x)}, 1e-9)
    assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), 1e-9)


def test_other_shapes_run_as_ever():
    model = chain().to(DEVICE)
    plain = twin(model)
    with piped(model) as pipe:
        for samples in (8, 8, 8, 12, 8, 11):
            x, y = mini_batch(samples)
            pipe.step(x, target=y)
            micro_batched_step(plain, x, y, loss_fn, PARTS)
            assert_close(gradients(model), gradients(plain), 1e-10)


def test_a_layer_that_waits_for_the_device_is_refused_and_runs_with_a_hook():
    model = in_double([linear(), nn.Tanh(), linear(), Branches(), linear()]).to(DEVICE)
    plain = twin(model)
    x, y = mini_batch()
    with piped(model, border=2) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
        with pytest.raises(RuntimeError, match="cannot be recorded as CUDA graphs") as raised:
            pipe.step(x, target=y)
        assert "layer '3' (Branches)" in raised.value.__notes__[0]
        model[3].register_forward_hook(lambda *_: None)
        pipe.zero_grad()
        for _ in range(STEPS):
            pipe.step(x, target=y)
            micro_batched_step(plain, x, y, loss_fn, PARTS)
            assert_close(gradients(model), gradients(plain), 1e-10)


def test_what_cannot_be_recorded_leaves_generator_and_memory_of_the_device_as_they_were():
    model = in_double([linear(), nn.Tanh(), linear(), Branches(), linear()]).to(DEVICE)
    x, y = mini_batch()
    with piped(model, border=2) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
        with pytest.raises(RuntimeError, match="cannot be recorded as CUDA graphs"):
            pipe.step(x, target=y)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    passed_on = torch.rand(1 << 20, device=DEVICE)
    assert passed_on.mean().item() == pytest.approx(0.5, abs=0.01)
    passed_on.record_stream(torch.cuda.Stream())
    del passed_on
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == before


def test_layers_are_recorded_while_micro_batches_that_were_not_are_under_way(recordings):
    """Autograd's node of a weight is then one that was made for those."""
    model = chain().to(DEVICE)
    plain = twin(model)
    with piped(model, schedule="gpipe") as pipe:
        for samples in (8, 8, 9, 8):  # of 9 the first part has one sample more than those that are recorded
            x, y = mini_batch(samples)
            pipe.step(x, target=y)
            micro_batched_step(plain, x, y, loss_fn, PARTS)
            assert_close(gradients(model), gradients(plain), 1e-10)
    assert recordings


def test_autocast():
    model = nn.Sequential(linear(), nn.Tanh(), linear(), nn.LayerNorm(WIDTH), linear()).to(DEVICE)
    plain = twin(model)
    x, y = torch.randn(8, WIDTH, device=DEVICE), torch.randn(8, WIDTH, device=DEVICE)
    with piped(model) as pipe, piped(plain, cuda_graphs=False) as other:
        for _ in range(STEPS):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                pipe.step(x, target=y)
                other.step(x, target=y)
            assert_close(gradients(model), gradients(plain), 2e-2)
