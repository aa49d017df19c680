"""Checkpoints are whole: they load into any other layout of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pipepart
from tests.inside_stage.cases import Layout, blocks, resumed, shard, split, split_and_shard
from tests.support import plain
from tests.support.ranks import ranks

pytestmark = pytest.mark.slow

LAYOUTS = {
    "four stages": Layout(borders=(2, 4, 6)),
    "four stages, sharded alone": Layout(shard, borders=(2, 4, 6)),
    "sharded over two": Layout(shard, replicas=2),
    "sharded over four": Layout(shard, replicas=4, borders=()),
    "split": Layout(split, tensor=2),
    "split and sharded": Layout(split_and_shard, replicas=2, tensor=2, borders=()),
}


def test_any_layout_loads_what_any_other_saves(tmp_path: Path):
    names = list(LAYOUTS)
    first = {name: ranks(4).run(resumed, LAYOUTS[name], None, tmp_path / name) for name in names}
    expected = ranks(4).run(resumed, LAYOUTS[names[0]], tmp_path / names[0], None)[0]
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        for one in first[name]:
            plain.assert_close(one["state"], first[names[0]][0]["state"], 1e-10)
        for one in ranks(4).run(resumed, LAYOUTS[following], tmp_path / name, None):
            plain.assert_near(torch.stack(one["losses"]), torch.stack(expected["losses"]), 1e-10, name)
            plain.assert_close(one["state"], expected["state"], 1e-10)


def test_a_plain_module_loads_what_was_split_and_sharded(tmp_path: Path):
    saved = ranks(4).run(resumed, LAYOUTS["split and sharded"], None, tmp_path)[0]["state"]
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    pipepart.load(tmp_path, model, optimizer)
    for name, value in model.state_dict().items():
        assert value.equal(saved[name]), name
    for parameter in model.parameters():
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
