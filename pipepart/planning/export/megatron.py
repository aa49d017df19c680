"""Export for Megatron-LM: command-line options with the layout of the pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from ..plans.plan import Plan
from .engine import Engine, head_of, modules_of, order_of


def _faults(plan: Plan) -> Iterator[str]:
    order = order_of(plan)
    if plan.schedule == "interleaved-1f1b" and order.micro_batches % order.devices:
        yield (
            f"it interleaves groups of {order.devices} micro-batches, and {order.micro_batches} are no multiple of "
            f"that: plan with micro_batches={-(-order.micro_batches // order.devices) * order.devices * plan.replicas}"
        )
    blocks, names = _blocks(plan), list(modules_of(plan))
    if not blocks:
        kinds = ", ".join(dict.fromkeys(info.kind for info in plan.profile.layers)) if plan.profile else ""
        yield (
            "its stages are made of whole transformer layers between an embedding and a head, and the plan's layers "
            f"({kinds or 'unknown, as it was written by hand'}) have no one run of the most frequent class, with "
            "layers before and after it: profile the whole model, with layers=[...] that names its transformer layers"
        )
        return
    last = len(plan.stages) - 1
    for end, layers, home in (("embedding", names[: blocks[0]], 0), ("head", names[blocks[-1] + 1 :], last)):
        if wrong := [name for name in layers if name not in plan.stages[home].layers]:
            yield (
                f"layer {wrong[0]!r} of the {end} is not in stage {home}, where the layout has the whole {end}: plan "
                f"with pin={dict.fromkeys(layers, home)!r}"
            )


def _files(plan: Plan) -> Mapping[str, str]:
    options = [
        f"--num-layers {len(_blocks(plan))}",
        f"--pipeline-model-parallel-size {order_of(plan).devices}",
        f'--pipeline-model-parallel-layout "{_layout(plan)}"',
    ]
    layers = plan.profile.layers if plan.profile else ()
    if not any(_is_embedding_tie(plan, owner, info.name) for info in layers for owner in info.shares_with):
        options.append("--untie-embeddings-and-output-weights")
    if plan.stages[0].recompute != "never":
        options.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    head = head_of(plan, "Pipeline options of a plan of pipepart, for Megatron-LM: source this file in bash.")
    lines = "".join(f"    {option}\n" for option in options)
    return {"megatron.sh": f"{head}PIPELINE_ARGS=(\n{lines})\n"}


def _blocks(plan: Plan) -> range:
    """Return the positions of the transformer layers: those of the most frequent class.

    Empty if they are not consecutive, or begin or end the model, or if two classes are equally frequent.
    """
    kinds = [info.kind for info in plan.profile.layers] if plan.profile else [""]
    (kind, count), *rarer = Counter(kinds).most_common()
    blocks = range(kinds.index(kind), kinds.index(kind) + count)
    is_run = all(kinds[at] == kind for at in blocks if at < len(kinds))
    is_most_frequent = not rarer or rarer[0][1] < count
    return (
        blocks if is_run and is_most_frequent and blocks[0] > 0 and blocks[-1] + 1 < len(kinds) else range(0)
    )


def _is_embedding_tie(plan: Plan, owner: str, name: str) -> bool:
    """Return True if ``owner`` is in the embedding and ``name`` in the head: Megatron sums their gradients."""
    names, blocks = list(modules_of(plan)), _blocks(plan)
    return bool(blocks) and names.index(owner) < blocks[0] and blocks[-1] < names.index(name)


def _layout(plan: Plan) -> str:
    """Return the layout option: the stages in pipeline order, as in ``Et*3|t*4|t*4|t*3L``."""
    texts, first, blocks = [], 0, _blocks(plan)
    for stage in plan.stages:
        end = first + len(stage.layers)
        count = sum(at in blocks for at in range(first, end))
        texts.append(f"t*{count}" if count > 1 else "t" * count)
        first = end
    return "E" + "|".join(texts) + "L"


ENGINE = Engine(_files, _faults, schedules=("1f1b", "interleaved-1f1b"), adds_up_ties=_is_embedding_tie)
