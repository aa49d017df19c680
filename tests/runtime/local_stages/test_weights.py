"""A process reads only the tensors of its own stages from files of weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.allocated import allocated
from tests.support.chains import plan_by_hand
from tests.support.deferred import Tied, deferred, twins
from tests.support.local_stages import process
from tests.support.recorded import borders_of, chain_for
from tests.support.tensors_read import watched_reads

torch_files: Any = pytest.importorskip("safetensors.torch")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes of each tensor whose values are read."""
    return watched_reads(monkeypatch)


def shares(
    make: Any, groups: Any, plan: Any, folder: Path, read: dict[str, int]
) -> Iterator[dict[str, Tensor]]:
    """Yield the state that each process has, and check what it has read."""
    for stage in range(len(plan.stages)):
        read.clear()
        model, _ = process(deferred(make), plan, {stage}, groups=groups, weights=folder)
        own = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
        by_memory = {tensor.data_ptr(): tensor.nbytes for tensor in own.values()}
        assert read.keys() <= own.keys()
        assert sum(read.values()) == sum(by_memory.values())
        yield own


def test_each_process_reads_its_own_tensors(tmp_path, read):
    saved = Tied()
    torch_files.save_model(saved, str(tmp_path / "model.safetensors"))
    check_shares(Tied, saved, torch.randint(12, (8,)), tmp_path, read)


def check_shares(make: Any, saved: nn.Module, sample: Any, folder: Path, read: dict[str, int]) -> None:
    """Each of three processes has the saved values of its own stage, and all together have all that was saved."""
    chain: Any = chain_for(saved, sample)
    layers = [name for name, _ in chain.layers]
    plan = plan_by_hand(layers, borders_of(len(layers), 3), micro_batches=2)
    expected = saved.state_dict()
    found: dict[str, Tensor] = {}
    for own in shares(make, chain.groups, plan, folder, read):
        found |= own
        assert all(torch.equal(tensor, expected[name]) for name, tensor in own.items())
    assert found.keys() == expected.keys()


def test_memory_while_a_share_is_read(tmp_path):
    def make() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))

    plain, model = twins(make)
    file = tmp_path / "model.safetensors"
    torch_files.save_model(plain, str(file))
    plan = plan_by_hand([str(index) for index in range(8)], [2, 4, 6], micro_batches=2)
    found = allocated(lambda: process(model, plan, {2}, weights=tmp_path))
    layer = 256 * 256 * 4 + 256 * 4
    window = file.stat().st_size  # onto the file: addresses, of which only what is read takes memory
    assert 2 * layer <= found.kept < 2 * layer + 4096
    assert found.peak - window < 3 * layer
    assert torch.equal(model.get_parameter("5.weight"), plain.get_parameter("5.weight"))
    assert model.get_parameter("0.weight").is_meta
