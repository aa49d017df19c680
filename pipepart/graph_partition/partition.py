"""cut: partitions a layer graph with arbitrary costs into pipeline stages; Cut: the resulting stages."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import networkx as nx

from schedules.searching.clock import Clock

from ..cluster import Cluster, Device
from ..pages import notebook_html
from .infeasible import CutDoesNotFit, check_memory, nearest
from .parse import ParsedGraph, Tensors, parse
from .presolve import presolve
from .problem import Split
from .search import Effort, SearchResult, search


@dataclass(frozen=True)
class Cut:
    """Stages of a graph with their devices, and a bound on how far they are from the optimum.

    Attributes:
        stages: the nodes of each stage in execution order, stages in pipeline order; none is empty.
        devices: the device of each stage; some devices of the cluster may be left out.
        loads: seconds of each stage: compute, and transfers of the tensors that cross its borders.
        lower_bound: lower bound in seconds on the bottleneck of every cut of this graph over this cluster.
        optimal: whether ``bottleneck`` is proven to be the smallest, to one part in 10⁹.
    """

    stages: tuple[list[Hashable], ...]
    devices: tuple[Device, ...]
    loads: tuple[float, ...]
    lower_bound: float
    optimal: bool

    @property
    def bottleneck(self) -> float:
        """The largest load of any stage, in seconds."""
        return max(self.loads)

    @property
    def gap(self) -> float:
        """Upper bound on the bottleneck's distance from the optimum, relative to the optimum: 0.02 for 2 %."""
        if self.optimal:
            return 0.0
        return self.bottleneck / self.lower_bound - 1 if self.lower_bound > 0 else float("inf")

    def _repr_html_(self) -> str:
        """Show the stages with their loads in a notebook."""
        return notebook_html(self)


def cut(
    graph: nx.DiGraph,
    cluster: Cluster,
    tensors: Tensors | None = None,
    *,
    host: str | None = "cpu",
    seconds: float | None = None,
) -> Cut:
    """Partition a layer graph into pipeline stages, one per device, with the smallest bottleneck.

    No edge leads to an earlier stage, so each stage is convex: no path leaves it and comes back. The load of a stage is
    the seconds of its nodes on its device plus the seconds of each tensor that crosses one of its borders. A tensor
    counts once per stage, even if several nodes of the stage use it. It does not count in stages between those that
    make or use it. Devices may be left out. The search includes the order of devices of different types.

    Args:
        graph: nodes in execution order. Node attributes:

            - ``seconds``: on a device of speed 1, a number or ``{device kind: number}``. The node may not run on a
              kind that is missing there.
            - ``bytes``: memory that its stage holds for it, 0 by default. The memory of a device is a hard limit.
            - ``transfer_seconds``: to move its output once over the border of a device, 0 by default.
            - ``together``: nodes with the same value stay in one stage, and so do the nodes on paths between them.
        cluster: the devices. ``speed`` divides the seconds of nodes, not those of tensors. Links are not used.
        tensors: replaces ``transfer_seconds``: the seconds of each tensor, and all nodes that make or use it. This also
            expresses what the backward pass moves, and outputs without a gradient.
        host: kind of the devices whose transfers cost nothing if the cluster also has other kinds. If all devices have
            this kind, transfers cost as usual. None for no such kind.
        seconds: time that the call may take; the result may then differ between runs. By default the effort is counted
            instead, so equal arguments give equal cuts. This takes up to half a minute if the graph has too many
            downsets.

    Returns:
        The cut. ``optimal`` is True if no cut is better by more than one part in 10⁹. Otherwise ``lower_bound`` bounds
        the bottleneck of every cut from below, and ``gap`` bounds the distance from the optimum.

    Raises:
        ValueError: the graph is empty or has a cycle, a node has no seconds or no device may run it, a number is
            negative or not finite, or a tensor names a node that is not in the graph.
        CutDoesNotFit: no cut fits the memory of the devices. The error has the nodes and the missing bytes. With
            ``seconds`` it is also raised if the search ran out of time before it found a cut.

    Exact by search over the downsets of the graph (Tarnawski et al., "Efficient Algorithms for Device Placement of DNN
    Graph Operators", NeurIPS 2020, section 5.1.1, calls them ideals); :mod:`pipepart.graph_partition.search` describes
    the algorithm. If all downsets are prefixes of one order, as in a chain, it takes O(nodes × stage × devices), where
    a stage of ``stage`` nodes is somewhat longer than an even share. Otherwise the time grows with the number of
    downsets that a good bottleneck leaves possible: few for most networks.

    >>> graph = nx.DiGraph()
    >>> graph.add_node("conv", seconds=2.0, transfer_seconds=0.5)
    >>> graph.add_node("norm", seconds=1.0, transfer_seconds=0.5)
    >>> graph.add_node("head", seconds=3.0)
    >>> nx.add_path(graph, ["conv", "norm", "head"])
    >>> best = cut(graph, Cluster.parse(["24GiB", "24GiB"]))
    >>> best.stages, best.bottleneck, best.optimal
    ((['conv', 'norm'], ['head']), 3.5, True)
    """
    clock = Clock(math.inf if seconds is None else seconds)
    parsed = parse(graph, cluster, tensors, host)
    check_memory(parsed, cluster)
    smaller = presolve(parsed.problem)
    result = search(smaller.problem, Effort(clock=clock))
    if result.split is not None:
        return _cut(parsed, cluster, smaller.restore(result.split), result)
    if result.optimal:
        raise nearest(parsed, cluster, clock)
    limit = f"within {seconds} seconds" if clock.cut_short else "with the effort that a search may take"
    raise CutDoesNotFit(
        f"no cut was found {limit} that fits the memory of the devices, nor a proof that there is none: give the "
        "devices more memory, allow more seconds, or tie nodes with the attribute 'together'",
        list(graph),
        0,
    )


def _cut(parsed: ParsedGraph, cluster: Cluster, split: Split, result: SearchResult) -> Cut:
    problem = parsed.problem
    loads = tuple(
        problem.stage_seconds(nodes, problem.types[device_type])
        for nodes, device_type in zip(split.stages, split.types, strict=True)
    )
    return Cut(
        stages=tuple([node for index in nodes for node in parsed.members[index]] for nodes in split.stages),
        devices=tuple(cluster.devices[index] for index in problem.devices_of(split)),
        loads=loads,
        lower_bound=max(loads) if result.optimal else min(result.lower_bound, max(loads)),
        optimal=result.optimal,
    )
