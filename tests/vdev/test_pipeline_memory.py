"""A pipeline on devices that count their memory leaves there parameters, gradients and optimizer state, and no more."""

import gc

import torch
from torch import nn

from tests.support.on_devices import cut_on
from tests.vdev import devices as vdev


def test_a_step_leaves_parameters_gradients_and_optimizer_state():
    gc.collect()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 32))
    parameters = [4 * (64 * 64 + 64), 4 * (64 * 2 + 64 * 32 + 32)]
    buffers = [0, 4 * 64 * 2 + 8]
    before = [vdev.memory(f"vdev:{index}").allocated for index in (0, 1)]

    def momentum(own: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(own, lr=0.1, momentum=0.9)

    def more() -> list[int]:
        return [vdev.memory(f"vdev:{index}").allocated - then for index, then in enumerate(before)]

    with cut_on(("vdev:0", "vdev:1"), model, [2], nn.MSELoss(), micro_batches=2, optimizer=momentum) as pipe:
        assert more() == [own + kept for own, kept in zip(parameters, buffers, strict=True)]
        for _ in range(2):
            pipe.step(torch.randn(8, 64), target=torch.randn(8, 32))
        gc.collect()
        expected = [3 * own + kept for own, kept in zip(parameters, buffers, strict=True)]
        assert all(0 <= found - known <= 64 for found, known in zip(more(), expected, strict=True)), more()


def test_stashes_on_the_host_leave_the_device():
    """Of twelve micro-batches, three stashes stay at most: the outputs of three Tanh, and the target. Inputs stay."""
    row, rows = 4 * 64, 64
    peaks = {}
    for offload in ("never", "stash"):
        gc.collect()
        model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])
        with cut_on(
            ("vdev:0", "vdev:1"),
            model,
            [6],
            nn.MSELoss(),
            micro_batches=12,
            schedule="gpipe",
            offload=offload,
        ) as pipe:
            x, y = torch.randn(12 * rows, 64), torch.randn(12 * rows, 64)
            pipe.step(x, target=y)
            vdev.reset_peak("vdev:1")
            before = vdev.memory("vdev:1").allocated
            pipe.step(x, target=y)
            peaks[offload] = vdev.memory("vdev:1").peak - before
    assert peaks["never"] - peaks["stash"] == 9 * 4 * rows * row
