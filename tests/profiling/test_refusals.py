"""Calls of ``profile`` that are refused, with the values and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import pipepart
from pipepart import CaptureError, Roofline

CPU = Roofline.parse("cpu: 50 GFLOP/s, 10 GB/s, 10 us")
ESTIMATED: dict[str, Any] = {"measure": False, "roofline": CPU}


def loss_fn(output: Tensor) -> Tensor:
    raise AssertionError("the loss was computed")


def sharded(layers: Mapping[str, nn.Module], mesh: Any) -> None:
    for layer in layers.values():
        fully_shard(layer, mesh=mesh["dp"])


# Keywords, and a part of the message.
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"optimizer": "lion"}, ValueError, "optimizer 'lion' is not known: .*'adam'"),
    ({"loss_fn": loss_fn, "micro_batches": (2, 100)}, ValueError, "=100 is more than the mini-batch has samples, 8"),
    ({"threads": 0}, ValueError, r"threads must be between 1 and \d+ .*, got 0"),
    ({"threads": 100_000}, ValueError, r"threads must be between 1 and \d+ .*, got 100000"),
    ({"device": "meta"}, ValueError, 'device="meta" has nothing to measure'),
    ({"device": "cuda:99"}, ValueError, "there is no cuda:99 here"),
    ({"roofline": CPU}, ValueError, "measure=False"),
    ({"measure": False}, ValueError, r"roofline=pipepart\.Roofline\.parse"),
    ({"measure": False, "roofline": str(CPU)}, TypeError, r"write Roofline\.parse"),
    ({**ESTIMATED, "device": "cpu"}, ValueError, "leave one out"),
    ({"tensor": 2}, TypeError, "give parallelize=f, as for pipepart.Pipeline; got None"),
    ({"tensor": 0, "parallelize": sharded}, ValueError, "tensor must be a whole number of at least 1, got 0"),
    (
        {"tensor": 2, "parallelize": sharded, "seconds": 0.0},
        ValueError,
        r"called fully_shard on '0'.*shard=True.*mesh\['dp'\].size",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("keywords", "error", "message"), REFUSED, ids=lambda _: "")
def test_a_call_is_refused(keywords: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pipepart.profile(nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4), **keywords)
    assert not dist.is_initialized()


def test_what_has_no_estimate_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4)
    with pytest.raises(ValueError, match="autocast"), torch.autocast("cpu"):
        pipepart.profile(model, x, **ESTIMATED)
    with pytest.raises(CaptureError, match="recurrent"):
        pipepart.profile(nn.Sequential(nn.GRU(4, 4)), x[:, None], **ESTIMATED)
    for text in ("312 TFLOP/s", "cuda: 0 TFLOP/s, 2.0 TB/s", "cuda: 1.2.3 TFLOP/s, 2.0 TB/s"):
        with pytest.raises(ValueError, match="is not a roofline: write for example"):
            Roofline.parse(text)


def test_a_process_group_in_use_is_left_alone() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with pytest.raises(ValueError, match=r"torch\.distributed is in use here: profile before"):
            pipepart.profile(nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4), tensor=2, parallelize=sharded)
        assert dist.get_world_size() == 4
    finally:
        dist.destroy_process_group()
