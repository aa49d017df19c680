"""The section of the report with the layer graph: a colour per stage, and line widths by bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....planning import Plan
from ....profiling import Profile
from ....units import counted, format_bytes, format_seconds
from ...quantity import TimeUnit, printable, size
from ...table import Column, FittingTable
from ..data_table import TABLE_ASSETS, data_table
from ..run import Run
from ..section import Section, render
from . import layers as layer_layout
from . import stages as stage_layout
from .nodes import Edge, Node, edges_of, nodes_of

_COLOURS = 8  # series of the page
_LONGEST_LABEL = 25  # characters
_MOST_NODES, _MOST_EDGES = 2000, 6000  # of a picture
_FEW_STAGES = 12
_READABLE = 80  # nodes, up to which layers are shown first


def graph_section(runs: Sequence[Run]) -> Section | None:
    """Return the section with each plan's layer graph, with a box per stage, per block or per layer."""
    shown = [_shown(run, run.plan.profile) for run in runs if run.plan.profile is not None]
    if not shown:
        return None
    html = render("graph.html", runs=shown, box=layer_layout, stage_box=stage_layout)
    return Section("graph", "Layer graph", html, assets=(*TABLE_ASSETS, "tips.js", "graph.css", "graph.js"))


def _shown(run: Run, profile: Profile) -> dict[str, Any]:
    plan = run.plan
    layers = nodes_of(plan, profile, folded=False)
    edges = edges_of(plan, profile, layers)
    stages = len(plan.stages)
    overview = stage_layout.lay_out_stages(plan)
    blocks = nodes_of(plan, profile, folded=True)
    views = [{"key": "stages", "title": "Stages", "count": stages}]
    block_edges = edges_of(plan, profile, blocks)
    pictures = []
    if len(blocks) < len(layers) and _can_draw(blocks, block_edges):
        pictures.append(_picture("blocks", "Blocks", plan, blocks, block_edges))
    if can_draw_layers := _can_draw(layers, edges):
        pictures.append(_picture("layers", "Layers", plan, layers, edges))
    views += [{"key": each["key"], "title": each["title"], "count": each["count"]} for each in pictures]
    # With one box for each stage, or many stages, the stages say more.
    readable = [view["key"] for view in views[1:] if stages < view["count"] <= _READABLE]
    return {
        "name": run.name,
        "views": views,
        "first": readable[-1] if readable and stages <= _FEW_STAGES else "stages",
        "overview": overview,
        "stages": [_stage(plan, number) for number in range(stages)],
        "stage_tips": [_edge_tip(plan, *_stage_ends(edge), edge.bytes) for edge in overview.edges],
        "pictures": pictures,
        "table": data_table(_cut_table(plan, layers, edges)),
        "has_cuts": bool(overview.edges),
        "left_out": not can_draw_layers,
        "replicas": plan.replicas,
    }


def _can_draw(nodes: Sequence[Node], edges: Sequence[Edge]) -> bool:
    return len(nodes) <= _MOST_NODES and len(edges) <= _MOST_EDGES


def _stage_ends(edge: stage_layout.StageEdge) -> tuple[str, str, int, int]:
    return f"stage {edge.source}", f"stage {edge.target}", edge.source, edge.target


def _stage(plan: Plan, number: int) -> dict[str, Any]:
    """Return the lines of a stage's box, its colour and its tip."""
    stage = plan.stages[number]
    first, last = stage.layers[0], stage.layers[-1]
    names = first if first == last else f"{first} – {last}"
    figures = f"{format_seconds(stage.load_seconds)}, {format_bytes(stage.memory_bytes)}"
    lines = [
        f"stage {number}",
        _short(printable(stage.device)),
        counted(len(stage.layers), "layer"),
        figures,
    ]
    tip = (
        f"stage {number} on {printable(stage.device)}\n{printable(names)}\n"
        f"{format_seconds(stage.load_seconds)} for one micro-batch, {format_bytes(stage.memory_bytes)} at its peak"
    )
    return {"lines": lines, "colour": number % _COLOURS, "tip": tip}


