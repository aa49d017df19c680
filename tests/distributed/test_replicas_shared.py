"""Under torchrun replicas of a model share what they have learned, and refuse what they would get wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pipepart
from pipepart import Pipeline
from tests.distributed.models import CLASSES, LOSSES, Balanced, classifier, labelled
from tests.distributed.training import TIMEOUT, Own, adam, drawn_batches, gradients, trained
from tests.support import plain, tied
from tests.support.chains import plan_by_hand
from tests.support.pieces import WIDTH, linear
from tests.support.ranks import Failed, assert_as_in_one_process, ranks
from tests.support.recorded import chain_for
from tests.support.replicas import cut_replicas


def with_loss(name: str) -> dict[str, Any]:
    pipe = cut_replicas(classifier(), [2], 2, loss_fn=LOSSES[name], micro_batches=5, timeout=TIMEOUT)
    return trained(pipe, labelled((12, 11, 1, 12)), max_norm=0.1)


@pytest.mark.parametrize("name", ["ignored", "sum and count"])
def test_what_a_loss_is_divided_by_is_counted_over_all_replicas(name):
    assert_as_in_one_process(with_loss, 4, name)


def known_last() -> dict[str, Any]:
    pipe = cut_replicas(classifier(), [2], 2, loss_fn=LOSSES["known last"], micro_batches=5, timeout=TIMEOUT)
    x, y = labelled((11,))[0]
    with pipe:
        return {"loss": pipe.step(x, target=y), "gradients": gradients(pipe), "state": pipe.full_state_dict()}


def test_a_count_of_the_output_corrects_the_gradients_of_all_replicas():
    found = ranks(4).run(known_last)
    model = classifier()
    model.load_state_dict(found[0]["state"])
    x, y = labelled((11,))[0]
    total, count = LOSSES["known last"](model(x), y)
    (total / count).backward()
    expected = plain.gradients(model)
    for one in found:
        plain.assert_near(one["loss"], total.detach() / count)
        plain.assert_close(one["gradients"], {name: expected[name] for name in one["gradients"]})


def accumulated() -> dict[str, Any]:
    model = classifier()
    model[0].bias.requires_grad_(False)
    with cut_replicas(model, [2], 2, loss_fn=nn.CrossEntropyLoss(), micro_batches=5, timeout=TIMEOUT) as pipe:
        for x, y in labelled((12, 11, 1)):
            pipe.step(x, target=y, loss_weight=1 / 3)
        norm = pipe.clip_grad_norm_(0.01)
        return {"gradients": gradients(pipe), "norm": norm}


def test_gradients_of_earlier_steps_count_once():
    assert_as_in_one_process(accumulated, 4)


def with_tied_weights(optimizer: Any) -> dict[str, Any]:
    torch.manual_seed(5)
    pipe = cut_replicas(
        tied.language_model().double(), [2, 4], 2, loss_fn=tied.loss_fn, timeout=TIMEOUT, optimizer=optimizer
    )
    torch.manual_seed(6)
    return trained(pipe, [tied.words(), tied.words(2), tied.words()], None if optimizer else adam)


@pytest.mark.parametrize("optimizer", [None, adam])
def test_tied_weights_and_optimizers_in_the_stages(optimizer):
    assert_as_in_one_process(with_tied_weights, 2, optimizer)


class Sometimes(nn.Module):
    """Uses a parameter for some micro-batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.used if float(x.sum()) > 0 else x


def used_by_some() -> dict[str, Any]:
    model = nn.Sequential(linear(), Balanced(), Sometimes(), linear()).double()
    pipe = cut_replicas(model, [2], 2, loss_fn=nn.MSELoss(), micro_batches=2, timeout=TIMEOUT)
    return trained(pipe, drawn_batches([4, 2, 3, 4, 6]))


def test_parameters_that_some_replicas_do_not_use_and_added_losses():
    assert_as_in_one_process(used_by_some, 4)


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.second(torch.tanh(self.first(x)))
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores}


def recorded() -> dict[str, Any]:
    model = OwnLoss().double()
    x, y = labelled((7,))[0]
    chain = chain_for(model, (x, y), parts=3)
    plan = plan_by_hand([name for name, _ in chain.layers], [1], micro_batches=3, replicas=2)
    x.requires_grad_()
    with Pipeline(chain, plan, timeout=TIMEOUT) as pipe:
        loss, output = pipe.step(x, y, return_outputs=True)
        with torch.no_grad():
            called = pipe(x, y)
        evaluated = pipe.evaluate(x, y)
        return {
            "loss": loss,
            "output": output,
            "called": called,
            "evaluated": evaluated,
            "input": x.grad,
            "gradients": gradients(pipe),
        }


def test_outputs_and_input_gradients_of_all_replicas_reach_every_rank():
    assert_as_in_one_process(recorded, 4)


