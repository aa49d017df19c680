"""Models without memory for their parameters: stages initialize or read their own, or refuse to start."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart import Arguments, CaptureError, Pipeline, check, deferred_init
from pipepart.capture import RecordedChain
from tests.capture.families import FAMILIES
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.deferred import Tied, deferred, initialize, pipelines, reset_parameters
from tests.support.recorded import borders_of, chain_for
from tests.support.tensors_read import watched_reads

pytestmark = pytest.mark.usefixtures("short_profiles")


LOSS, CLASSES = nn.functional.mse_loss, nn.functional.cross_entropy
WORDS = torch.randint(12, (8,))


def two_layers(tied: bool = False) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    if tied:
        model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("strict", [False, True])
def test_training_of_a_recorded_model(strict):
    """Losses, gradients, and the state after each step of an optimizer."""
    batches = [(torch.randint(12, (8,)), torch.randint(12, (8,))) for _ in range(3)]
    both = pipelines(Tied, batches[0][0], loss_fn=CLASSES, strict=strict)
    optimizers = [torch.optim.Adam(pipe.parameters()) for pipe in both]
    with both[0] as expected, both[1] as pipe:
        for x, y in batches:
            assert pipe.step(x, target=y).equal(expected.step(x, target=y))
            plain.assert_same(plain.gradients(pipe.module), plain.gradients(expected.module))
            for one, optimizer in zip(both, optimizers, strict=True):
                optimizer.step()
                one.zero_grad()
            plain.assert_same(pipe.state_dict(), expected.state_dict())


def test_parameters_stay_the_same_objects():
    model = deferred(Tied)
    weight: Any = model.get_parameter("embed.weight")
    weight.tag = "mine"
    weight.register_hook(lambda gradient: gradient * 0)
    model.get_submodule("blocks.2").requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    same = RecordedChain(model, chain_for(Tied(), WORDS, loss_fn=CLASSES).groups, split_loss=False)
    with cut_by_hand(same, [1, 3], loss_fn=CLASSES, micro_batches=2, initialize=initialize) as pipe:
        assert pipe.module is model
        assert model.get_parameter("embed.weight") is weight is model.get_parameter("head.weight")
        assert type(weight) is nn.Parameter
        assert vars(weight)["tag"] == "mine"
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        pipe.step(WORDS, target=WORDS)
        optimizer.step()
        after = pipe.state_dict()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed.isdisjoint({"embed.weight", "head.weight", "spare", "blocks.2.0.weight"})
        assert "blocks.1.0.weight" in changed


def filled(model: nn.Module, initialize: Any = initialize, border: int = 1) -> nn.Module:
    """Make a pipeline of a sequential model, with two stages; return the model."""
    cut_by_hand(model, [border], loss_fn=LOSS, initialize=initialize).close()
    return model


def test_values_do_not_depend_on_the_cut_and_follow_the_seed():
    """With values as the constructors of torch's layers draw them, also for buffers."""
    found = []
    for seed, border in ((0, 1), (0, 2), (1, 1)):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 400), nn.BatchNorm1d(400), nn.Linear(400, 4, bias=False))
        torch.manual_seed(seed)
        found.append((filled(model, reset_parameters, border).state_dict(), torch.rand(1)))
    (first, draw), (same, same_draw), (other, _) = found
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert {name for name in first if torch.equal(first[name], other[name])} == {
        n for n in first if n[0] == "1"
    }
    assert torch.equal(draw, same_draw)
    assert 0.9 / 2 < first["0.weight"].abs().max() <= 1 / 2  # 1 / sqrt(4)
    assert torch.equal(first["1.running_var"], torch.ones(400))
    assert first["1.num_batches_tracked"] == 0


class Peculiar(nn.Linear):
    """Holds more than a linear layer: a parameter, buffers with integers and truth values, or an attribute."""

    def __init__(self, what: str = "buffers") -> None:
        super().__init__(4, 4)
        if what == "parameter":
            self.scale = nn.Parameter(torch.ones(4))
        elif what == "buffers":
            self.register_buffer("places", torch.arange(4))
            self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        elif what == "attribute":
            self.table = [torch.rand(4)]


@torch.no_grad()
def times_two(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.mul_(2)


@pytest.mark.parametrize(
    ("what", "how", "message"),
    [
        ("nothing", None, r"parameter '0.weight' is on the meta device.*initialize=.*weights=.*to_empty"),
        ("parameter", reset_parameters, r"nothing initializes parameter '0.scale'"),
        ("nothing", times_two, r"nothing initializes parameter '0.weight'"),
        ("buffers", reset_parameters, r"nothing initializes buffer '0.places'"),
        ("attribute", initialize, r"attribute '0.table' is on the meta device: register it as a buffer"),
    ],
)
def test_a_tensor_that_nothing_initializes_is_refused(what, how, message):
    with torch.device("meta"):
        model = nn.Sequential(Peculiar(what), nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=message):
        filled(model, how)
    if how is None:
        with pytest.raises(CaptureError, match=message):
            Pipeline.auto(model, torch.randn(4, 4), target=torch.randn(4, 4), loss_fn=LOSS)


def test_buffers_keep_their_values_under_deferred_init_and_an_initializer_may_bind_them_anew():
    def rebind(module: nn.Module) -> None:
        initialize(module)
        if isinstance(module, Peculiar):
            module.places, module.mask = torch.arange(4) * 2, torch.zeros(4, dtype=torch.bool)

    with deferred_init():
        model = nn.Sequential(Peculiar(), nn.Linear(4, 4)).to(torch.float64)
    filled(model)
    assert torch.equal(model.get_buffer("0.places"), torch.arange(4))
    assert model.get_buffer("0.mask").all()
    assert model.get_parameter("0.weight").dtype is torch.float64
    with torch.device("meta"):
        model = nn.Sequential(Peculiar(), nn.Linear(4, 4))
    filled(model, rebind)
    assert torch.equal(model.get_buffer("0.places"), torch.tensor([0, 2, 4, 6]))


def test_what_cannot_be_initialized_safely_is_refused():
    some = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to("meta"))
    with pytest.raises(
        CaptureError, match=r"parameter '0.weight' has values and parameter '1.weight' has none"
    ):
        filled(some)

    def broken(module: nn.Module) -> None:
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose") as caught:
        filled(deferred(two_layers), broken)
    assert caught.value.__notes__ == ["pipepart: while module '0' was initialized"]
    with pytest.raises(TypeError, match="initialize must be a function of a module"):
        filled(two_layers(), "normal")
    model: Any = deferred(two_layers)
    held = model[0](torch.empty(2, 4, device="meta", requires_grad=True))
    with pytest.raises(CaptureError, match=r"parameter '0.weight' cannot get values.*before a forward"):
        filled(model)
    assert held.is_meta


