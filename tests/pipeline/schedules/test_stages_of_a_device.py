"""Several stages on a device: one worker runs them, tensors pass without a copy, failures and traces name them."""

import threading

import torch
from torch import Tensor, nn

import schedules
from tests.support import plain
from tests.support.chains import cut_by_hand


def network(stages: int) -> nn.Sequential:
    """Two layers for each stage; a BatchNorm tells in which order micro-batches came."""
    layers: list[nn.Module] = []
    for stage in range(stages):
        layers += [nn.Linear(5, 5), nn.BatchNorm1d(5) if stage % 3 == 1 else nn.Tanh()]
    return plain.in_double(layers)


def test_one_worker_runs_all_stages_of_its_device():
    class Ask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = threading.current_thread().name
            return x * 1

    for schedule, placement in (("interleaved-1f1b", [0, 1, 0, 1]), ("zb-v", [0, 1, 1, 0])):
        model = nn.Sequential(nn.Linear(3, 3), *[Ask() for _ in range(4)])
        with cut_by_hand(model, [2, 3, 4], micro_batches=1, schedule=schedule, chunks=2) as pipe:
            running = [t.name for t in threading.enumerate() if t.name.startswith("pipepart-")]
            assert sorted(running) == ["pipepart-virtual:0", "pipepart-virtual:1"]
            pipe(torch.randn(4, 3))
        assert [one.seen for one in list(model)[1:]] == [f"pipepart-virtual:{device}" for device in placement]


def test_stages_on_one_device_pass_their_tensors_without_a_copy():
    class Remember(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            self.given, self.made = x.data_ptr(), y.data_ptr()
            return y

    model = nn.Sequential(*[Remember() for _ in range(4)])
    with cut_by_hand(model, [1, 2, 3], micro_batches=1, schedule="zb-v", chunks=2) as pipe:
        pipe(torch.randn(4, 3, requires_grad=True))
    assert [one.given for one in list(model)[1:]] == [one.made for one in list(model)[:-1]]


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
