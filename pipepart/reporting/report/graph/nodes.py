"""The layer graph of a plan, as nodes of folded or single layers, and the edges between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ....planning import Plan
from ....profiling import Profile
from ...folding import fold


class Node(NamedTuple):
    """Consecutive layers of one stage that are drawn as one box.

    label: their names, folded.
    stage: the number of their stage.
    first, layers: the index of the first layer, and how many there are.
    kind: of the layers, if all have one.
    seconds: forward and backward of one micro-batch, as profiled.
    parameter_bytes: of all of them.
    """

    label: str
    stage: int
    first: int
    layers: int
    kind: str
    seconds: float
    parameter_bytes: int


class Edge(NamedTuple):
    """The tensors of one micro-batch that go from one node to another: indices of nodes, and bytes."""

    source: int
    target: int
    bytes: int


def nodes_of(plan: Plan, profile: Profile, folded: bool) -> list[Node]:
    """Return the nodes in execution order. With ``folded``, alike blocks of a stage are one node."""
    costs = profile.at(plan.micro_batches).layers
    found, place = [], 0
    for number, stage in enumerate(plan.stages):
        infos = profile.layers[place : place + len(stage.layers)]
        names, kinds = [info.name for info in infos], [info.kind for info in infos]
        groups = (
            [(each.label, each.first, each.layers) for each in fold(names, kinds)]
            if folded
            else [(name, at, 1) for at, name in enumerate(names)]
        )
        for label, first, count in groups:
            own = range(place + first, place + first + count)
            same = {profile.layers[at].kind for at in own}
            found.append(
                Node(
                    label,
                    number,
                    own.start,
                    count,
                    same.pop() if len(same) == 1 else "",
                    sum(costs[at].seconds for at in own),
                    sum(profile.layers[at].parameter_bytes for at in own),
                )
            )
        place += len(infos)
    return found


def edges_of(plan: Plan, profile: Profile, nodes: Sequence[Node]) -> list[Edge]:
    """Return the edges between nodes; several tensors between the same two nodes are one edge."""
    node_of = [at for at, node in enumerate(nodes) for _ in range(node.layers)]
    sizes: dict[tuple[int, int], int] = defaultdict(int)
    for maker, users, size in _values(plan, profile):
        # A value that several layers of a node use is sent there once.
        for target in sorted({node_of[user] for user in users} - {node_of[maker]}):
            sizes[node_of[maker], target] += size
    return [Edge(source, target, size) for (source, target), size in sizes.items()]


def _values(plan: Plan, profile: Profile) -> Iterator[tuple[int, list[int], int]]:
    """Yield what goes between layers: the layer that makes it, those that use it, and its bytes."""
    costs = profile.at(plan.micro_batches)
    if costs.values:
        for value in costs.values:
            if not value.is_argument:
                maker, *own = value.layers
                yield maker, own, value.bytes
    else:
        for maker, cost in enumerate(costs.layers[:-1]):
            yield maker, [maker + 1], cost.output_bytes
