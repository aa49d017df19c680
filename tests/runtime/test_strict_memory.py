"""The memory of strict virtual devices: what is counted, on whose account, and where it ends."""

import gc

import pytest
import torch
from torch import Tensor, nn

from pipepart import Cluster, Pipeline
from tests.support import plain
from tests.support.chains import cut_by_hand, plan_by_hand

WIDTH = 64
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
ROW = 4 * WIDTH
LOSSES = 100  # some numbers that a worker lets go of when it is idle, just after the step


def chain(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


def batch(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)


def step(pipe: Pipeline) -> None:
    x, y = batch(6)
    pipe.step(x, target=y)


def limited(model: nn.Module, memory: int, micro_batches: int = 2) -> Pipeline:
    plan = plan_by_hand(["0", "1", "2", "3"], [3], micro_batches=micro_batches, schedule="gpipe")
    plan = plan.model_copy(update={"cluster": Cluster.virtual(2, memory=memory, threads=1)})
    return Pipeline(model, plan, nn.MSELoss(), strict=True)


def test_parameters_are_counted_at_once_and_gradients_after_a_step_and_no_more():
    with cut_by_hand(chain(), [1], loss_fn=nn.MSELoss(), strict=True) as pipe:
        assert {name: one.allocated for name, one in pipe.memory().items()} == {
            "virtual:0": LAYER,
            "virtual:1": 3 * LAYER,
        }
        for _ in range(3):
            step(pipe)
            found = pipe.memory()["virtual:1"]
            assert (found.by_category["parameters"], found.by_category["gradients"]) == (3 * LAYER, 3 * LAYER)
            assert found.allocated - 6 * LAYER <= LOSSES
        pipe.zero_grad()
        assert pipe.memory()["virtual:1"].allocated - 3 * LAYER <= LOSSES


def test_one_parameter_of_several_stages_of_a_device_counts_once():
    model = chain()
    model[2].weight = model[0].weight
    with cut_by_hand(
        model,
        [1, 2, 3],
        loss_fn=nn.MSELoss(),
        schedule="interleaved-1f1b",
        chunks=2,
        micro_batches=2,
        strict=True,
    ) as pipe:
        step(pipe)
        parameters = pipe.memory()["virtual:0"].by_category["parameters"]
    assert parameters == LAYER + ROW


def test_what_does_not_fit_is_refused_with_what_is_in_use_and_a_smaller_step_works():
    model = chain()
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
    limited(chain(), 3 * LAYER).close()
    with pytest.raises(
        torch.OutOfMemoryError, match="virtual:0 is out of memory: one of the parameters of stage 0"
    ):
        limited(chain(), 3 * LAYER - 1)


@pytest.mark.parametrize(("recompute", "kept"), [("never", 2), ("always", 1)])
def test_an_output_that_will_be_differentiated_keeps_the_stash_of_each_stage(recompute, kept):
    """The inputs of two layers, or of the first alone."""
    with cut_by_hand(chain(), [2], micro_batches=6, recompute=recompute, strict=True) as pipe:
        output = pipe(torch.randn(60, WIDTH))
        found = [one.by_category["other"] for one in pipe.memory().values()]
        assert output.requires_grad
    assert found == [pytest.approx(kept * 60 * ROW, abs=LOSSES)] * 2
