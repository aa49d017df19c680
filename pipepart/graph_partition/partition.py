"""cut: partitions a layer graph with arbitrary costs into pipeline stages; Cut: the resulting stages."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import networkx as nx

from schedules.searching.clock import Clock, OutOfTime

from ..cluster import Cluster, Device
from ..input_error import InputError
from ..pages import notebook_html
from ..units import counted, format_bytes
from .execution_order import best_interval_split
from .parse import ParsedGraph, Tensors, parse
from .problem import UNLIMITED, Problem, Split
from .search import SearchResult, search


class CutDoesNotFit(InputError):
    """No cut of the graph fits the memory of the devices, or none was found with the effort that a search may take.

    Attributes:
        nodes: the nodes that no device has room for; all nodes if each has room on some device.
        short_bytes: further bytes of each device that are enough; 0 if unknown.
    """

    def __init__(self, message: str, nodes: Sequence[Hashable], short_bytes: int) -> None:
        super().__init__(message)
        self.nodes = list(nodes)
        self.short_bytes = short_bytes


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
        CutDoesNotFit: no cut fits the memory of the devices. The error has the bytes that are missing. With ``seconds``
            it is also raised if the search ran out of time before it found a cut.

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
    _check_nodes(parsed, cluster)
    problem = parsed.problem
    if int(problem.bytes.sum()) > sum(kind.memory * len(kind.devices) for kind in problem.types):
        raise _does_not_fit(parsed, "nothing fits", clock)
    result = search(problem, clock)
    if result.split is not None:
        return _cut(parsed, cluster, result.split, result)
    if result.optimal:
        raise _does_not_fit(parsed, "nothing fits", clock)
    limit = f"within {seconds} seconds" if clock.cut_short else "with the effort that a search may take"
    raise _does_not_fit(parsed, f"no cut was found {limit} that fits, nor a proof that there is none", clock)


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


def _check_nodes(parsed: ParsedGraph, cluster: Cluster) -> None:
    """Check that each node fits some device that may run it."""
    problem = parsed.problem
    for index, group in enumerate(parsed.members):
        allowed = [device_type for device_type in problem.types if math.isfinite(device_type.seconds[index])]
        largest = max(allowed, key=lambda device_type: device_type.memory)
        short = int(problem.bytes[index]) - largest.memory
        if short > 0:
            alone = len(group) == 1
            what = f"node {group[0]!r} needs" if alone else f"nodes {list(group)!r} stay together and need"
            device = cluster.devices[largest.devices[0]]
            raise CutDoesNotFit(
                f"nothing fits: {what} {problem.bytes[index]} bytes, and the largest device that may run them, "
                f"{device.name!r}, holds {largest.memory}: {short} bytes short ({format_bytes(short)})",
                group,
                short,
            )


def _does_not_fit(parsed: ParsedGraph, fault: str, clock: Clock) -> CutDoesNotFit:
    """Return the error, with the bytes per device that make a cut of the execution order possible."""
    problem = parsed.problem
    total, memory = int(problem.bytes.sum()), sum(kind.memory * len(kind.devices) for kind in problem.types)
    devices = counted(problem.device_count, "device")
    message = f"{fault}: the graph needs {total} bytes, and the {devices} hold {memory} in all"
    enough = 0
    try:
        if best_interval_split(_with_more_memory(problem, total), clock) is None:
            message += (
                ". With any memory, no order of the devices lets each node run on a kind that may run it"
            )
        else:
            enough = bisect_left(
                range(total),
                True,
                key=lambda extra: best_interval_split(_with_more_memory(problem, extra), clock) is not None,
            )
            message += f": {enough} bytes more on each are enough ({format_bytes(enough)})"
    except OutOfTime:
        pass
    return CutDoesNotFit(message, [node for group in parsed.members for node in group], enough)


def _with_more_memory(problem: Problem, extra: int) -> Problem:
    types = (replace(kind, memory=min(kind.memory + extra, UNLIMITED)) for kind in problem.types)
    return replace(problem, types=tuple(types))
