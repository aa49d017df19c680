"""Proposes orders of a layer graph whose intervals are good stages."""

from __future__ import annotations

import math
from collections.abc import Hashable

import networkx as nx

from ...cluster import Cluster
from .exact.intervals import best_order_split
from .heuristics.thin_places import thin_order
from .parse import parse
from .search import MOST_MINIMUM_CUTS


def thin_orders(graph: nx.DiGraph, cluster: Cluster) -> list[tuple[float, list[Hashable]]]:
    """Return orders through borders that few tensors cross, each with the bottleneck of its best cut into intervals.

    One for as many even shares of the work as there are devices, as schedules with one stage a device need, and one for
    twice as many; none of a graph that is too large for this. Arguments as for :func:`.cut`, with ``host=None``.
    """
    parsed = parse(graph, cluster, None, None)
    found = []
    nodes = len(parsed.problem)
    for parts in (len(cluster), 2 * len(cluster)):
        if parts > nodes or parts * nodes > MOST_MINIMUM_CUTS:
            break
        order = thin_order(parsed.problem, parts)
        split = best_order_split(parsed.problem, order)
        bottleneck = split.bottleneck(parsed.problem) if split else math.inf
        found.append((bottleneck, [node for index in order for node in parsed.members[index]]))
    return found
