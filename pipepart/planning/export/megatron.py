"""Export for Megatron-LM: command-line options with the layout of the pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..plans.plan_record import PlanRecord
from .conditions import micro_batches_of, names_of, order_of, recomputes
from .engine import Engine, commented


class _Blocks(NamedTuple):
    """The transformer layers of a plan: their class, and the range first <= index < end."""

    kind: str
    first: int
    end: int


def _faults(plan: PlanRecord) -> Iterator[str]:
    order = order_of(plan)
    if plan.schedule == "interleaved-1f1b" and order.micro_batches % order.devices:
        yield (
            f"it interleaves groups of {order.devices} micro-batches, and {order.micro_batches} are no multiple of "
            f"that: plan with micro_batches={-(-order.micro_batches // order.devices) * order.devices * plan.replicas}"
        )
    blocks = _blocks(plan)
    if blocks is None:
        kinds = ", ".join(dict.fromkeys(info.kind for info in plan.profile.layers)) if plan.profile else ""
        yield (
            "its stages are made of whole transformer layers between an embedding and a head, and the plan's layers "
            f"({kinds or 'unknown, as it was written by hand'}) have no one run of the most frequent class, with "
            "layers before and after it: profile the whole model, with layers=[...] that names its transformer layers"
        )
        return
    yield from _end_faults(plan, blocks)


def _end_faults(plan: PlanRecord, blocks: _Blocks) -> Iterator[str]:
    """Yield a fault if the embedding is not in the first stage, or the head not in the last."""
    names, last = names_of(plan), len(plan.stages) - 1
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.layers}
    for end, layers, home in (("embedding", names[: blocks.first], 0), ("head", names[blocks.end :], last)):
        if wrong := [name for name in layers if stage_of[name] != home]:
            yield (
                f"layer {wrong[0]!r} of the {end} is in stage {stage_of[wrong[0]]}, and the whole {end} is one symbol "
                f"of the layout, in stage {home}: plan with pin={dict.fromkeys(layers, home)!r}"
            )


def _notes(plan: PlanRecord) -> Iterator[str]:
    blocks = _blocks(plan)
    assert blocks is not None
    names = names_of(plan)
    yield (
        f"Layout: E is {', '.join(names[: blocks.first])}; t is each of the {blocks.end - blocks.first} {blocks.kind} "
        f"({names[blocks.first]} to {names[blocks.end - 1]}); L is {', '.join(names[blocks.end :])} and the loss"
    )
    yield (
        f"A step has {micro_batches_of(plan)} micro-batches: --global-batch-size is {micro_batches_of(plan)} times "
        "--micro-batch-size times the data-parallel size"
    )
    yield "Megatron builds its own model: give it the layers and sizes of the model that was profiled"


def _files(plan: PlanRecord, notes: Sequence[str]) -> Mapping[str, str]:
    blocks = _blocks(plan)
    assert blocks is not None
    assert plan.profile is not None
    options = [
        f"--num-layers {blocks.end - blocks.first}",
        f"--pipeline-model-parallel-size {order_of(plan).devices}",
        f'--pipeline-model-parallel-layout "{_layout(plan, blocks)}"',
    ]
    if not any(
        _is_embedding_tie(plan, owner, info.name)
        for info in plan.profile.layers
        for owner in info.shares_with
    ):
        options.append("--untie-embeddings-and-output-weights")
    if recomputes(plan):
        options.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    lines = "".join(f"    {option}\n" for option in options)
    head = commented(
        "Pipeline options of a plan of pipepart, for Megatron-LM: source this file in bash.", notes
    )
    return {"megatron.sh": f"{head}PIPELINE_ARGS=(\n{lines})\n"}


def _blocks(plan: PlanRecord) -> _Blocks | None:
    """Return the layers of the most frequent class.

    None if they are not consecutive, or begin or end the model, or if two classes are equally frequent.
    """
    kinds = [info.kind for info in plan.profile.layers] if plan.profile else [""]
    (kind, count), *rarer = Counter(kinds).most_common()
    first = kinds.index(kind)
    end = first + count
    is_run = set(kinds[first:end]) == {kind} and all(rare_count < count for _, rare_count in rarer)
    return _Blocks(kind, first, end) if is_run and first > 0 and end < len(kinds) else None


def _is_embedding_tie(plan: PlanRecord, owner: str, name: str) -> bool:
    """Return True if ``owner`` is in the embedding and ``name`` in the head: Megatron sums their gradients."""
    names, blocks = names_of(plan), _blocks(plan)
    return blocks is not None and names.index(owner) < blocks.first and blocks.end <= names.index(name)


def _layout(plan: PlanRecord, blocks: _Blocks) -> str:
    """Return the layout option: the stages in pipeline order, as in ``Et*3|t*4|t*4|t*3L``."""
    stages, first = [], 0
    for stage in plan.stages:
        end = first + len(stage.layers)
        count = min(end, blocks.end) - max(first, blocks.first)
        stages.append("" if count <= 0 else "t" if count == 1 else f"t*{count}")
        first = end
    return "E" + "|".join(stages) + "L"


ENGINE = Engine(
    _files,
    _notes,
    _faults,
    schedules=("1f1b", "interleaved-1f1b"),
    far_values="The plan uses values past stages, which each stage computes here",
    adds_up_ties=_is_embedding_tie,
)
