"""The joint search has a plan for few layers on many devices at once, and places stages once for equal devices."""

import pytest

import pipepart
from pipepart.cluster import Cluster
from pipepart.graph_partition.device_orders import distinct_orders
from pipepart.planning.joint.starts import _placements
from tests.planning.layer import Layer
from tests.planning.problems import profile_of


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("layers", "devices"), [(10, 8), (8, 10), (14, 16)])
def test_few_layers_on_many_devices_have_a_plan(layers, devices):
    profile = profile_of([Layer(output=10)] * layers, [8])
    plan = pipepart.plan(profile, Cluster.virtual(devices), seconds=1.0)
    assert plan.predicted.step_seconds < plan.predicted.serial_seconds


def test_placements_are_there_once_for_equal_devices():
    assert _placements(3, [0, 0], 10) == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert len(_placements(3, [0, 1], 10) or ()) == 2**3
    assert _placements(3, [0, 1], 7) is None
    assert _placements(1000, [0, 0, 0], 500) is None


def test_orders_of_thousands_of_devices_are_made():
    assert next(distinct_orders(Cluster.virtual(1100), 1100)) == tuple(range(1100))


def test_devices_with_other_runtimes_are_not_alike():
    cluster = Cluster.virtual(2)
    slow = cluster.devices[1].model_copy(update={"action_seconds": 0.5})
    cluster = cluster.model_copy(update={"devices": (cluster.devices[0], slow)})
    assert list(distinct_orders(cluster, 2)) == [(0, 1), (1, 0)]


def test_an_estimate_lies_between_the_sizes_around_it():
    profile = profile_of([Layer(forward=1.0, backward_input=0.0)], [1, 8, 16])
    seconds = {1: 8.0, 8: 1.0, 16: 1.0}  # of 16, 2 and 1 samples
    costs = tuple(
        costs.model_copy(
            update={
                "samples": 16 // costs.micro_batches,
                "layers": tuple(
                    layer.model_copy(
                        update={
                            "forward": layer.forward.model_copy(
                                update={"seconds": seconds[costs.micro_batches]}
                            )
                        }
                    )
                    for layer in costs.layers
                ),
            }
        )
        for costs in profile.costs
    )
    estimated = pipepart.planning.estimate(profile.model_copy(update={"costs": costs}), 2)
    assert estimated.at(2).layers[0].forward.seconds == pytest.approx(4.0)
