"""Under torchrun a pipeline is made on all ranks or on none, and each rank has its own part of the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

import pipepart
from pipepart import Pipeline
from tests.distributed.cases import models
from tests.distributed.cases.layers import cut_recorded
from tests.distributed.training import TIMEOUT, adam, drawn_batches, rank, small
from tests.pipeline.conformance.scenarios import sparse_messages
from tests.support.chains import cut_by_hand, plan_by_hand
from tests.support.pieces import linear
from tests.support.ranks import Failed, ranks

X, Y = torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)
MSE = nn.MSELoss()
cut = partial(cut_by_hand, loss_fn=MSE, timeout=TIMEOUT)


def model(replaced: dict[int, nn.Module] | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4), nn.Linear(4, 3))
    for place, layer in (replaced or {}).items():
        made[place] = layer
    return made


def chain(count: int) -> nn.Sequential:
    return nn.Sequential(*(linear() for _ in range(count)))


def smooth(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, label_smoothing=0.1)


# The layers and options of rank 1, and what every rank raises.
OTHERS: dict[str, tuple[Callable[[], dict[int, nn.Module]], dict[str, Any], str]] = {
    "output": (
        lambda: {3: nn.Linear(4, 5)},
        {},
        r"layer '3' is Linear\(in_features=4, out_features=5, bias=True\) on rank 1, and layer '3' is Linear\(",
    ),
    "dropout": (
        lambda: {1: nn.Dropout(0.2)},
        {},
        r"layer '1' is Dropout\(p=0.2, inplace=False\) on rank 1, and layer '1' is Dropout\(p=0.1",
    ),
    "dtype": (
        lambda: {3: nn.Linear(4, 3).double()},
        {},
        r"'3.weight' is float64 \[3, 4\] on rank 1, and '3.weight' is float32 \[3, 4\] on rank 0",
    ),
    "trace": (dict, {"trace": True}, "trace is True on rank 1, and trace is False"),
    "loss": (dict, {"loss_fn": smooth}, "loss_fn is smooth on rank 1, and loss_fn is CrossEntropyLoss"),
    "optimizer": (dict, {"optimizer": torch.optim.SGD}, "optimizer is SGD on rank 1, and optimizer is Adam"),
}  # fmt: skip


def made() -> None:
    for layers, options, message in OTHERS.values():
        own, changed = (layers, options) if rank() == 1 else (dict, {})
        given = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": torch.optim.Adam, "timeout": 60.0, **changed}
        with pytest.raises(ValueError, match=message):
            cut_by_hand(model(own()), [1, 3], **given)


def test_a_pipeline_of_another_model_or_other_options_on_one_rank_is_refused_on_all():
    ranks(3).run(made)


def limited(cluster: pipepart.Cluster, layers: nn.Module, **options: Any) -> Pipeline:
    with cut_by_hand(chain(2), [1], micro_batches=2) as pipe:
        plan = pipe.plan.model_copy(update={"cluster": cluster})
    return Pipeline(layers, plan, MSE, **options)


def hooked() -> None:
    layers = models.classifier()
    next(layers.parameters()).register_hook(lambda gradient: gradient)
    x, y = models.labelled((12,))[0]
    with cut(layers, [2], loss_fn=nn.CrossEntropyLoss(), replicas=2, micro_batches=4) as pipe:
        pipe.step(x, target=y)


def sparse_between_ranks() -> None:
    x, y = drawn_batches([6])[0]
    with cut(sparse_messages().double(), [3]) as pipe:
        pipe.step(x, target=y)


def recorded(kind: type[nn.Module], verify: str = "first") -> None:
    args, plain = (torch.randn(4, 4), torch.ones(4)), models.Blocks if kind is models.Alternating else kind
    with cut_recorded(plain(), kind(), args, 2, nn.functional.mse_loss, verify=verify) as pipe:
        pipe.step(*args, target=args[0])


def distributed_tensor(kind: str) -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    layer = layers.get_submodule("1.0")
    tensor = distribute_tensor(torch.zeros(2, 2), DeviceMesh("cpu", [0, 1]))
    if kind == "parameter":
        layer.weight = nn.Parameter(tensor)
    else:
        del layer.weight
        layer.register_buffer("weight", tensor)
    cut(layers, [1])


def of_auto() -> None:
    options = {"micro_batches": 2 + rank(), "schedule": "1f1b"}
    Pipeline.auto(model(), X, target=Y, loss_fn=nn.CrossEntropyLoss(), **options)


def unlike_replicas() -> None:
    """Of eight devices in twos: stages 0 and 1 of the second replica are on two ranks."""
    plan = plan_by_hand("0123", [1, 2, 3], replicas=2, micro_batches=4)
    devices = tuple(f"virtual:{device}" for device in (4, 6, 5, 7))
    Pipeline(chain(4), plan.model_copy(update={"replica_devices": (devices,)}), MSE, timeout=TIMEOUT)


READS = r"bool.* reads values of tensors at .*models\.py:\d+"
# The number of ranks, what they do, and what every one raises.
REFUSED: dict[str, tuple[int, Callable[[], Any], str]] = {
    "options": (2, of_auto, "micro_batches is 3 on rank 1, and micro_batches is 2 on rank 0"),
    "plans": (
        3,
        lambda: small(micro_batches=3 + rank()),
        r"the plan is \w+ on rank 1, .* or use Pipeline.auto",
    ),
    "devices": (2, lambda: cut(chain(3), [1, 2]), "3 devices and torchrun started 2 processes"),
    "links": (
        2,
        lambda: limited(pipepart.Cluster.virtual(2, link="1GB/s"), chain(2)),
        "the links of the plan's cluster are emulated.*one process",
    ),
    "no optimizer on one": (
        2,
        lambda: cut(chain(2), [1], optimizer=(lambda parameters: None) if rank() else adam),
        "return a torch",
    ),
    "two copies": (
        2,
        lambda: cut(chain(2), [1], micro_batches=4, schedule="chimera"),
        "runs two copies of the model in one process",
    ),
    "hook": (4, hooked, "has a hook, which would see the gradients of one copy"),
    "replicas of one process": (
        2,
        lambda: cut(models.classifier(), [], replicas=4, micro_batches=4),
        "each of the 4 replicas needs processes of its own",
    ),
    "unlike replicas": (4, unlike_replicas, r"share its stages out alike.* replica 1: ranks \[2, 3\]"),
    "sparse message": (2, sparse_between_ranks, "only plain tensors can go to"),
    "always verified": (2, lambda: recorded(models.Blocks, "always"), 'verify="always" runs the whole model'),
    "asks between layers": (2, lambda: recorded(models.AsksBetween), READS),
    "asks what it wrote": (2, lambda: recorded(models.AsksWhatItWrote), READS),
    "reads within": (
        2,
        lambda: recorded(models.ReadsWithin),
        r"layer 'blocks\.1' reads values of tensors at .*models\.py:\d+",
    ),
    "alternates": (
        2,
        lambda: recorded(models.Alternating),
        r"two recordings of Alternating differ.*given \d in one forward",
    ),
    "parameter over ranks": (2, lambda: distributed_tensor("parameter"), r"'1\.0\.weight' is a DTensor"),
    "buffer over ranks": (2, lambda: distributed_tensor("buffer"), r"'1\.0\.weight' is a DTensor"),
}


def refused(name: str) -> None:
    REFUSED[name][1]()


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_rank_refuses_is_refused_on_all(name):
    size, _, message = REFUSED[name]
    for one in ranks(size).outcomes(refused, name):
        assert isinstance(one, Failed)
        assert isinstance(one.error, (ValueError, TypeError, RuntimeError))
        assert re.search(message, str(one.error)), one.traceback


def too_small() -> str:
    x, y = drawn_batches([400])[0]
    cluster = pipepart.Cluster.virtual(2, memory=3000, threads=1)
    with limited(cluster, chain(2).double(), strict=True, timeout=TIMEOUT) as pipe:
        with pytest.raises((torch.OutOfMemoryError, RuntimeError), match="is out of memory") as raised:
            pipe.step(x, target=y)
        return type(raised.value).__name__


def test_a_memory_limit_ends_the_step_on_all_ranks():
    assert "OutOfMemoryError" in ranks(2).run(too_small)


def planned_here() -> dict[str, Any]:
    """Plans on rank 0 with the measured links of all ranks."""
    x, y = drawn_batches([6])[0]
    how: dict[str, Any] = {"devices": None, "timeout": 60, "seconds": 0.01}
    with Pipeline.auto(chain(6).double(), x, target=y, loss_fn=MSE, **how) as pipe:
        return {"plan": pipe.plan.model_dump_json(), "loss": pipe.step(x, target=y)}


def test_auto_plans_once_for_all_ranks():
    found = ranks(2).run(planned_here)
    assert found[0]["plan"] == found[1]["plan"]
    assert found[0]["loss"].equal(found[1]["loss"])
    plan = pipepart.Plan.model_validate_json(found[0]["plan"])
    assert len(plan.workers) == len(plan.cluster) == 2
    torch.manual_seed(0)
    x, y = drawn_batches([6])[0]
    with Pipeline(chain(6).double(), plan, MSE) as pipe:
        assert pipe.step(x, target=y).equal(found[0]["loss"])
