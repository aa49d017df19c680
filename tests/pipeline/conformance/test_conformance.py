"""A pipeline trains as the plain model does: every kind of layer, schedule and mode, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import schedules
from pipepart.capture import flatten
from tests.pipeline.conformance.kinds import KINDS
from tests.pipeline.conformance.modes import LOSSES, SCHEDULES, Mode, covering, drawn, stages_of
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.pieces import WIDTH
from tests.support.seeds import seeds

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}
STEPS = 2


def replica_of(mode: Mode) -> tuple[int, ...]:
    """The replicas that micro-batches take in turn; chimera has one for each direction."""
    if mode.schedule[0] == "chimera":
        return (0, 1) if mode.replicas == 1 else (0, 2, 1, 3)
    return tuple(range(mode.replicas))


def called_step(model: nn.Module, x: Tensor, y: Tensor, loss_fn: Callable[..., Tensor], parts: int) -> Tensor:
    """All forwards, the loss of the whole output, and the backward of one micro-batch after the other."""
    outputs = [model(part) for part in x.tensor_split(parts)]
    joined = torch.cat([output.detach() for output in outputs]).requires_grad_()
    loss = loss_fn(joined, y)
    loss.backward()
    assert joined.grad is not None
    for output, gradient in zip(outputs, joined.grad.tensor_split(parts), strict=True):
        output.backward(gradient)
    return loss


def check(mode: Mode) -> None:
    """Two steps: gradients of parameters and inputs, buffers and losses are those of the plain model.

    Those of micro-batches one after the other bit for bit; and in float64, where layers neither draw nor write
    statistics, those of the whole mini-batch.
    """
    kind, (samples, micro_batches) = KINDS[mode.kind], mode.sizes
    loss_fn, mean = LOSSES[mode.loss]
    model = kind.chain().to(mode.dtype)
    reference, whole = plain.twin(model), plain.twin(model)
    borders, recompute = stages_of(mode, len(flatten(model)))
    parts, turns = min(micro_batches, samples), replica_of(mode)
    rounding = ROUNDING[mode.dtype]
    with cut_by_hand(
        model,
        borders,
        loss_fn=loss_fn,
        micro_batches=micro_batches,
        schedule=mode.schedule[0],
        chunks=mode.schedule[1],
        recompute=recompute,
        replicas=mode.replicas,
        strict=mode.strict,
    ) as pipe:
        for seed in range(STEPS):
            x, y = (torch.randn(samples, WIDTH).to(mode.dtype) for _ in "xy")
            ours, theirs, undivided = (x.clone().requires_grad_() for _ in range(3))
            torch.manual_seed(seed)
            if mode.drop_in:
                loss = loss_fn(pipe(ours), y)
                loss.backward()
                expected = called_step(reference, theirs, y, loss_fn, parts)
            else:
                loss = pipe.step(ours, target=y)
                torch.manual_seed(seed)
                expected = plain.micro_batched_step(
                    reference, theirs, y, loss_fn, parts, mean, kind.draws, turns
                )
            plain.assert_near(loss.detach().double(), expected.detach().double(), rounding, "loss")
            compare(plain.assert_same, model, reference, ours, theirs, rounding)
            if mode.dtype == torch.float64 and not kind.draws and not kind.writes and not kind.by_batch:
                plain.assert_near(loss.detach(), plain.whole_step(whole, undivided, y, loss_fn), what="loss")
                compare(plain.assert_close, model, whole, ours, undivided, rounding)
    plain.assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))


def compare(
    same: Callable[..., None], model: nn.Module, other: nn.Module, x: Tensor, x_other: Tensor, rounding: float
) -> None:
    found, wanted = (
        {name: t.to_dense() if t is not None and t.is_sparse else t for name, t in tensors.items()}
        for tensors in (
            plain.gradients(model) | {"input": x.grad},
            plain.gradients(other) | {"input": x_other.grad},
        )
    )
    if same is plain.assert_close:
        plain.assert_close(found, wanted, rounding)
    else:
        same(found, wanted)


MODES = list(covering(random.Random(0)))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_pipeline_trains_as_the_plain_model(mode: Mode):
    check(mode)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_trains_as_the_plain_model_in_many_modes(kind: str):
    for seed in seeds(40, f"conformance {kind}"):
        choose = random.Random(seed)
        torch.manual_seed(seed)
        check(drawn(choose, kind=kind))


def test_every_schedule_that_a_pipeline_can_run_is_among_the_modes():
    with_an_optimizer_in_the_step = {"pipedream", "pipedream-2bw"}
    assert {name for name, _ in SCHEDULES} | with_an_optimizer_in_the_step == set(schedules.names())


def test_the_modes_have_every_setting_of_every_kind_and_schedule():
    for kind in KINDS:
        assert len({mode.schedule for mode in MODES if mode.kind == kind}) >= 2
    for schedule in SCHEDULES:
        modes = [mode for mode in MODES if mode.schedule == schedule]
        for name in ("dtype", "recompute", "loss"):
            assert len({getattr(mode, name) for mode in modes}) >= 2, (schedule, name)
