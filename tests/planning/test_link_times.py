"""The links of a cluster are as messages found them, or are left alone where these do not tell."""

from dataclasses import replace

import pytest

import pipepart
from pipepart import Link
from pipepart.cluster import PairLink
from pipepart.planning import refine_cluster, replan
from tests.planning.measured_steps import cluster_of, slowed, true_layers
from tests.planning.problems import profile_of


def test_the_latency_of_messages_that_were_waited_for_is_found():
    layers = [replace(layer, output=4) for layer in true_layers(8)]
    plan = pipepart.plan(
        profile_of(layers, [8]), cluster_of(1, 1, 1, bandwidth=100.0, latency=1.0), schedule="1f1b"
    )
    slow = plan.cluster.model_copy(update={"link": Link(bandwidth=100.0, latency=0.25)})
    trace = plan.model_copy(update={"cluster": slow}).simulate()
    found, notes = refine_cluster(plan, trace)
    assert found.link.latency == pytest.approx(0.25, rel=1e-9)
    assert found.link.bandwidth == 100.0
    assert len(notes) == 1
    assert "the link of all devices has a latency of 250 ms" in notes[0]
    assert replan(plan, trace, cluster=found).cluster == found
    assert replan(plan, trace).cluster == plan.cluster


def test_each_link_has_its_own_latency():
    layers = [replace(layer, output=4) for layer in true_layers(8)]
    cluster = cluster_of(1, 1, 1)
    pair = PairLink(between=("device:1", "device:2"), latency=0.0)
    plan = pipepart.plan(
        profile_of(layers, [8]), cluster.model_copy(update={"links": (pair,)}), schedule="sequential"
    )
    slow = plan.cluster.model_copy(
        update={"link": Link(latency=0.5), "links": (pair.model_copy(update={"latency": 2.0}),)}
    )
    found, notes = refine_cluster(plan, plan.model_copy(update={"cluster": slow}).simulate())
    assert found.link.latency == pytest.approx(0.5, rel=1e-9)
    assert found.links[0].latency == pytest.approx(2.0, rel=1e-9)
    assert [note.split(" has ")[0] for note in notes] == [
        "the link of 'device:1' and 'device:2'",
        "the link of all other devices",
    ]


def test_a_link_is_left_alone_where_its_messages_do_not_tell():
    layers = [replace(layer, output=100) for layer in true_layers(8)]
    cluster = cluster_of(1, 1, latency=0.125, bandwidth=100.0)
    plan = pipepart.plan(profile_of(layers, [8]), cluster, schedule="sequential")
    found, notes = refine_cluster(plan, plan.simulate())
    assert found == cluster
    assert "left alone: the bytes take most of the time" in notes[0]

    few = pipepart.plan(profile_of(layers, [1]), cluster_of(1, 1), schedule="sequential")
    found, notes = refine_cluster(few, few.simulate())
    assert found == few.cluster
    assert "left alone: 2 messages were waited for, it takes 3" in notes[0]

    free = pipepart.plan(profile_of(layers, [8]), cluster_of(1, 1), schedule="sequential")
    found, notes = refine_cluster(free, slowed(free.simulate(), {0: 1.0, 1: 0.5, 2: 0.25, 3: 0.5}))
    assert found == free.cluster
    assert "left alone: messages take from" in notes[0]
