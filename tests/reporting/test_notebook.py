"""What notebooks show of values: tables and pictures without scripts, all names escaped, long ones cut."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import networkx as nx

import schedules
from pipepart import Cluster, Plan, Profile, Trace, planning

_HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


class _Tags(HTMLParser):
    """Collects the tags of a text, their attributes, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.names: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.names += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def shown(value: object) -> _Tags:
    """Parse what a notebook shows of a value, and check that it needs no scripts and no style sheets."""
    found = _Tags(value._repr_html_())  # type: ignore[attr-defined]
    assert not {"script", "style", "img", "link", "iframe"} & set(found.tags)
    assert not [name for name in found.names if name.startswith("on")]
    return found


def rows(value: object) -> list[list[str]]:
    """Return the cells of the rows of all tables that a notebook shows of a value."""
    text = value._repr_html_()  # type: ignore[attr-defined]
    lines = re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)
    return [re.findall(r"<t[dh][^>]*>([^<]*)", line) for line in lines]


def test_a_profile_shows_its_layers_and_totals_and_of_a_long_one_the_first_and_the_last(profile: Profile):
    names = [layer.name for layer in profile.layers]
    assert [row[0] for row in rows(profile)] == ["layer", *names, "loss", "total"]
    assert str(profile) == "Profile of Sequential: 3 layers, 12.5 ms a micro-batch of 16 samples on cpu"
    assert str(profile) in shown(profile).words
    layers = tuple(
        profile.layers[0].model_copy(update={"name": f"layers.{number}"}) for number in range(1000)
    )
    cost = profile.costs[0].layers[0].model_copy(update={"saved_bytes": 0})
    costs = profile.costs[0].model_copy(update={"layers": (cost,) * 1000, "saved": ()})
    long = profile.model_copy(update={"layers": layers, "costs": (costs,)})
    names = [row[0] for row in rows(long)][1:]
    assert names[:2] == ["layers.0", "layers.1"]
    assert names[-3:] == ["layers.999", "loss", "total"]
    assert len(names) == 17
    assert "… 986 more" in names
    assert len(long._repr_html_()) < 20_000


def test_a_plan_and_a_trace_show_time_and_memory_of_each_device_and_its_timeline(two_stages: Plan):
    assert "svg" in shown(two_stages).tags
    stages = [row for row in rows(two_stages) if row[1:] and row[1].startswith("virtual")]
    assert [row[:3] for row in stages] == [
        ["0", "virtual:0", "embedding – body.a_layer_with_a_very_long_name.attention"],
        ["1", "virtual:1", "head"],
    ]
    devices = [row for row in rows(two_stages) if row and row[0].startswith("virtual")]
    assert all("64.0 MiB" in row for row in devices)
    bare = two_stages.model_copy(update={"prediction": None, "profile": None})
    assert "virtual:0" in shown(bare).words
    words = " ".join(shown(Trace(two_stages, [two_stages.simulate()])).words)
    assert "as predicted" in words
    assert "predicted:" in words
    assert "no whole step" in " ".join(shown(Trace(two_stages)).words)


def test_a_schedule_and_a_large_timeline_stay_small_and_a_cut_shows_its_stages():
    built = schedules.build("1f1b", devices=64, micro_batches=512)
    assert repr(built) == "<Schedule 1f1b: 64 stages on 64 devices, 512 micro-batches>"
    costs = schedules.StageCosts([1.0] * 64, [1.0] * 64, [1.0] * 64)
    words = " ".join(shown(schedules.simulate(built, costs)).words)
    assert "a step of 1.72e+03 s" in words
    assert "1f1b has 64 and 65,536: draw one replica or fewer micro-batches" in words
    graph = nx.path_graph([f"n{number}" for number in range(6)], create_using=nx.DiGraph)
    nx.set_node_attributes(graph, dict.fromkeys(graph, 1e-3), "seconds")
    cut = planning.cut(graph, Cluster.virtual(2))
    assert "Cut into 2 stages: bottleneck 3 ms, no cut has a smaller one" in shown(cut).words
    assert [row[2] for row in rows(cut)[1:]] == ["n0 – n2", "n3 – n5"]


def test_names_are_escaped(profile: Profile, two_stages: Plan):
    layers = tuple(layer.model_copy(update={"name": f"{_HOSTILE}{layer.name}"}) for layer in profile.layers)
    named = profile.model_copy(update={"layers": layers, "model": _HOSTILE})
    shown(named)
    shown(planning.plan(named, Cluster.virtual(2), schedule="1f1b", micro_batches=4))
    shown(replace(two_stages.simulate(), schedule=replace(two_stages.simulate().schedule, name=_HOSTILE)))
