"""Planning problems with made-up costs, and what hypothesis draws them from."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from pipepart import Cluster, Device, Link, Profile
from pipepart.capture import LayerInfo, SharedTensor
from pipepart.cluster import PairLink
from pipepart.planning import StagePlan
from pipepart.profiling import Costs, LayerCost, LiveValue, SavedTensor, Timing
from tests.support.chains import Recompute


@dataclass(frozen=True)
class Layer:
    """Costs of one layer of a problem; seconds are for one micro-batch."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 0.0
    parameters: int = 0
    trained: bool = True
    output: int = 0
    peak: int = 0
    saved: int = 0
    waiting: int = 0
    keeps_input: bool = False
    shares_with: tuple[int, ...] = ()
    split: float | None = None


def profile_of(
    layers: Sequence[Layer],
    micro_batches: Sequence[int] = (4,),
    loss_seconds: float = 0.0,
    input_bytes: int = 0,
    optimizer: str = "adam",
    names: Sequence[str] = (),
    batch: int | None = None,
) -> Profile:
    """A profile of layers whose costs are those of a mini-batch; each micro-batch has an equal part of them.

    Layers are called layer0, layer1, ... unless ``names`` says else; ``batch`` is the number of samples.
    """
    infos = tuple(
        LayerInfo(
            name=names[index] if names else f"layer{index}",
            kind="Layer",
            description="Layer()",
            parameter_bytes=layer.parameters,
            gradient_bytes=layer.parameters if layer.trained else 0,
            shared=tuple(
                SharedTensor(layer=f"layer{other}", name="weight", bytes=0) for other in layer.shares_with
            ),
        )
        for index, layer in enumerate(layers)
    )
    return Profile(
        model="Sequential",
        batch=batch or max(micro_batches),
        inputs=(),
        outputs=(),
        layers=infos,
        costs=tuple(
            Costs(
                micro_batches=count,
                samples=batch // count if batch else 1,
                layers=tuple(
                    LayerCost(
                        forward=Timing(seconds=layer.forward / count),
                        backward_input=Timing(seconds=layer.backward_input / count),
                        backward_weight=Timing(seconds=layer.backward_weight / count),
                        split_seconds=None if layer.split is None else layer.split / count,
                        output_bytes=layer.output,
                        workspace_bytes=layer.peak,
                        deferred_bytes=layer.waiting,
                    )
                    for layer in layers
                ),
                loss=LayerCost(forward=Timing(seconds=loss_seconds / count)),
                saved=pieces(layers, input_bytes),
            )
            for count in micro_batches
        ),
        optimizer=optimizer,
        device="cpu",
        threads=1,
        torch_version="none",
    )


def cluster_of(*speeds: float, latency: float = 0.0, bandwidth: float | None = None) -> Cluster:
    """Devices of these speeds, called device:0, device:1, ..."""
    devices = (Device(name=f"device:{at}", kind="made up", speed=speed) for at, speed in enumerate(speeds))
    return Cluster(devices=tuple(devices), link=Link(latency=latency, bandwidth=bandwidth))


def stages_on(
    names: Sequence[str], edges: Sequence[int], homes: Sequence[str], mode: Recompute = "never"
) -> tuple[StagePlan, ...]:
    """The stages of a cut at these edges, from 0 to the number of layers, on these devices."""
    return tuple(
        StagePlan(layers=tuple(names[first:end]), device=home, recompute=mode)
        for (first, end), home in zip(itertools.pairwise(edges), homes, strict=True)
    )


def with_unequal_sizes(profile: Profile) -> Profile:
    """The profile if the first micro-batch has twice the samples of each of the others."""
    entries = []
    for costs in profile.costs:
        mean = 1 + 1 / costs.micro_batches
        scale = (2 / mean, *[1 / mean] * (costs.micro_batches - 1))
        entries.append(costs.model_copy(update={"scale": scale}))
    return profile.model_copy(update={"costs": tuple(entries)})


