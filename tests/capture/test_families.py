"""24 families of transformers, cut into stages: loss and gradients are those of plain micro-batches, bit for bit."""

from typing import Any

import pytest
import torch

from tests.capture.families import FAMILIES, build, quick
from tests.support.recorded import (
    assert_same_step,
    assert_that_of_the_whole,
    piped,
    plainly,
)

HOW: list[dict[str, Any]] = [
    {"stages": 3, "strict": True},
    {"stages": 2, "schedule": "gpipe", "recompute": "always"},
    {"stages": 3, "schedule": "zb-h1"},
    {"stages": 4, "schedule": "interleaved-1f1b", "chunks": 2},
    {"stages": 4, "schedule": "1f1b", "dtype": torch.bfloat16},
]
TWO_WAYS = [(name, (index + more) % len(HOW)) for index, name in enumerate(FAMILIES) for more in (0, 2)]
QUICK = [("gpt2", 0), ("t5", 0), ("mixtral", 2), ("llama", 1), ("bert", 4)]
OWN: dict[str, dict[str, Any]] = {
    "clip": {"reduction": "mean"},  # compares the samples of a micro-batch with each other
    "wav2vec2": {"weights": [1.0, 1.0]},  # its loss is a sum
}


@pytest.mark.parametrize(("name", "how"), quick(QUICK, TWO_WAYS))
def test_own_loss(name, how):
    settings = dict(HOW[how])
    model, sample = build(name, settings.pop("dtype", torch.float32))
    assert_same_step(model, sample, **settings, **OWN.get(name, {}))


@pytest.mark.parametrize("parts", quick([3], [3, 4]))
def test_uneven_labels_count_as_in_the_mini_batch(parts):
    (model, sample), (plain, _) = build("llama"), build("llama")
    sample["labels"][0] = -100
    sample["labels"][1, 3:] = -100
    sample: dict[str, Any] = {name: torch.cat([tensor, tensor[:3]]) for name, tensor in sample.items()}
    with piped(model, sample, stages=3, parts=parts) as pipe:
        loss = pipe.step(**sample)
    expected = plainly(plain, sample, parts=1)
    assert_that_of_the_whole(model, plain, loss, expected, atol=1e-7)


def test_the_number_of_items_in_the_batch():
    (model, sample), (plain, _) = build("llama"), build("llama")
    sample["labels"][0] = -100
    counted = {**sample, "num_items_in_batch": (sample["labels"][:, 1:] != -100).sum()}
    with piped(model, counted) as pipe:
        loss = pipe.step(**counted)
    torch.testing.assert_close(loss, plainly(plain, sample, parts=1), rtol=1e-6, atol=0)
