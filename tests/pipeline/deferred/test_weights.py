"""Deferred models: stages read their tensors from safetensors, and nothing is whole in two places."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Arguments, CaptureError, Pipeline, deferred_init
from pipepart.capture import RecordedChain
from tests.capture.families import FAMILIES
from tests.support.chains import plan_by_hand
from tests.support.recorded import borders_of, chain_for
from tests.support.tensors_read import watched_reads

torch_files: Any = pytest.importorskip("safetensors.torch")

LOSS = nn.functional.mse_loss


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes of each tensor whose values are read."""
    return watched_reads(monkeypatch)


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_shards_of_save_pretrained(family, tmp_path, read):
    make, sample = FAMILIES[family]
    saved: Any = make()
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    plain = type(saved).from_pretrained(tmp_path).train()
    read.clear()
    with deferred_init():
        model = make()
    chain = chain_for(plain, sample())
    names = [name for name, _ in chain.layers]
    plan = plan_by_hand(names, borders_of(len(names), 3), micro_batches=2)
    with (
        Pipeline(chain, plan) as expected,  # type: ignore[arg-type]
        Pipeline(RecordedChain(model, chain.groups), plan, weights=tmp_path) as pipe,  # type: ignore[arg-type]
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


def pipeline(weights: Path, **options: Any) -> Pipeline:
    with deferred_init():
        model = two_layers(**options)
    return Pipeline(model, plan_by_hand(["0", "1", "2"], [2], micro_batches=2), LOSS, weights=weights)


def saved(folder: Path, changes: dict[str, Tensor | None] | None = None) -> tuple[dict[str, Tensor], Path]:
    state = {**two_layers().state_dict(), **(changes or {})}
    kept = {name: tensor.contiguous() for name, tensor in state.items() if tensor is not None}
    torch_files.save_file(kept, folder / "model.safetensors")
    return kept, folder / "model.safetensors"


def test_one_file_and_a_model_with_or_without_values(tmp_path):
    state, path = saved(tmp_path)
    model = two_layers()
    with Pipeline(model, plan_by_hand(["0", "1", "2"], [1], micro_batches=2), LOSS, weights=path):
        assert torch.equal(model.get_parameter("0.weight"), state["0.weight"])
    with torch.device("meta"):
        model = two_layers().to(torch.float64)
    with Pipeline(model, plan_by_hand(["0", "1", "2"], [1], micro_batches=2), LOSS, weights=path) as pipe:
        found = pipe.state_dict()
        assert found["0.weight"].dtype is torch.float64  # as the model has it
        assert all(torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in state.items())
        pipe.step(torch.randn(4, 4).double(), target=torch.randn(4, 4).double())
        torch_files.save_file(
            saved(tmp_path)[0], tmp_path / "model.safetensors"
        )  # no window onto the file is left
        assert torch.equal(found["0.weight"], pipe.state_dict()["0.weight"])


@pytest.mark.parametrize("missing", ["0.weight", "2.weight"])
def test_tied_weights_are_found_under_either_name(missing, tmp_path):
    state, _ = saved(tmp_path, {missing: None})
    with pipeline(tmp_path, tied=True) as pipe:
        weight = state["2.weight" if missing == "0.weight" else "0.weight"]
        assert torch.equal(pipe.module[0].weight, weight)  # type: ignore[index]
        assert pipe.module[2].weight is pipe.module[0].weight  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"0.bias": None}, r"they lack 0\.bias"),
        ({"extra": torch.ones(1)}, r"the model does not have extra"),
        ({"1.weight": torch.ones(5)}, r"of another shape are 1\.weight \(5,\) in place of \(4,\)"),
    ],
)
def test_other_weights_are_refused_before_any_is_read(changes, message, tmp_path, read):
    saved(tmp_path, changes)
    with pytest.raises(ValueError, match=message):
        pipeline(tmp_path)
    assert not read


def test_tied_weights_that_differ_are_refused(tmp_path):
    saved(tmp_path)
    with pytest.raises(ValueError, match=r"'0.weight' and '2.weight' are one tensor"):
        pipeline(tmp_path, tied=True)


def test_files_of_another_kind_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither a file nor a folder with 'model.safetensors'"):
        pipeline(tmp_path)
    _, path = saved(tmp_path)
    cut_off = path.read_bytes()[:-8]
    torch.save(two_layers().state_dict(), path)
    with pytest.raises(ValueError, match=r"model\.safetensors' is not a file of safetensors.*assign=True"):
        pipeline(tmp_path)
    path.write_bytes(cut_off)
    with pytest.raises(ValueError, match=r"model\.safetensors' is not a whole file"):
        pipeline(tmp_path)
    state: Any = two_layers().state_dict()
    with pytest.raises(TypeError, match=r"path of a file or folder, got OrderedDict.*assign=True"):
        Pipeline(two_layers(), plan_by_hand(["0", "1", "2"], [1], micro_batches=2), LOSS, weights=state)


class Positions(nn.Linear):
    """Has a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def test_buffers_that_are_not_saved_are_initialized(tmp_path):
    torch_files.save_file(
        nn.Sequential(Positions(), Positions()).state_dict(), tmp_path / "model.safetensors"
    )
    with torch.device("meta"):
        model = nn.Sequential(Positions(), Positions())
    plan = plan_by_hand(["0", "1"], [1], micro_batches=2)
    with pytest.raises(
        CaptureError, match=r"buffer '0.table' is on the meta device and the weights do not have it"
    ):
        Pipeline(model, plan, LOSS, weights=tmp_path)

    def tables(module: nn.Module) -> None:
        if isinstance(module, Positions):
            nn.init.constant_(module.table, 3.0)  # type: ignore[arg-type]
            nn.init.zeros_(module.weight)  # the file overrides it

    with Pipeline(model, plan, LOSS, weights=tmp_path, initialize=tables) as pipe:
        assert torch.equal(model.get_buffer("1.table"), torch.full((4,), 3.0))
        assert pipe.state_dict()["1.weight"].any()