def unlike() -> dict[str, Any]:
    """Ranks make the model with other seeds, and later load other values."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear()).double()
    x, y = drawn_batches([8])[0]
    with cut_replicas(model, [2], 2, loss_fn=nn.MSELoss(), micro_batches=4, timeout=TIMEOUT) as pipe:
        made = Own({name: value.clone() for name, value in pipe.state_dict().items()})
        pipe.step(x, target=y)
        trained = Own({name: value.clone() for name, value in pipe.state_dict().items()})
        pipe.load_state_dict({name: value + rank for name, value in pipe.full_state_dict().items()})
        loaded = Own({name: value.clone() for name, value in pipe.state_dict().items()})
        mesh = pipe.mesh
        assert mesh is not None
        place = {
            "mesh": mesh.mesh.tolist(),
            "names": mesh.mesh_dim_names,
            "at": list(mesh.get_coordinate() or ()),
        }
        dist.barrier(mesh.get_group("dp"))
        return {"made": made, "trained": trained, "loaded": loaded, **place}


def test_further_replicas_have_the_values_of_the_first():
    found = ranks(4).run(unlike)
    for first, other in ((0, 2), (1, 3)):
        for when in ("made", "trained", "loaded"):
            plain.assert_same(found[first][when], found[other][when])
    assert [one["at"] for one in found] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert all((one["mesh"], one["names"]) == ([[0, 1], [2, 3]], ("dp", "pp")) for one in found)
    model = nn.BatchNorm1d(WIDTH).double()
    assert not found[0]["trained"]["1.running_mean"].equal(model.running_mean)
    assert found[0]["trained"]["1.num_batches_tracked"] == 2  # micro-batches of the first replica


def saved(folder: str) -> dict[str, Any]:
    pipe = cut_replicas(classifier(), [2], 2, loss_fn=nn.CrossEntropyLoss(), timeout=TIMEOUT)
    with pipe:
        optimizer = adam(pipe.parameters())
        x, y = labelled((12,))[0]
        pipe.step(x, target=y)
        optimizer.step()
        pipepart.save(folder, pipe, optimizer, step=1)
        state = pipe.full_state_dict()
        pipe.load_state_dict({name: value * 0 for name, value in state.items()})
        pipepart.load(folder, pipe, optimizer)
        again = pipe.full_state_dict()
        for name, value in state.items():
            assert again[name].equal(value), name
        return state


def test_a_checkpoint_of_replicas_is_that_of_one_model(tmp_path):
    state = ranks(4).run(saved, str(tmp_path))[0]
    model = classifier()
    written = [name for file in tmp_path.glob("latest/model-*.safetensors") for name in load_file(file)]
    assert sorted(written) == sorted(state)
    pipepart.load(tmp_path, model, torch.optim.Adam(model.parameters()))
    plain.assert_same(model.state_dict(), state)


def loaded_in_parts() -> dict[str, Any]:
    """Each replica loads its part of the samples, and the parts are exchanged."""
    x, y = drawn_batches([8])[0]
    with cut_replicas(classifier(), [2], 2, loss_fn=nn.MSELoss(), timeout=TIMEOUT) as pipe:
        assert pipe.mesh is not None
        group, rank = pipe.mesh.get_group("dp"), pipe.mesh.get_local_rank("dp")
        sampler = DistributedSampler(TensorDataset(x, y), num_replicas=2, rank=rank, shuffle=False)
        (part, wanted), *_ = DataLoader(sampler.dataset, batch_size=4, sampler=sampler)

        def whole(part: Tensor) -> Tensor:
            parts = [torch.empty_like(part) for _ in range(2)]
            dist.all_gather(parts, part, group=group)
            return torch.cat(parts)

        return {
            "loss": pipe.step(whole(part), target=whole(wanted[:, :CLASSES])),
            "gradients": gradients(pipe),
        }


def test_each_replica_loads_its_own_part():
    model = classifier()
    x, y = drawn_batches([8])[0]
    loss = plain.whole_step(model, x, y[:, :CLASSES], nn.MSELoss())
    expected = plain.gradients(model)
    for one in ranks(4).run(loaded_in_parts):
        plain.assert_near(one["loss"], loss)
        plain.assert_close(one["gradients"], {name: expected[name] for name in one["gradients"]})


class Raises(nn.Module):
    """Raises in the backward of one process."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 3:
            x.register_hook(lambda gradient: 1 / 0)
        return x * 1


def raising() -> None:
    model = nn.Sequential(linear(), nn.Tanh(), linear(), Raises()).double()
    x, y = drawn_batches([8])[0]
    with cut_replicas(model, [2], 2, loss_fn=nn.MSELoss(), timeout=TIMEOUT) as pipe:
        pipe.step(x, target=y)


def test_a_rank_that_raises_ends_the_steps_of_all_replicas():
    found = [one.error for one in ranks(4).outcomes(raising)]
    assert isinstance(found[3], ZeroDivisionError)
    for error in found[:3]:
        assert str(error).startswith("rank 3 failed: ZeroDivisionError: division by zero")


def hooked() -> None:
    model = classifier()
    next(model.parameters()).register_hook(lambda gradient: gradient)
    x, y = labelled((12,))[0]
    with cut_replicas(model, [2], 2, loss_fn=nn.CrossEntropyLoss(), timeout=TIMEOUT) as pipe:
        pipe.step(x, target=y)


def squeezed() -> None:
    cut_replicas(classifier(), [], 4, loss_fn=nn.CrossEntropyLoss(), timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("size", "case", "message"),
    [
        (4, hooked, "has a hook, which would see the gradients of one copy"),
        (2, squeezed, "each of the 4 replicas needs processes of its own"),
    ],
)
def test_what_replicas_would_get_wrong_is_refused(size, case, message):
    for one in ranks(size).outcomes(case):
        assert isinstance(one, Failed)
        assert re.search(re.escape(message), str(one.error)), one.traceback
