"""Profiles with hand-written costs, so that tests know the expected plans."""

from __future__ import annotations

from collections.abc import Sequence

from pipepart.capture import LayerInfo, TensorSpec
from pipepart.profiling import Costs, LayerCost, LiveValue, Profile, SavedTensor, Timing


def made_profile(
    names: Sequence[str],
    seconds: Sequence[float] | float = 3e-3,
    *,
    batch: int = 8,
    micro_batches: Sequence[int] = (8,),
    parameter_bytes: int = 0,
    saved_bytes: int = 0,
    output_bytes: Sequence[int] | int = 0,
    values: tuple[LiveValue, ...] = (),
) -> Profile:
    """A profile of layers of these names; their kind is the last part of the name, or Linear for a number.

    Args:
        names: of the layers.
        seconds: of each layer or of all: a third for the forward, and for each part of the backward.
        batch, micro_batches: samples of the mini-batch, and in how many parts it was measured.
        parameter_bytes, saved_bytes: of each layer; every layer saves a tensor of its own.
        output_bytes: of each layer or of all.
        values: that leave the layers.
    """
    spec = TensorSpec(shape=(batch, 8), dtype="float32")
    times = [seconds] * len(names) if isinstance(seconds, float | int) else seconds
    sizes = [output_bytes] * len(names) if isinstance(output_bytes, int) else output_bytes
    costs = []
    for each, size in zip(times, sizes, strict=True):
        third = Timing(seconds=each / 3)
        costs.append(
            LayerCost(
                forward=third,
                backward_input=third,
                backward_weight=third,
                saved_bytes=saved_bytes,
                output_bytes=size,
            )
        )
    saved = tuple(SavedTensor(bytes=saved_bytes, layers=(at,)) for at in range(len(names)) if saved_bytes)
    return Profile(
        model="Model",
        batch=batch,
        inputs=(spec,),
        outputs=(spec,),
        layers=tuple(
            LayerInfo(
                name=name,
                kind=last if (last := name.rpartition(".")[2]).isalpha() else "Linear",
                description=name,
                parameter_bytes=parameter_bytes,
                gradient_bytes=parameter_bytes,
                outputs=(spec,),
            )
            for name in names
        ),
        costs=tuple(
            Costs(
                micro_batches=count, samples=batch // count, layers=tuple(costs), saved=saved, values=values
            )
            for count in micro_batches
        ),
        optimizer="sgd",
        device="cpu",
        threads=1,
        torch_version="2.13",
    )
