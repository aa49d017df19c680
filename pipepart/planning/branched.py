"""Plans profiles with branches: the graph cutter chooses orders of the layers, and each is planned as a chain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

import networkx as nx
import numpy as np

from ..cluster import Cluster
from ..profiling import Costs, LiveValue, Profile
from .graph import CutDoesNotFit, cut, thin_orders
from .infeasible import DoesNotFit
from .plans.plan import Plan
from .plans.prediction import Alternative

# The node that stands for the loss: it runs after every layer whose output no other layer uses.
_LOSS = ("loss",)

Order = tuple[int, ...]

# Orders that are planned besides the execution order.
_PROPOSED = 3
MOST_ORDERS = 1 + _PROPOSED  # that are planned


def plan_branched(
    profile: Profile,
    cluster: Cluster,
    plan_chain: Callable[[Profile], Plan],
    colocate: Sequence[Collection[str]] = (),
    allow_split_ties: bool = False,
) -> Plan:
    """The plan with the shortest predicted step for a profile with branches.

    Each cut into convex stages is a topological order of the layers, cut into intervals. So `plan_chain` plans some
    orders as chains: the execution order, and the best of those that the graph cutter proposes for each number of
    micro-batches: that of the stages of the best cut (:func:`.graph.cut`), and orders through thin places
    (:func:`.graph.thin_orders`). The outputs of layers are live values of the chain, as in the profile of a recorded
    model.

    Args:
        profile: with ``edges``.
        cluster: the devices.
        plan_chain: plans a profile without branches on the cluster.
        colocate: groups of layers that stay in one stage.
        allow_split_ties: whether layers that share a parameter may be in different stages.

    Returns:
        The plan. Its ``edges`` are those of the profile. Its ``profile`` has the layers in the order of the plan. The
        plan is ``bottleneck_optimal`` if its bottleneck equals the lower bound of the cut, which is proven for all
        orders.

    Raises:
        DoesNotFit: no plan was found that fits.
        ValueError: as :func:`pipepart.plan`.
    """
    cutter = _Cutter(profile, cluster, colocate, allow_split_ties)
    plans: list[Plan] = []
    refusals: list[ValueError] = []
    for order in cutter.orders():
        try:
            plans.append(plan_chain(linearized(profile, order)))
        except ValueError as error:
            refusals.append(error)
    if not plans:
        raise next((e for e in refusals if isinstance(e, DoesNotFit)), refusals[0])
    best = min(plans, key=lambda made: made.predicted.step_seconds)
    # The bound of the chain search holds for this order only. The bound of the cut holds for one stage per device.
    proven = best.replicas == 1 and len({stage.device for stage in best.stages}) == len(best.stages)
    bound = cutter.bounds.get(best.micro_batches, 0.0) if proven else 0.0
    prediction = best.predicted.model_copy(update={"bottleneck_bound": bound})
    alternatives = _alternatives_in_all_orders(best, [made for made in plans if made is not best])
    return best.model_copy(
        update={
            "prediction": prediction,
            "edges": profile.edges,
            "alternatives": alternatives,
            "out_of_time": any(made.out_of_time for made in plans),
        }
    )


def _alternatives_in_all_orders(best: Plan, others: Sequence[Plan]) -> tuple[Alternative, ...]:
    """Return the alternatives of the best order, without those that another order may have a faster plan for."""

    def is_least(row: Alternative) -> bool:
        steps = [
            [one.step_seconds for one in other.alternatives if one.keywords == row.keywords]
            for other in others
        ]
        if row.step_seconds is None:  # nor may another order have a plan
            return not any(step is not None for own in steps for step in own)
        least = row.step_seconds
        return all(any(step is not None and step >= least for step in own) for own in steps)

    return tuple(filter(is_least, best.alternatives))


def linearized(profile: Profile, order: Sequence[int]) -> Profile:
    """Return the profile as a chain with live values, as the profile of a recorded model is one.

    Args:
        profile: with ``edges``.
        order: of the layers, by index; topological.

    Returns:
        A profile without ``edges``, its layers in this order. The output of each layer is a live value of the layers
        that use it; the outputs that no layer uses go to the loss, in the last layer. ``output_bytes`` of a layer are
        those of all values that are live behind it.
    """
    place = {layer: position for position, layer in enumerate(order)}
    index = {info.name: position for position, info in enumerate(profile.layers)}
    users: list[list[int]] = [[] for _ in order]
    for one, other in profile.edges:
        users[place[index[one]]].append(place[index[other]])
    last = len(order) - 1
    spans = [(position, *sorted(own or {last} - {position})) for position, own in enumerate(users)]
    return profile.model_copy(
        update={
            "layers": tuple(profile.layers[layer] for layer in order),
            "costs": tuple(_in_order(costs, order, spans) for costs in profile.costs),
            "edges": (),
        }
    )


def _in_order(costs: Costs, order: Sequence[int], spans: Sequence[tuple[int, ...]]) -> Costs:
    """Return the costs of the layers in an order; ``spans`` are the places of each maker and its users."""
    sizes = [costs.layers[layer].output_bytes for layer in order]
    crossing = np.zeros(len(order) + 1, dtype=np.int64)
    for size, span in zip(sizes, spans, strict=True):
        crossing[span[0]] += size
        crossing[span[-1]] -= size
    behind = np.cumsum(crossing)[:-1].tolist()
    behind[-1] = sizes[-1]  # what the loss gets
    place = {layer: position for position, layer in enumerate(order)}
    layers = [
        costs.layers[layer].model_copy(update={"output_bytes": size})
        for layer, size in zip(order, behind, strict=True)
    ]
    values = [
        LiveValue(bytes=size, layers=span) for size, span in zip(sizes, spans, strict=True) if len(span) > 1
    ]
    saved = []
    for tensor in costs.saved:
        uses = sorted(place[layer] for layer in tensor.input_of)
        live = range(_maker(tensor.bytes, uses, sizes, spans) + 1, uses[-1] + 1) if uses else range(0)
        kept = {
            "layers": tuple(sorted(place[layer] for layer in tensor.layers)),
            "input_of": tuple(live),
            "passed_by": tuple(position for position in live if position not in uses),
        }
        saved.append(tensor.model_copy(update=kept))
    return costs.model_copy(update={"layers": tuple(layers), "values": tuple(values), "saved": tuple(saved)})


def _maker(size: int, uses: Sequence[int], sizes: Sequence[int], spans: Sequence[tuple[int, ...]]) -> int:
    """Return the place of the layer that made a saved tensor; -1 for an argument of the model.

    The profile does not name it. It feeds all users, and its output has the size. Of several such layers, and if there
    is none, the first one that may have made it counts: an upper bound.
    """
    feeding = [span[0] for span in spans if {*uses} <= {*span[1:]}]
    return next((maker for maker in feeding if sizes[maker] == size), feeding[0] if feeding else -1)


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

    def orders(self) -> list[Order]:
        """The execution order, and the most promising of those of the best cuts and of those through thin places."""
        proposed: dict[Order, float] = {}

        def propose(seconds: float, nodes: Iterable[Hashable]) -> None:
            order = tuple(self._index[name] for name in nodes if name in self._index)
            proposed[order] = min(seconds, proposed.get(order, math.inf))

        for costs in self._profile.costs:
            graph = self._graph(costs)
            try:
                found = cut(graph, self._cluster, host=None)
            except CutDoesNotFit:
                continue  # not even the parameters fit: the planner suggests changes
            if self._proves:
                self.bounds[costs.micro_batches] = found.lower_bound
            # A step takes about as many times the bottleneck as there are micro-batches.
            propose(costs.micro_batches * found.bottleneck, itertools.chain.from_iterable(found.stages))
            for bottleneck, nodes in thin_orders(graph, self._cluster):
                propose(costs.micro_batches * bottleneck, nodes)
        best = sorted(proposed, key=lambda order: proposed[order])[:_PROPOSED]
        return [*dict.fromkeys([tuple(range(len(self._profile.layers))), *best])]

    def _graph(self, costs: Costs) -> nx.DiGraph:
        """Return the graph for the cutter. Its costs are no larger than in any plan, so that its bound holds."""
        rate = _fastest_bandwidth(self._cluster)
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


def _fastest_bandwidth(cluster: Cluster) -> float:
    """Return bytes per second that no link between two devices exceeds; infinite if transfers take no time."""
    hosts = {device.host for device in cluster.devices}
    within = [cluster.link] if len(hosts) < len(cluster) else []
    rates = [link.message_bandwidth or math.inf for link in (*within, *cluster.links, *cluster.network)]
    return max(rates, default=math.inf)
