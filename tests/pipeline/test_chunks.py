"""Several stages on a device: every schedule, wherever it puts the stages, gives the numbers of the plain model."""

import threading

import pytest
import torch
from torch import Tensor, nn

import schedules
from tests.support import plain
from tests.support.chains import cut_by_hand

CHUNKS = {
    "sequential": [1],
    "gpipe": [1],
    "1f1b": [1],
    "eager-1f1b": [1],
    "zb-h1": [1],
    "zb-h2": [1],
    "interleaved-1f1b": [1, 2, 3],
    "looped-bfs": [2, 3],
    "interleaved-zb": [2, 3],
    "zb-v": [2],
    "v-half": [2],
    "v-min": [2],
    "dualpipe-v": [2],
    "hanayo": [2, 4],
}
SCHEDULES = [(name, chunks) for name, counts in CHUNKS.items() for chunks in counts]


def network(stages: int) -> nn.Sequential:
    """Two layers for each stage; a BatchNorm tells in which order micro-batches came."""
    layers: list[nn.Module] = []
    for stage in range(stages):
        layers += [nn.Linear(5, 5), nn.BatchNorm1d(5) if stage % 3 == 1 else nn.Tanh()]
    return plain.in_double(layers)


def assert_trained_alike(schedule: str, ours: nn.Module, theirs: nn.Module) -> None:
    """Bit for bit, but for the schedule that adds the gradients of micro-batches up in another order."""
    alike = plain.assert_close if schedule == "looped-bfs" else plain.assert_same
    alike(plain.gradients(ours), plain.gradients(theirs))
    plain.assert_same(dict(ours.named_buffers()), dict(theirs.named_buffers()))


def test_every_schedule_that_a_pipeline_can_run_is_tried_here():
    of_copies, refused = {"chimera"}, {"pipedream", "pipedream-2bw"}
    assert CHUNKS.keys() | of_copies | refused == set(schedules.names())


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_every_schedule_trains_as_plain_micro_batches_do(schedule, chunks, devices):
    """With fewer micro-batches than devices, as many, and more."""
    stages = devices * chunks
    for micro_batches in (1, 2, 3, 7):
        model = network(stages)
        reference = plain.twin(model)
        with cut_by_hand(
            model,
            range(2, 2 * stages, 2),
            loss_fn=nn.MSELoss(),
            micro_batches=micro_batches,
            schedule=schedule,
            chunks=chunks,
        ) as pipe:
            x, y = torch.randn(14, 5).double(), torch.randn(14, 5).double()
            loss = pipe.step(x, target=y)
        expected = plain.micro_batched_step(reference, x, y, nn.MSELoss(), micro_batches)
        plain.assert_near(loss, expected.double(), 1e-6)
        assert_trained_alike(schedule, model, reference)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_a_batch_with_fewer_samples_than_micro_batches(schedule, chunks):
    model = plain.in_double([nn.Linear(4, 4) for _ in range(2 * chunks)])
    reference = plain.twin(model)
    with cut_by_hand(
        model,
        range(1, 2 * chunks),
        loss_fn=nn.MSELoss(),
        micro_batches=8,
        schedule=schedule,
        chunks=chunks,
    ) as pipe:
        for samples in (1, 2, 3, 5):
            x, y = torch.randn(samples, 4).double(), torch.randn(samples, 4).double()
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, nn.MSELoss(), samples)
    assert_trained_alike(schedule, model, reference)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_the_drop_in_form(schedule, chunks):
    stages = 2 * chunks
    model = network(stages)
    reference = plain.twin(model)
    ours, theirs = (torch.ones(6, 5).double().mul_(0.3).requires_grad_() for _ in range(2))
    noise = torch.randn(6, 5).double()
    with cut_by_hand(
        model, range(2, 2 * stages, 2), micro_batches=3, schedule=schedule, chunks=chunks
    ) as pipe:
        output = pipe(ours + noise)
        output.sin().sum().backward()
        with torch.no_grad():
            pipe.eval()
            plain.assert_near(pipe(noise), model(noise))
    whole = torch.cat([reference(part) for part in (theirs + noise).split(2)])
    whole.sin().sum().backward()
    plain.assert_same({"output": output.detach()}, {"output": whole.detach()})
    plain.assert_close({"x": ours.grad}, {"x": theirs.grad})
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


