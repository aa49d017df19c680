"""Deferred models: stages read their tensors from safetensors, and nothing is whole in two places."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Arguments, CaptureError, Pipeline, deferred_init
from pipepart.capture import RecordedChain
from tests.capture.families import FAMILIES
from tests.support.chains import cut_by_hand
from tests.support.recorded import borders_of, chain_for
from tests.support.tensors_read import watched_reads

torch_files: Any = pytest.importorskip("safetensors.torch")

LOSS = nn.functional.mse_loss
FILE = "model.safetensors"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes of each tensor whose values are read."""
    return watched_reads(monkeypatch)


def test_shards_of_save_pretrained(tmp_path, read):
    make, sample = FAMILIES["llama"]
    saved: Any = make()
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / f"{FILE}.index.json").is_file()
    plain = type(saved).from_pretrained(tmp_path).train()
    read.clear()
    with deferred_init():
        model = make()
    chain = chain_for(plain, sample())
    borders, own = borders_of(len(chain.layers), 3), RecordedChain(model, chain.groups)
    with (
        cut_by_hand(chain, borders, micro_batches=2) as expected,
        cut_by_hand(own, borders, micro_batches=2, weights=tmp_path) as pipe,
    ):
        assert sorted(read) == sorted({name for name, _ in plain.named_parameters()})
        state, other = pipe.state_dict(), expected.state_dict()
        assert state.keys() == other.keys()
        assert all(torch.equal(state[name], other[name]) for name in state)
        assert torch.equal(pipe.step(Arguments.of(sample())), expected.step(Arguments.of(sample())))


def two_layers(tied: bool = False) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    if tied:
        model[2].weight = model[0].weight
    return model


def pipeline(weights: Any, model: nn.Module | None = None, tied: bool = False, **options: Any) -> Pipeline:
    """With a new model without memory if none is given."""
    with deferred_init():
        deferred = two_layers(tied)
    return cut_by_hand(model or deferred, [1], loss_fn=LOSS, micro_batches=2, weights=weights, **options)


def saved(folder: Path, changes: dict[str, Tensor | None] | None = None) -> dict[str, Tensor]:
    """Save the state of a new model with changes, and return it."""
    state = {**two_layers().state_dict(), **(changes or {})}
    kept = {name: tensor.contiguous() for name, tensor in state.items() if tensor is not None}
    torch_files.save_file(kept, folder / FILE)
    return kept


def test_one_file_and_a_model_with_or_without_values(tmp_path):
    state, model = saved(tmp_path), two_layers()
    with pipeline(tmp_path / FILE, model):
        assert torch.equal(model.get_parameter("0.weight"), state["0.weight"])
    with torch.device("meta"):
        model = two_layers().to(torch.float64)
    with pipeline(tmp_path / FILE, model) as pipe:
        found = pipe.state_dict()
        assert found["0.weight"].dtype is torch.float64  # as the model has it
        assert all(torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in state.items())
        pipe.step(torch.randn(4, 4).double(), target=torch.randn(4, 4).double())
        saved(tmp_path)  # no window onto the file is left
        assert torch.equal(found["0.weight"], pipe.state_dict()["0.weight"])


@pytest.mark.parametrize(("missing", "other"), [("0.weight", "2.weight"), ("2.weight", "0.weight")])
def test_tied_weights_are_found_under_either_name(missing, other, tmp_path):
    state = saved(tmp_path, {missing: None})
    with pipeline(tmp_path, tied=True) as pipe:
        weight = pipe.module.get_parameter("0.weight")
        assert torch.equal(weight, state[other])
        assert pipe.module.get_parameter("2.weight") is weight


@pytest.mark.parametrize(
    ("changes", "tied", "message"),
    [
        ({"0.bias": None}, False, r"they lack 0\.bias"),
        ({"extra": torch.ones(1)}, False, r"the model does not have extra"),
        ({"1.weight": torch.ones(5)}, False, r"of another shape are 1\.weight \(5,\) in place of \(4,\)"),
        ({}, True, r"'0.weight' and '2.weight' are one tensor"),
    ],
)
def test_other_weights_are_refused_before_any_is_read(changes, tied, message, tmp_path, read):
    saved(tmp_path, changes)
    with pytest.raises(ValueError, match=message):
        pipeline(tmp_path, tied=tied)
    assert tied or not read


def test_files_of_another_kind_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither a file nor a folder with 'model.safetensors'"):
        pipeline(tmp_path)
    saved(tmp_path)
    cut_off = (tmp_path / FILE).read_bytes()[:-8]
    torch.save(two_layers().state_dict(), tmp_path / FILE)
    with pytest.raises(ValueError, match=r"model\.safetensors' is not a file of safetensors"):
        pipeline(tmp_path)
    (tmp_path / FILE).write_bytes(cut_off)
    with pytest.raises(ValueError, match=r"model\.safetensors' is not a whole file"):
        pipeline(tmp_path)
    with pytest.raises(TypeError, match=r"path of a file or folder, got OrderedDict.*assign=True"):
        pipeline(two_layers().state_dict(), two_layers())


class Positions(nn.Linear):
    """Has a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def test_buffers_that_are_not_saved_are_initialized(tmp_path):
    torch_files.save_file(nn.Sequential(Positions(), Positions()).state_dict(), tmp_path / FILE)
    with torch.device("meta"):
        model = nn.Sequential(Positions(), Positions())
    with pytest.raises(
        CaptureError, match=r"buffer '0.table' is on the meta device and the weights do not have it"
    ):
        pipeline(tmp_path, model)

    def tables(module: nn.Module) -> None:
        if isinstance(module, Positions):
            nn.init.constant_(module.get_buffer("table"), 3.0)
            nn.init.zeros_(module.weight)  # the file overrides it

    with pipeline(tmp_path, model, initialize=tables) as pipe:
        assert torch.equal(model.get_buffer("1.table"), torch.full((4,), 3.0))
        assert pipe.state_dict()["1.weight"].any()