Values = Sequence[tuple[int, tuple[int, ...]]]  # bytes, and the layers that make or use it


def with_values(profile: Profile, values: Values) -> Profile:
    """The profile of a recorded model, in which these values cross all borders from their first to their last layer."""
    entries = []
    for costs in profile.costs:
        sizes, saved = [layer.output_bytes for layer in costs.layers], list(costs.saved)
        for size, used in values:
            crossed = range(used[0], used[-1])
            for index in crossed:
                sizes[index] += size
            into = tuple(index + 1 for index in crossed)
            passed = tuple(index for index in into if index not in used)
            saved.append(SavedTensor(bytes=size, layers=used[1:2], input_of=into, passed_by=passed))
        layers = tuple(
            layer.model_copy(update={"output_bytes": size})
            for layer, size in zip(costs.layers, sizes, strict=True)
        )
        live = tuple(LiveValue(bytes=size, layers=used) for size, used in values)
        entries.append(costs.model_copy(update={"layers": layers, "saved": tuple(saved), "values": live}))
    return profile.model_copy(update={"costs": tuple(entries)})


def pieces(layers: Sequence[Layer], input_bytes: int) -> tuple[SavedTensor, ...]:
    """What is kept: each border's tensor, by the layer behind it if that keeps its input, and what layers add."""
    borders = [input_bytes, *(layer.output for layer in layers[:-1])]
    inputs = [
        SavedTensor(bytes=size, layers=(index,) if layer.keeps_input else (), input_of=(index,))
        for index, (layer, size) in enumerate(zip(layers, borders, strict=True))
    ]
    own = [SavedTensor(bytes=layer.saved, layers=(index,)) for index, layer in enumerate(layers)]
    return (*inputs, *own)


seconds = st.integers(0, 64).map(lambda count: count / 8)
sizes = st.integers(0, 50)


@st.composite
def chains(draw: st.DrawFn, least: int = 1, most: int = 7, sharing: bool = False) -> list[Layer]:
    """A few layers of any costs, some of which may share a parameter with one before."""
    count = draw(st.integers(least, most))
    layers = [
        Layer(
            forward=draw(seconds),
            backward_input=draw(seconds),
            backward_weight=draw(seconds),
            parameters=draw(sizes),
            trained=draw(st.booleans()),
            output=draw(sizes),
            peak=draw(sizes),
            saved=draw(sizes),
            waiting=draw(sizes),
            keeps_input=draw(st.booleans()),
            shares_with=(draw(st.integers(0, index - 1)),)
            if sharing and index and draw(st.integers(0, 3)) == 0
            else (),
        )
        for index in range(count)
    ]
    return layers


@st.composite
def clusters(draw: st.DrawFn, most: int = 4, limited: bool = True, pairs: bool = True) -> Cluster:
    """A few devices of a few kinds, with memory limits or not; some pairs may have links of their own."""
    count = draw(st.integers(1, most))
    memory = st.one_of(st.none(), st.integers(1, 800)) if limited else st.none()
    speed = st.sampled_from([0.25, 0.5, 1.0, 2.0])
    kinds = draw(st.lists(st.tuples(speed, memory), min_size=1, max_size=3))
    devices = tuple(
        Device(name=f"device:{index}", kind="made up", speed=speed, memory_bytes=memory)
        for index, (speed, memory) in enumerate(draw(st.sampled_from(kinds)) for _ in range(count))
    )
    joined = list(itertools.combinations([device.name for device in devices], 2)) if pairs else []
    own = draw(st.lists(st.sampled_from(joined), unique=True, max_size=3)) if joined else []
    bandwidths, latencies = st.sampled_from([None, 4.0, 64.0]), st.sampled_from([0.0, 0.125, 2.0])
    return Cluster(
        devices=devices,
        link=Link(bandwidth=draw(bandwidths), latency=draw(latencies)),
        links=tuple(
            PairLink(between=pair, bandwidth=draw(bandwidths), latency=draw(latencies)) for pair in own
        ),
    )
