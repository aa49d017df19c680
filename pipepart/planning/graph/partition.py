"""The partitioner of general layer graphs alone, on anyone's costs."""

from __future__ import annotations

import networkx as nx

from ...cluster import Cluster
from .budget import Clock
from .infeasible import CutDoesNotFit, nearest, refuse_at_sight
from .parse import Reading, Tensors, devices_of_types, read
from .presolve import reduced
from .problem import Split
from .result import Cut
from .search import Effort, Found, search


def cut(
    graph: nx.DiGraph,
    cluster: Cluster,
    tensors: Tensors | None = None,
    *,
    host: str | None = "cpu",
    seconds: float | None = None,
) -> Cut:
    """The cut of a layer graph into stages, one a device, whose largest load is smallest.

    The stages form an order that no edge goes against, so each is convex: no path leaves it and comes back. The load
    of a stage is the seconds of its nodes on its device, and the seconds of each tensor that crosses its border, once
    however many of its nodes use it. A stage in between, that does not touch a tensor, does not pay for it. Devices
    may be left out; which of unlike devices comes where is part of the search.

    Args:
        graph: nodes in execution order. Node attributes:

            - ``seconds``: on a device of speed 1, a number or ``{device kind: number}``; the node may not run on a
              kind that is missing there.
            - ``bytes``: what its stage must hold for it, 0 by default. Memory of devices is a hard limit.
            - ``transfer_seconds``: to move its output once over the border of a device, 0 by default; each stage that
              makes or uses it pays that.
            - ``together``: nodes with the same value stay in one stage, and so does what lies on a path between them:
              layers that share parameters, or that belong together for any other reason.
        cluster: the devices. ``speed`` divides the seconds of nodes (not of tensors); ``link`` is not looked at.
        tensors: in place of ``transfer_seconds``, each tensor as its seconds and the nodes that touch it, makers and
            users alike; this also says what the backward pass moves, or gradients that are not sent.
        host: kind of the devices whose memory all tensors pass through, which pay nothing for them. It has an effect
            only beside devices of other kinds: CPUs alone pay as any other device does. None for no such kind.
        seconds: when to settle for less than a proof. It is looked at between steps of the search, so some more may
            pass, and a cut is found however little it is; what is found may then differ from run to run. By default
            the effort is counted instead, so that the same arguments give the same cut: up to half a minute where
            the downsets are too many.

    Returns:
        The cut. ``optimal`` says that no other is better by more than one part in 10⁹; where that is not proven,
        ``gap`` says by how much it may be above the best, and ``lower_bound`` what no cut can beat.

    Raises:
        ValueError: the graph is empty or has a cycle, a node lacks its seconds or no device may run it, a number is
            negative or not finite, or a tensor touches a node that is not in the graph.
        CutDoesNotFit: no cut fits the memory of the devices; it names the nodes that are short and the bytes.

    Exact by search over the downsets of the graph, the graphs of ideals of Tarnawski et al., "Efficient Algorithms
    for Device Placement of DNN Graph Operators", NeurIPS 2020, section 5.1.1. A chain takes O(nodes × stage × devices)
    for stages of up to ``stage`` nodes. Work on a graph grows with the downsets that a good bottleneck leaves open:
    few for most networks; where they are too many to keep, the answer is not proven.

    >>> graph = nx.DiGraph()
    >>> graph.add_node("conv", seconds=2.0, transfer_seconds=0.5)
    >>> graph.add_node("norm", seconds=1.0, transfer_seconds=0.5)
    >>> graph.add_node("head", seconds=3.0)
    >>> nx.add_path(graph, ["conv", "norm", "head"])
    >>> found = cut(graph, Cluster.parse(["24GiB", "24GiB"]))
    >>> found.stages, found.bottleneck, found.optimal
    ((['conv', 'norm'], ['head']), 3.5, True)
    """
    reading = read(graph, cluster, tensors, host)
    refuse_at_sight(reading, cluster)
    problem = reading.problem
    smaller = reduced(problem)
    found = search(smaller.problem, Effort(clock=Clock.of(seconds)))
    if found.split is None:
        if not found.optimal:
            raise CutDoesNotFit(
                "no cut was found that fits the memory of the devices, and the graph is too large to prove that there "
                "is none: give the devices more memory, or tie nodes with the attribute 'together'",
                list(graph),
                0,
            )
        raise nearest(reading, cluster)
    return _cut(reading, cluster, smaller.whole(found.split), found)


def _cut(reading: Reading, cluster: Cluster, split: Split, found: Found) -> Cut:
    problem = reading.problem
    loads = tuple(
        problem.stage_seconds(nodes, problem.types[kind])
        for nodes, kind in zip(split.stages, split.types, strict=True)
    )
    return Cut(
        stages=tuple([node for index in nodes for node in reading.members[index]] for nodes in split.stages),
        devices=devices_of_types(cluster, problem.types, split.types),
        loads=loads,
        lower_bound=max(loads) if found.optimal else min(found.lower_bound, max(loads)),
        optimal=found.optimal,
    )