def test_auto_and_check():
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    model = deferred(two_layers).eval()
    with pytest.raises(ValueError, match=r"on the meta device.*pipe\.module"):
        check(model, x, target=y, loss_fn=LOSS)
    with Pipeline.auto(model, x, target=y, loss_fn=LOSS, devices=2, initialize=initialize) as pipe:
        expected = LOSS(model(x), y).detach()
        torch.testing.assert_close(pipe.step(x, target=y), expected)


torch_files: Any = pytest.importorskip("safetensors.torch")
FILE = "model.safetensors"


def test_shards_of_save_pretrained(tmp_path, monkeypatch):
    read = watched_reads(monkeypatch)
    make, sample = FAMILIES["llama"]
    saved_state: Any = make()
    saved_state.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / f"{FILE}.index.json").is_file()
    plain = type(saved_state).from_pretrained(tmp_path).train()
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


def from_weights(
    weights: Any, model: nn.Module | None = None, tied: bool = False, **options: Any
) -> Pipeline:
    """With a new model without memory if none is given."""
    with deferred_init():
        deferred = two_layers(tied)
    return cut_by_hand(model or deferred, [1], loss_fn=LOSS, micro_batches=2, weights=weights, **options)


def saved_state(folder: Path, changes: dict[str, Tensor | None] | None = None) -> dict[str, Tensor]:
    state = {**two_layers().state_dict(), **(changes or {})}
    kept = {name: tensor.contiguous() for name, tensor in state.items() if tensor is not None}
    torch_files.save_file(kept, folder / FILE)
    return kept


def test_one_file_and_a_model_with_or_without_values(tmp_path):
    state, model = saved_state(tmp_path), two_layers()
    with from_weights(tmp_path / FILE, model):
        assert torch.equal(model.get_parameter("0.weight"), state["0.weight"])
    with torch.device("meta"):
        model = two_layers().to(torch.float64)
    with from_weights(tmp_path / FILE, model) as pipe:
        found = pipe.state_dict()
        assert found["0.weight"].dtype is torch.float64  # as the model has it
        assert all(torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in state.items())
        pipe.step(torch.randn(4, 4).double(), target=torch.randn(4, 4).double())
        saved_state(tmp_path)  # no window onto the file is left
        assert torch.equal(found["0.weight"], pipe.state_dict()["0.weight"])


@pytest.mark.parametrize(("missing", "other"), [("0.weight", "2.weight"), ("2.weight", "0.weight")])
def test_tied_weights_are_found_under_either_name(missing, other, tmp_path):
    state = saved_state(tmp_path, {missing: None})
    with from_weights(tmp_path, tied=True) as pipe:
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
def test_other_weights_are_refused_before_any_is_read(changes, tied, message, tmp_path, monkeypatch):
    read = watched_reads(monkeypatch)
    saved_state(tmp_path, changes)
    with pytest.raises(ValueError, match=message):
        from_weights(tmp_path, tied=tied)
    assert tied or not read


def test_files_of_another_kind_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither a file nor a folder with 'model.safetensors'"):
        from_weights(tmp_path)
    saved_state(tmp_path)
    cut_off = (tmp_path / FILE).read_bytes()[:-8]
    torch.save(two_layers().state_dict(), tmp_path / FILE)
    with pytest.raises(ValueError, match=r"model\.safetensors' is not a file of safetensors"):
        from_weights(tmp_path)
    (tmp_path / FILE).write_bytes(cut_off)
    with pytest.raises(ValueError, match=r"model\.safetensors' is not a whole file"):
        from_weights(tmp_path)
    with pytest.raises(TypeError, match=r"path of a file or folder, got OrderedDict.*assign=True"):
        from_weights(two_layers().state_dict(), two_layers())


class Positions(nn.Linear):
    """Has a buffer that is not saved_state."""

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
        from_weights(tmp_path, model)

    def tables(module: nn.Module) -> None:
        if isinstance(module, Positions):
            nn.init.constant_(module.get_buffer("table"), 3.0)
            nn.init.zeros_(module.weight)  # the file overrides it

    with from_weights(tmp_path, model, initialize=tables) as pipe:
        assert torch.equal(model.get_buffer("1.table"), torch.full((4,), 3.0))
        assert pipe.state_dict()["1.weight"].any()
