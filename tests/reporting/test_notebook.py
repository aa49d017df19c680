"""What notebooks show of values: tables and pictures without scripts, all names escaped, long ones cut."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import networkx as nx

import schedules
from pipepart import Cluster, Plan, Profile, Trace, planning
from tests.support.golden import check_golden, text_of

_HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


class _Tags(HTMLParser):
    """Collects the tags of a text and the names of their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names.update(name for name, _ in attrs)


def shown(value: object) -> str:
    """Return what a notebook shows of a value, and check that it needs no scripts and no style sheets."""
    text: str = value._repr_html_()  # type: ignore[attr-defined]
    found = _Tags(text)
    assert not {"script", "style", "img", "link", "iframe"} & found.tags
    assert not [name for name in found.names if name.startswith("on")]
    return text


def of_many_layers(profile: Profile) -> Profile:
    """The first layer a thousand times."""
    layers = tuple(
        profile.layers[0].model_copy(update={"name": f"layers.{number}"}) for number in range(1000)
    )
    cost = profile.costs[0].layers[0].model_copy(update={"saved_bytes": 0})
    costs = profile.costs[0].model_copy(update={"layers": (cost,) * 1000, "saved": ()})
    return profile.model_copy(update={"layers": layers, "costs": (costs,)})


def test_values_are_shown_as_the_file_has_it(profile: Profile, two_stages: Plan):
    """Of many layers the first and the last; no picture of a timeline that is too large."""
    graph = nx.path_graph([f"n{number}" for number in range(6)], create_using=nx.DiGraph)
    nx.set_node_attributes(graph, dict.fromkeys(graph, 1e-3), "seconds")
    large = schedules.build("1f1b", devices=64, micro_batches=512)
    values = [
        profile,
        of_many_layers(profile),
        two_stages,
        two_stages.model_copy(update={"prediction": None, "profile": None}),
        Trace(two_stages, [two_stages.simulate()]),
        Trace(two_stages),
        schedules.simulate(large, schedules.StageCosts([1.0] * 64, [1.0] * 64, [1.0] * 64)),
        planning.cut(graph, Cluster.virtual(2)),
    ]
    texts = [str(profile), repr(large), *(text_of(shown(value)) for value in values)]
    check_golden("\n\n".join(texts), Path(__file__).parent / "golden" / "notebook.txt")


def test_names_are_escaped(profile: Profile, two_stages: Plan):
    layers = tuple(layer.model_copy(update={"name": f"{_HOSTILE}{layer.name}"}) for layer in profile.layers)
    named = profile.model_copy(update={"layers": layers, "model": _HOSTILE})
    shown(named)
    shown(planning.plan(named, Cluster.virtual(2), schedule="1f1b", micro_batches=4))
    shown(replace(two_stages.simulate(), schedule=replace(two_stages.simulate().schedule, name=_HOSTILE)))
