"""A profile and plans written by hand, so that what is printed can be told beforehand."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import RenderableType

from pipepart import Cluster, Plan, Profile, plan
from pipepart.capture import LayerInfo, TensorSpec
from pipepart.profiling import Costs, LayerCost, SavedTensor, Timing
from pipepart.reporting import show

MS = 1e-3


def _timing(milliseconds: float) -> Timing:
    return Timing(seconds=milliseconds * MS, spread=0.1 * milliseconds * MS)


def _cost(forward: float, backward_input: float, backward_weight: float, kib: int) -> LayerCost:
    return LayerCost(
        forward=_timing(forward),
        backward_input=_timing(backward_input),
        backward_weight=_timing(backward_weight),
        saved_bytes=kib * 1024,
        output_bytes=2048,
        workspace_bytes=3 * 1024,
    )


def _layer(name: str, kind: str, parameter_bytes: int) -> LayerInfo:
    return LayerInfo(
        name=name,
        kind=kind,
        description=f"{kind}()",
        parameter_bytes=parameter_bytes,
        gradient_bytes=parameter_bytes,
        outputs=(TensorSpec(shape=(16, 8, 4), dtype="float32"),),
    )


@pytest.fixture
def profile() -> Profile:
    """Three layers and a loss, at two sizes; 12.5 ms a micro-batch of 16 samples."""
    layers = (_cost(1.25, 0, 2, 4), _cost(2, 1, 1, 8), _cost(0.002, 4, 0, 0))
    spec = TensorSpec(shape=(16, 8), dtype="float32")
    return Profile(
        model="Sequential",
        batch=32,
        inputs=(spec,),
        outputs=(spec,),
        layers=(
            _layer("embedding", "Linear", 1536),
            _layer("body.a_layer_with_a_very_long_name.attention", "Attention", 2 * 1024 * 1024),
            _layer("head", "ReLU", 0),
        ),
        costs=tuple(
            Costs(
                micro_batches=count,
                samples=32 // count,
                layers=layers,
                loss=_cost(0.5, 0.75, 0, 0),
                saved=(SavedTensor(bytes=8 * 1024, layers=(0, 1)),),
                repeats=7,
            )
            for count in (2, 4)
        ),
        optimizer="adam",
        device="cpu",
        threads=1,
        torch_version="2.0",
    )


@pytest.fixture
def two_stages(profile: Profile) -> Plan:
    return plan(profile, Cluster.virtual(2, memory="64MiB"), schedule="1f1b", micro_batches=4)


@pytest.fixture
def doubled(profile: Profile) -> Profile:
    """Four layers with buffers, two of them alike to the other two."""
    names = [f"{layer.name}{copy}" for copy in (1, 2) for layer in profile.layers[:2]]
    layers = tuple(
        profile.layers[index % 2].model_copy(update={"name": name, "buffer_bytes": 2**20})
        for index, name in enumerate(names)
    )
    costs = tuple(
        costs.model_copy(update={"layers": costs.layers[:2] * 2, "saved": ()}) for costs in profile.costs
    )
    return profile.model_copy(update={"layers": layers, "costs": costs})


@pytest.fixture
def four_chunks(doubled: Profile) -> Plan:
    """Four stages on two devices that differ, each layer twice."""
    cluster = Cluster.parse(["64MiB", "64MiB@0.5"])
    return plan(doubled, cluster, schedule="looped-bfs", micro_batches=4)


@pytest.fixture
def again(profile: Profile) -> Plan:
    """Two stages, the forward of each run again."""
    cluster = Cluster.virtual(2, memory="64MiB")
    return plan(profile, cluster, schedule="1f1b", micro_batches=4, recompute="always")


@pytest.fixture
def printed() -> Callable[[RenderableType], str]:
    """Prints a report into a file and returns what stands there."""

    def printed(report: RenderableType) -> str:
        file = io.StringIO()
        show(report, file=file)
        return file.getvalue()

    return printed
