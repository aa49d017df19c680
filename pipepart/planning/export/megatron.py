"""Writes a plan for Megatron-LM: the options of its command line, with the layout of its pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from ..plans.plan_record import PlanRecord
from .conditions import (
    far_values,
    micro_batches_of,
    mixed_recompute,
    only_schedules,
    order_of,
    recomputes,
    split_ties,
    whole_backwards,
)
from .engine import Engine, commented


class _Blocks(NamedTuple):
    """The transformer layers among the layers of a plan: first <= index < end."""

    kind: str
    first: int
    end: int


def _faults(plan: PlanRecord) -> Iterator[str]:
    yield from only_schedules(plan, "1f1b", "interleaved-1f1b")
    yield from mixed_recompute(plan)
    order = order_of(plan)
    if plan.schedule == "interleaved-1f1b" and order.micro_batches % order.devices:
        yield (
            f"it interleaves groups of {order.devices} micro-batches, and {order.micro_batches} are no multiple of "
            f"that: plan with micro_batches={-(-order.micro_batches // order.devices) * order.devices * plan.replicas}"
        )
    if plan.profile is None:
        yield (
            "the plan was written by hand, and which of its layers are transformer layers stands in a profile only: "
            "make it with pipepart.plan"
        )
        return
    blocks = _blocks(plan)
    if blocks is None:
        kinds = ", ".join(dict.fromkeys(info.kind for info in plan.profile.layers))
        yield (
            f"its stages are made of whole transformer layers between an embedding and a head, and the plan's layers "
            f"({kinds}) have no one run of a class that is the longest, with layers before and after it: profile the "
            "whole model, with layers=[...] that names its transformer layers"
        )
        return
    yield from split_ties(plan, _embedding_ties(plan, blocks))
    yield from _end_faults(plan, blocks)


def _end_faults(plan: PlanRecord, blocks: _Blocks) -> Iterator[str]:
    """Yield a fault for layers of the embedding or the head in another stage than the first or the last."""
    ends = (
        ("embedding", range(blocks.first), 0),
        ("head", range(blocks.end, len(_names(plan))), len(plan.stages) - 1),
    )
    stage_of = [number for number, stage in enumerate(plan.stages) for _ in stage.layers]
    for end, layers, home in ends:
        wrong = [index for index in layers if stage_of[index] != home]
        if wrong:
            pins = {_names(plan)[index]: home for index in layers}
            yield (
                f"layer {_names(plan)[wrong[0]]!r} of the {end} is in stage {stage_of[wrong[0]]}, and the whole {end} "
                f"is one symbol of the layout, in stage {home}: plan with pin={pins!r}"
            )


def _notes(plan: PlanRecord) -> Iterator[str]:
    blocks = _blocks(plan)
    assert blocks is not None
    names = _names(plan)
    yield (
        f"Layout: E is {', '.join(names[: blocks.first])}; t is each of the {blocks.end - blocks.first} {blocks.kind} "
        f"({names[blocks.first]} to {names[blocks.end - 1]}); L is {', '.join(names[blocks.end :])} and the loss"
    )
    yield (
        f"A step has {micro_batches_of(plan)} micro-batches: --global-batch-size is {micro_batches_of(plan)} times "
        "--micro-batch-size times the data-parallel size"
    )
    yield "Megatron builds its own model: give it the layers and sizes of the model that was profiled"
    if far := far_values(plan, arguments=True):
        yield f"The plan uses values past stages, which each stage computes here: {far}"
    yield from whole_backwards(plan)


def _files(plan: PlanRecord, notes: Sequence[str]) -> Mapping[str, str]:
    blocks = _blocks(plan)
    assert blocks is not None
    assert plan.profile is not None
    options = [
        f"--num-layers {blocks.end - blocks.first}",
        f"--pipeline-model-parallel-size {order_of(plan).devices}",
        f'--pipeline-model-parallel-layout "{_layout(plan, blocks)}"',
    ]
    tied = _embedding_ties(plan, blocks)
    if not any(frozenset({o, i.name}) in tied for i in plan.profile.layers for o in i.shares_with):
        options.append("--untie-embeddings-and-output-weights")
    if recomputes(plan):
        options.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    lines = "".join(f"    {option}\n" for option in options)
    head = commented(
        "Pipeline options of a plan of pipepart, for Megatron-LM: source this file in bash.", notes
    )
    return {"megatron.sh": f"{head}PIPELINE_ARGS=(\n{lines})\n"}


def _blocks(plan: PlanRecord) -> _Blocks | None:
    """Return the longest run of layers of one class; None if two are as long, or it begins or ends the model."""
    assert plan.profile is not None
    layers = plan.profile.layers
    runs, first = [], 0
    for kind, run in groupby(info.kind for info in layers):
        end = first + len(list(run))
        runs.append(_Blocks(kind, first, end))
        first = end
    longest = max(run.end - run.first for run in runs)
    found = [run for run in runs if run.end - run.first == longest]
    if len(found) > 1 or not 0 < found[0].first <= found[0].end < len(layers):
        return None
    return found[0] if all(info.kind != found[0].kind for info in layers[found[0].end :]) else None


def _embedding_ties(plan: PlanRecord, blocks: _Blocks) -> frozenset[frozenset[str]]:
    """Return the pairs of a layer of the embedding and one of the head: Megatron adds up their gradients."""
    names = _names(plan)
    return frozenset(
        frozenset({one, other}) for one in names[: blocks.first] for other in names[blocks.end :]
    )


def _layout(plan: PlanRecord, blocks: _Blocks) -> str:
    """Return the stages in pipeline order, as in ``Et*3|t*4|t*4|t*3L``."""
    stages, first = [], 0
    for stage in plan.stages:
        end = first + len(stage.layers)
        count = min(end, blocks.end) - max(first, blocks.first)
        stages.append("" if count <= 0 else "t" if count == 1 else f"t*{count}")
        first = end
    return "E" + "|".join(stages) + "L"


def _names(plan: PlanRecord) -> list[str]:
    return [name for stage in plan.stages for name in stage.layers]


ENGINE = Engine(_faults, _notes, _files)
