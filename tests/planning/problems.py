"""Planning problems with made-up costs, and what every plan of one costs, found by trying all of them."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

import schedules
from pipepart import Cluster, Device, Link, Profile
from pipepart.capture import LayerInfo, SharedTensor
from pipepart.profiling import Costs, LayerCost, SavedTensor, Timing
from tests.planning.held import held_by, moments, peak
from tests.planning.layer import Layer as Layer


def profile_of(
    layers: Sequence[Layer],
    micro_batches: Sequence[int] = (4,),
    loss_seconds: float = 0.0,
    input_bytes: int = 0,
    optimizer: str = "adam",
) -> Profile:
    """A profile of layers whose costs are those of a mini-batch; each micro-batch has an equal part of them."""
    infos = tuple(
        LayerInfo(
            name=f"layer{index}",
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
        batch=max(micro_batches),
        inputs=(),
        outputs=(),
        layers=infos,
        costs=tuple(
            Costs(
                micro_batches=count,
                samples=1,
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


def pieces(layers: Sequence[Layer], input_bytes: int) -> tuple[SavedTensor, ...]:
    """What is kept: each border's tensor, by the layer behind it if that keeps its input, and what layers add."""
    borders = [input_bytes, *(layer.output for layer in layers[:-1])]
    inputs = [
        SavedTensor(bytes=size, layers=(index,) if layer.keeps_input else (), input_of=(index,))
        for index, (layer, size) in enumerate(zip(layers, borders, strict=True))
    ]
    own = [SavedTensor(bytes=layer.saved, layers=(index,)) for index, layer in enumerate(layers)]
    return (*inputs, *own)


@dataclass(frozen=True)
class Candidate:
    """One way to lay the layers: where stages begin and end, on which devices, with its load and its memory."""

    edges: tuple[int, ...]
    devices: tuple[int, ...]
    bottleneck: float
    shortage: float


def every_cut(
    layers: Sequence[Layer],
    cluster: Cluster,
    stages: int,
    *,
    schedule: str,
    micro_batches: int,
    loss_seconds: float = 0.0,
    input_bytes: int = 0,
) -> Iterator[Candidate]:
    """Every allowed cut into ``stages`` stages, on every choice of devices in every order."""
    built = schedules.build(schedule, devices=stages, micro_batches=micro_batches)
    of_rows = [moments(built, row) for row in range(stages)]
    for inner in itertools.combinations(range(1, len(layers)), stages - 1):
        if any(_parts_sharers(layers, border) for border in inner):
            continue
        edges = (0, *inner, len(layers))
        for devices in itertools.permutations(range(len(cluster.devices)), stages):
            loads, lacks = [], []
            for index, (start, end, site) in enumerate(zip(edges[:-1], edges[1:], devices, strict=True)):
                device = cluster.devices[site]
                compute = sum(_seconds(layer) for layer in layers[start:end])
                compute += loss_seconds if end == len(layers) else 0
                transfer = _crossing(layers, start, cluster.link) + _crossing(layers, end, cluster.link)
                loads.append(compute / micro_batches / device.speed + transfer)
                need = peak(of_rows[index], {index: held_by(layers, start, end, input_bytes)}, {})
                lacks.append(need - (device.memory_bytes or math.inf))
            yield Candidate(edges, devices, max(loads), max(lacks))


def _seconds(layer: Layer) -> float:
    return layer.forward + layer.backward_input + layer.backward_weight


def _crossing(layers: Sequence[Layer], border: int, link: Link) -> float:
    """Seconds to bring one micro-batch over a border, and its gradient back where one is needed."""
    if border in (0, len(layers)):
        return 0.0
    once = link.latency + (layers[border - 1].output / link.bandwidth if link.bandwidth else 0.0)
    trained_before = any(layer.trained and layer.parameters for layer in layers[:border])
    return once * (2 if trained_before else 1)


def _parts_sharers(layers: Sequence[Layer], border: int) -> bool:
    return any(other < border <= index for index, layer in enumerate(layers) for other in layer.shares_with)


seconds = st.integers(0, 64).map(lambda count: count / 8)
sizes = st.integers(0, 50)


@st.composite
def chains(draw: st.DrawFn, most: int = 7, sharing: bool = False) -> list[Layer]:
    """A few layers of any costs, some of which may share a parameter with one before."""
    count = draw(st.integers(1, most))
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
def clusters(draw: st.DrawFn, limited: bool = True) -> Cluster:
    """Up to four devices, alike or not, over a link that may cost something."""
    count = draw(st.integers(1, 4))
    memory = st.one_of(st.none(), st.integers(1, 900)) if limited else st.none()
    speed = st.sampled_from([0.25, 0.5, 1.0, 2.0])
    if draw(st.booleans()):
        same = (draw(memory), draw(speed))
        kinds = [same] * count
    else:
        kinds = [(draw(memory), draw(speed)) for _ in range(count)]
    bandwidth = draw(st.sampled_from([None, 8.0, 64.0]))
    return Cluster(
        devices=tuple(
            Device(name=f"device:{index}", kind="made up", memory_bytes=size, speed=factor)
            for index, (size, factor) in enumerate(kinds)
        ),
        link=Link(bandwidth=bandwidth, latency=draw(st.sampled_from([0.0, 0.125, 2.0]))),
    )
