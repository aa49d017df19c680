"""Plans profiles with branches: the graph cutter chooses orders of the layers, and each is planned as a chain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

import networkx as nx
import numpy as np

from ..cluster import Cluster
from ..profiling import Costs, Profile
from .graph import CutDoesNotFit, cut
from .plan_document import Plan
from .suggestions import InfeasiblePlanError

# The node that stands for the loss: it runs after every layer whose output no other layer uses.
_LOSS = ("loss",)

Order = tuple[int, ...]


def plan_branched(
    profile: Profile,
    cluster: Cluster,
    plan_chain: Callable[[Profile], Plan],
    colocate: Sequence[Collection[str]] = (),
    allow_split_ties: bool = False,
) -> Plan:
    """The plan with the shortest predicted step for a profile with branches.

    Each cut into convex stages is a topological order of the layers, cut into intervals. So `plan_chain` plans some
    orders as chains: the execution order, and for each number of micro-batches the order of the stages of the best cut
    (:func:`.graph.cut`). In a chain each stage sends to the next one only. A tensor that skips stages is relayed by the
    stages in between, and its bytes count at each border that it crosses, in time and in memory.

    Args:
        profile: with ``edges``.
        cluster: the devices.
        plan_chain: plans a profile without branches on the cluster.
        colocate: groups of layers that stay in one stage.
        allow_split_ties: whether layers that share a parameter may be in different stages.

    Returns:
        The plan. Its ``edges`` are those of the profile. Its ``profile`` has the layers in the order of the plan; the
        output of a layer there is all that crosses the border after it. The plan is ``optimal`` if its bottleneck
        equals the lower bound of the cut, which is proven for all orders.

    Raises:
        InfeasiblePlanError: no plan was found that fits.
        ValueError: as :func:`pipepart.plan`.
    """
    cutter = _Cutter(profile, cluster, colocate, allow_split_ties)
    best: Plan | None = None
    refusals: list[ValueError] = []
    # An order may come up twice; a dictionary keeps the first of equal keys.
    for order in dict.fromkeys(cutter.orders()):
        try:
            made = plan_chain(linearized(profile, order))
        except ValueError as error:
            refusals.append(error)
            continue
        if best is None or made.predicted.step_seconds < best.predicted.step_seconds:
            best = made
    if best is None:
        raise next((e for e in refusals if isinstance(e, InfeasiblePlanError)), refusals[0])
    # The bound of the chain search holds for this order only. The bound of the cut holds for one stage per device.
    proven = best.chunks == 1 and best.replicas == 1
    bound = cutter.bounds.get(best.micro_batches, 0.0) if proven else 0.0
    prediction = best.predicted.model_copy(update={"bottleneck_bound": bound})
    return best.model_copy(update={"prediction": prediction, "edges": profile.edges})


def linearized(profile: Profile, order: Sequence[int]) -> Profile:
    """Return the profile as a chain: each layer also relays the outputs of earlier layers that later layers use.

    Args:
        profile: with ``edges``.
        order: of the layers, by index; topological.

    Returns:
        A profile without ``edges``, its layers in this order. ``output_bytes`` of a layer are the bytes that cross the
        border after it: each output that a later layer uses, once, and the outputs that no layer uses, which go to the
        loss. A saved tensor counts as an input of each stage that may relay it. The profile does not say which layer
        made it, so it counts from the first layer that feeds one of its users: an upper bound.
    """
    place = {layer: position for position, layer in enumerate(order)}
    index = {info.name: position for position, info in enumerate(profile.layers)}
    edges = [(place[index[one]], place[index[other]]) for one, other in profile.edges]
    last_use = [len(order)] * len(order)
    sources: list[list[int]] = [[] for _ in order]
    for one, other in edges:
        sources[other].append(one)
        last_use[one] = other if last_use[one] == len(order) else max(last_use[one], other)

    def costs_in_order(costs: Costs) -> Costs:
        crossing = np.zeros(len(order) + 1, dtype=np.int64)
        for position, layer in enumerate(order):
            size = costs.layers[layer].output_bytes
            crossing[position] += size
            crossing[last_use[position]] -= size
        behind = np.cumsum(crossing)[:-1].tolist()
        saved = []
        for tensor in costs.saved:
            uses = sorted(place[layer] for layer in tensor.input_of)
            makers = [maker for use in uses for maker in sources[use]]
            inputs = range(min(makers) + 1, uses[-1] + 1) if makers else uses
            kept = tuple(sorted(place[layer] for layer in tensor.layers))
            saved.append(tensor.model_copy(update={"layers": kept, "input_of": tuple(inputs)}))
        layers = [
            costs.layers[layer].model_copy(update={"output_bytes": size})
            for layer, size in zip(order, behind, strict=True)
        ]
        return costs.model_copy(update={"layers": tuple(layers), "saved": tuple(saved)})

    return profile.model_copy(
        update={
            "layers": tuple(profile.layers[layer] for layer in order),
            "costs": tuple(map(costs_in_order, profile.costs)),
            "edges": (),
        }
    )


class _Cutter:
    """Cuts the layers of a profile for each number of micro-batches; ``bounds`` are the lower bounds found."""

    def __init__(
        self, profile: Profile, cluster: Cluster, colocate: Sequence[Collection[str]], allow_split_ties: bool
    ) -> None:
        self._profile, self._cluster = profile, cluster
        self._index: dict[Hashable, int] = {
            info.name: position for position, info in enumerate(profile.layers)
        }
        self._sinks = set(self._index) - {one for one, _ in profile.edges}
        ties: nx.Graph = nx.Graph()
        ties.add_edges_from(itertools.chain.from_iterable(itertools.pairwise(group) for group in colocate))
        shared = [(owner, info.name) for info in profile.layers for owner in info.shares_with]
        # The owner of a shared parameter stays in front of the layers that share it.
        self._edges = [*profile.edges, *shared]
        if not allow_split_ties:
            ties.add_edges_from(shared)
        if len(self._sinks) == 1:
            ties.add_edges_from((sink, _LOSS) for sink in self._sinks)
        self._group = {
            name: number for number, group in enumerate(nx.connected_components(ties)) for name in group
        }
        self._proves = not (allow_split_ties and shared)
        self.bounds: dict[int, float] = {}

    def orders(self) -> Iterator[Order]:
        """The execution order, and for each number of micro-batches that of the best cut."""
        yield tuple(range(len(self._profile.layers)))
        for costs in self._profile.costs:
            try:
                found = cut(self._graph(costs), self._cluster, host=None)
            except CutDoesNotFit:
                continue  # not even the parameters fit: the planner suggests changes
            if self._proves:
                self.bounds[costs.micro_batches] = found.lower_bound
            nodes = itertools.chain.from_iterable(found.stages)
            yield tuple(self._index[name] for name in nodes if name in self._index)

    def _graph(self, costs: Costs) -> nx.DiGraph:
        """Return the graph for the cutter. Its costs are no larger than in any plan, so that its bound holds."""
        pairs = itertools.combinations([device.name for device in self._cluster.devices], 2)
        rates = [self._cluster.link_between(*pair).bandwidth or math.inf for pair in pairs]
        rate = max(rates, default=math.inf)
        graph = nx.DiGraph()
        for info, layer in zip(self._profile.layers, costs.layers, strict=True):
            optimizer = self._profile.optimizer_bytes(info)
            graph.add_node(
                info.name,
                seconds=layer.seconds,
                bytes=info.parameter_bytes + info.gradient_bytes + info.buffer_bytes + optimizer,
            )
        graph.add_node(_LOSS, seconds=costs.loss.seconds)
        graph.add_edges_from(self._edges)
        graph.add_edges_from((sink, _LOSS) for sink in self._sinks)
        trained: set[str] = set()
        for info, layer in zip(self._profile.layers, costs.layers, strict=True):
            before = set(graph.predecessors(info.name))
            if info.gradient_bytes or before & trained:
                trained.add(info.name)
            ways = 2 if info.name in trained else 1  # the gradient comes back
            graph.nodes[info.name]["transfer_seconds"] = ways * layer.output_bytes / rate
        for name, group in self._group.items():
            if name in graph:  # the planner refuses unknown names
                graph.nodes[name]["together"] = group
        return graph
