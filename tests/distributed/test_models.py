"""Under torchrun models of every shape, and what goes between their layers, give the bits of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Pipeline
from tests.distributed.models import Keeps, Packs, Unpacks, language_model
from tests.distributed.training import TIMEOUT, adam, drawn_batches, gradients, trained
from tests.pipeline.conformance.kinds import KINDS
from tests.support import skipping
from tests.support.chains import cut_by_hand
from tests.support.pieces import WIDTH, linear
from tests.support.ranks import assert_as_in_one_process
from tests.support.recorded import piped


def of_nests() -> dict[str, Any]:
    model = nn.Sequential(linear(), Packs(), Keeps(), Unpacks(), linear()).double()
    pipe = cut_by_hand(model, [2, 3], loss_fn=nn.MSELoss(), timeout=TIMEOUT)
    return trained(pipe, drawn_batches([9, 6, 2, 9]))


def test_messages_keep_their_nest_layout_and_shared_memory():
    assert_as_in_one_process(of_nests, 3)


def normalized(deferred: bool, recompute: Any) -> dict[str, Any]:
    layers = [linear(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), linear(), nn.BatchNorm1d(WIDTH), linear()]
    pipe = cut_by_hand(
        nn.Sequential(*layers).double(),
        [2, 4],
        loss_fn=nn.MSELoss(),
        deferred_batch_norm=deferred,
        recompute=recompute,
        timeout=TIMEOUT,
    )
    return trained(pipe, drawn_batches([12, 7, 4, 12]))


@pytest.mark.parametrize(("deferred", "recompute"), [(False, "always"), (True, "never"), (True, "always")])
def test_running_statistics_and_dropout(deferred, recompute):
    assert_as_in_one_process(normalized, 3, deferred, recompute)


def with_several_devices(schedule: str, chunks: int) -> dict[str, Any]:
    layers = [nn.Sequential(linear(), nn.Tanh(), nn.Dropout(0.2)) for _ in range(8)]
    borders = list(range(1, 4 * chunks))
    pipe = cut_by_hand(
        nn.Sequential(*layers).double(),
        borders,
        loss_fn=nn.MSELoss(),
        schedule=schedule,
        chunks=chunks,
        micro_batches=8,
        timeout=TIMEOUT,
    )
    return trained(pipe, drawn_batches([16, 5, 16]), max_norm=0.1)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2)])
def test_two_ranks_drive_two_devices_each(schedule, chunks):
    assert_as_in_one_process(with_several_devices, 2, schedule, chunks)


def offloaded() -> dict[str, Any]:
    layers = [nn.Sequential(linear(), nn.Tanh()) for _ in range(4)]
    pipe = cut_by_hand(
        nn.Sequential(*layers).double(),
        [2],
        loss_fn=nn.MSELoss(),
        offload=("stash", "never"),
        recompute=("never", "except-last"),
        micro_batches=4,
        timeout=TIMEOUT,
    )
    return trained(pipe, drawn_batches([8, 3, 8]))


def test_a_stage_that_offloads_beside_one_that_recomputes():
    assert_as_in_one_process(offloaded, 2)


def hourglass(stages: int, schedule: str, recompute: Any) -> dict[str, Any]:
    x = drawn_batches([8])[0][0]
    pipe = piped(
        skipping.Hourglass(4).double(),
        x,
        loss_fn=nn.MSELoss(),
        stages=stages,
        parts=4,
        schedule=schedule,
        recompute=recompute,
        timeout=TIMEOUT,
    )
    return trained(pipe, drawn_batches([8, 3, 8]))


@pytest.mark.parametrize(
    ("processes", "stages", "schedule", "recompute"),
    [(3, 3, "1f1b", "never"), (4, 4, "zb-h1", "never"), (2, 4, "gpipe", "always"), (4, 4, "1f1b", "always")],
)
def test_values_that_skip_ranks(processes, stages, schedule, recompute):
    assert_as_in_one_process(hourglass, processes, stages, schedule, recompute)


def of_language(kind: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    words = [
        torch.randint(40, (size, length), generator=generator) for size, length in [(6, 7), (6, 5), (6, 7)]
    ]
    sample = {"input_ids": words[0], "labels": words[0], "use_cache": False}
    found: dict[str, Any] = {"losses": []}
    with piped(language_model(kind), sample, stages=3, parts=3, timeout=TIMEOUT) as pipe:
        optimizer = adam(pipe.parameters())
        for ids in words:
            optimizer.zero_grad()
            found["losses"].append(pipe.step(**{**sample, "input_ids": ids, "labels": ids}))
            found["norm"] = pipe.clip_grad_norm_(0.5)
            optimizer.step()
        found["gradients"] = gradients(pipe)
        found["state"] = pipe.full_state_dict()
    return found


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_language_model_with_a_tied_head(kind):
    assert_as_in_one_process(of_language, 3, kind)


def frozen() -> dict[str, Any]:
    model = nn.Sequential(linear(), nn.Tanh(), linear(), linear(), nn.Tanh(), linear()).double()
    for layer in list(model)[:4]:
        layer.requires_grad_(False)
    pipe = cut_by_hand(model, [2, 4], loss_fn=nn.MSELoss(), timeout=TIMEOUT)
    first = trained_and_thawed(pipe, model)
    return first


def trained_and_thawed(pipe: Pipeline, model: nn.Sequential) -> dict[str, Any]:
    """Steps of which the last ones train one layer more."""
    found: dict[str, Any] = {"losses": [], "gradients": []}
    with pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for number, (x, y) in enumerate(drawn_batches([6, 6, 6, 6])):
            model[2].requires_grad_(number in (1, 2))
            optimizer.zero_grad()
            found["losses"].append(pipe.step(x, target=y))
            optimizer.step()
        found["own gradients"] = gradients(pipe)
        found["state"] = pipe.full_state_dict()
    return found


def test_parameters_that_are_frozen_and_thawed():
    assert_as_in_one_process(frozen, 3)


def sparse() -> dict[str, Any]:
    model = KINDS["sparse embedding"].chain().double()
    pipe = cut_by_hand(model, [3, 5], loss_fn=nn.MSELoss(), timeout=TIMEOUT)
    return trained(
        pipe, drawn_batches([6, 4, 6]), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )


def test_sparse_gradients():
    assert_as_in_one_process(sparse, 3)


class Scaled(nn.Module):
    """Draws from a generator of its own, and counts its calls in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        return x * noise + self.calls