def test_one_worker_runs_all_stages_of_its_device():
    class Ask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(threading.current_thread().name)
            return x * 1

    for schedule, placement in (("interleaved-1f1b", [0, 1, 0, 1]), ("zb-v", [0, 1, 1, 0])):
        seen: list[str] = []
        model = nn.Sequential(nn.Linear(3, 3), *[Ask() for _ in range(4)])
        with cut_by_hand(model, [2, 3, 4], micro_batches=1, schedule=schedule, chunks=2) as pipe:
            running = [t.name for t in threading.enumerate() if t.name.startswith("pipepart-")]
            assert sorted(running) == ["pipepart-virtual:0", "pipepart-virtual:1"]
            pipe(torch.randn(4, 3))
        assert seen == [f"pipepart-virtual:{device}" for device in placement]


def test_stages_on_one_device_pass_their_tensors_without_a_copy():
    class Remember(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            given.append(x.data_ptr())
            y = x * 2
            made.append(y.data_ptr())
            return y

    given: list[int] = []
    made: list[int] = []
    model = nn.Sequential(*[Remember() for _ in range(4)])
    with cut_by_hand(model, [1, 2, 3], micro_batches=1, schedule="zb-v", chunks=2) as pipe:
        pipe(torch.randn(4, 3, requires_grad=True))
    assert given[1:] == made[:-1]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("schedule", "stage"), [("interleaved-1f1b", 2), ("zb-v", 2), ("dualpipe-v", 3)])
def test_a_failure_names_the_stage_its_device_and_its_layer(where, schedule, stage):
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            if where == "forward":
                raise ValueError("on purpose")
            return x.clone()

        @staticmethod
        def backward(ctx, *gradients: Tensor) -> Tensor:
            raise ValueError("on purpose")

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Fail.apply(x)

    modules: list[nn.Module] = [nn.Linear(3, 3) for _ in range(8)]
    modules[2 * stage + 1] = Failing()
    device = {"interleaved-1f1b": 0, "zb-v": 1, "dualpipe-v": 0}[schedule]
    with cut_by_hand(
        nn.Sequential(*modules),
        [2, 4, 6],
        loss_fn=nn.MSELoss(),
        micro_batches=4,
        schedule=schedule,
        chunks=2,
    ) as pipe:
        with pytest.raises(ValueError, match="on purpose") as caught:
            pipe.step(torch.randn(8, 3), target=torch.randn(8, 3))
        first, second = caught.value.__notes__
        assert f"in the {where} of layer '{2 * stage + 1}' (Failing)" in first
        assert f"stage {stage} of 4 on virtual:{device}, micro-batch 0 of 4" in second


def test_a_trace_has_a_span_for_each_part_of_an_overlapped_pair():
    with cut_by_hand(
        network(4),
        [2, 4, 6],
        loss_fn=nn.MSELoss(),
        micro_batches=4,
        schedule="dualpipe-v",
        chunks=2,
        trace=True,
    ) as pipe:
        pipe.step(torch.randn(8, 5).double(), target=torch.randn(8, 5).double())
        trace = pipe.last_trace
        assert trace is not None
        built = pipe.plan.build_schedule()
        assert any(action.parts for row in built.actions for action in row)
        assert trace.schedule == schedules.split_overlaps(built)
        assert [len(row) for row in trace.starts] == [len(row) for row in trace.schedule.actions]


@pytest.mark.parametrize(
    ("schedule", "why"),
    [("pipedream", "asynchronous"), ("pipedream-2bw", "asynchronous")],
)
def test_schedules_of_another_kind_are_refused_before_anything_is_moved(schedule, why, monkeypatch):
    monkeypatch.setattr(nn.Module, "to", lambda *_: pytest.fail("a module was moved"))
    before = threading.active_count()
    with pytest.raises(ValueError, match=why) as caught:
        cut_by_hand(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1], micro_batches=4, schedule=schedule)
    assert schedule in str(caught.value)
    assert threading.active_count() == before