def _picture(
    key: str, title: str, plan: Plan, nodes: Sequence[Node], edges: Sequence[Edge]
) -> dict[str, Any]:
    """Return where the boxes and lines of a view are, and their texts."""
    layout = layer_layout.lay_out(nodes, edges, len(plan.stages))
    longest = max(node.seconds for node in nodes) or 1.0
    boxes = [
        {
            "x": x,
            "y": y,
            "label": _short(printable(node.label)),
            "kind": _kind(node),
            "colour": node.stage % _COLOURS,
            "bar": layer_layout.BOX_WIDTH * node.seconds / longest,
            "tip": _node_tip(node),
        }
        for node, (x, y) in zip(nodes, layout.places, strict=True)
    ]
    lines = [
        {
            "path": line.path,
            "width": line.width,
            "is_cut": line.is_cut,
            "tip": _line_tip(plan, nodes, edges[line.edge]),
        }
        for line in layout.lines
    ]
    heads = [
        {
            "x": column.x,
            "y": column.top,
            "width": column.width,
            "height": column.height,
            "colour": column.stage % _COLOURS,
            "title": f"stage {column.stage}",
            "device": _short(printable(plan.stages[column.stage].device)),
        }
        for column in layout.columns
    ]
    return {
        "key": key,
        "title": title,
        "count": len(nodes),
        "width": layout.width,
        "height": layout.height,
        "boxes": boxes,
        "lines": lines,
        "heads": heads,
    }


def _node_tip(node: Node) -> str:
    what = node.kind or "layers"
    count = f"{node.layers} × {what}" if node.layers > 1 else what
    figures = (
        f"{format_seconds(node.seconds)} for one micro-batch, {format_bytes(node.parameter_bytes)} parameters"
    )
    return f"{printable(node.label)}\n{printable(count)}, stage {node.stage}\n{figures}"


def _line_tip(plan: Plan, nodes: Sequence[Node], edge: Edge) -> str:
    source, target = nodes[edge.source], nodes[edge.target]
    return _edge_tip(plan, source.label, target.label, source.stage, target.stage, edge.bytes)


def _edge_tip(plan: Plan, source: str, target: str, one: int, other: int, count: int) -> str:
    words = f"{printable(source)} → {printable(target)}\n{format_bytes(count)} for one micro-batch"
    if one == other:
        return words
    devices = plan.stages[one].device, plan.stages[other].device
    if devices[0] == devices[1]:
        return f"{words}, on one device"
    seconds = _link_seconds(plan, one, other, count)
    return (
        f"{words}, {format_seconds(seconds)} over the link"
        if seconds
        else f"{words}, over a link without limit"
    )


def _link_seconds(plan: Plan, one: int, other: int, count: int) -> float:
    """Return what the link between the devices of two stages takes for a message; 0 on one device."""
    here, there = plan.stages[one].device, plan.stages[other].device
    return 0.0 if here == there else plan.cluster.link_between(here, there).seconds(count)


def _cut_table(plan: Plan, layers: Sequence[Node], edges: Sequence[Edge]) -> FittingTable:
    """Make a table of the edges between layers of different stages."""
    ends = [(layers[edge.source], layers[edge.target], edge.bytes) for edge in edges]
    cuts = [each for each in ends if each[0].stage != each[1].stage]
    seconds = [_link_seconds(plan, one.stage, other.stage, count) for one, other, count in cuts]
    unit = TimeUnit.for_all(seconds)
    return FittingTable(
        "Edges that the cut crosses, for one micro-batch; gradients return the same way",
        [
            Column("from layer", [one.label for one, _, _ in cuts], text=True),
            Column("to layer", [other.label for _, other, _ in cuts], text=True),
            Column("from stage", [str(one.stage) for one, _, _ in cuts]),
            Column("to stage", [str(other.stage) for _, other, _ in cuts]),
            Column("bytes", [size(count) for _, _, count in cuts]),
            Column(f"link {unit.name}", list(map(unit.text, seconds))),
        ],
    )


def _kind(node: Node) -> str:
    """Return the kind of a node's layers if the box has room for it beside a short name, such as a number."""
    kind, room = printable(node.kind), _LONGEST_LABEL - len(printable(node.label)) - 2
    return kind if len(kind) <= room else ""


def _short(label: str) -> str:
    """Shorten a long name in the middle: its end tells layers apart."""
    if len(label) <= _LONGEST_LABEL:
        return label
    return f"{label[:7]}…{label[-(_LONGEST_LABEL - 8) :]}"