def with_own_state() -> dict[str, Any]:
    model = nn.Sequential(linear(), Scaled(), linear(), Scaled(), linear()).double()
    pipe = cut_by_hand(model, [1, 3], loss_fn=nn.MSELoss(), timeout=TIMEOUT)
    return trained(pipe, drawn_batches([6, 4, 6]))


def test_layers_with_generators_and_counters_of_their_own():
    assert_as_in_one_process(with_own_state, 3)


def odd_steps() -> dict[str, Any]:
    """Complex numbers, half precision, inputs in a dict with values to replicate, and an output of several tensors."""

    class Enters(nn.Module):
        def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
            return x * scale if shift is None else x * scale + shift

    class Turns(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.complex(x, x.sin()), x.bfloat16()

    class Leaves(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            turned, rounded = pair
            return {"size": turned.abs(), "angle": (turned * turned).real, "rounded": rounded.double()}

    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return (output["size"] - target).pow(2).mean() + (output["angle"] * output["rounded"]).mean()

    model = nn.Sequential(Enters(), linear(), Turns(), Leaves()).double()
    found: dict[str, Any] = {"losses": []}
    with cut_by_hand(model, [1, 3], loss_fn=loss, timeout=TIMEOUT) as pipe:
        x = y = torch.empty(0)
        for number, (x, y) in enumerate(drawn_batches([6, 7, 6])):
            options: dict[str, Any] = {"shift": torch.tensor(0.5).double()} if number == 1 else {}
            found["losses"].append(pipe.step(x, scale=1.5, target=y, return_outputs=True, **options))
        found["gradients"] = gradients(pipe)
        found["evaluated"] = pipe.evaluate(x, target=y, return_outputs=True)
    return found


def test_complex_numbers_keyword_arguments_and_nests_of_outputs():
    assert_as_in_one_process(odd_steps, 3)
