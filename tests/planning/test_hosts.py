"""Clusters of several hosts: their links by tier, and links that are measured once."""

import pytest
import torch

import pipepart.cluster.cluster as cluster_module
from pipepart import Cluster, Device, Link
from pipepart.cluster import Network, PairLink
from pipepart.cluster.measuring import HOST, MeasuredLinks, measure_links

BOXES = Cluster.parse(
    ["24GiB"], hosts=2, devices_per_host=8, link="300GB/s", network="25GB/s", network_latency=1e-5
)


def test_two_devices_are_joined_by_the_lowest_tier_that_has_both():
    assert len(BOXES) == 16
    assert BOXES.link_between("device:0", "device:7") == Link(bandwidth=300e9)
    assert BOXES.link_between("device:7", "device:8") == Link(bandwidth=25e9, latency=1e-5)
    groups = Cluster.parse(
        ["1GiB"], hosts=(2, 3), devices_per_host=2, link=9.0, network=[5.0, 3.0], network_latency=1.0
    )
    assert len(groups) == 12
    assert groups.devices[11].host == "group:2/host:1"
    rates = [groups.link_between("device:0", f"device:{n}").bandwidth for n in range(1, 12)]
    assert rates == [9.0, 5.0, 5.0, *[3.0] * 8]


def test_a_message_is_no_faster_than_the_slowest_tier_on_its_way():
    groups = Cluster.parse(["1GiB"], hosts=(2, 2), link=9.0, network=[2.0, 100.0])
    assert groups.link_between("device:0", "device:3").bandwidth == 2.0
    assert [rate for _, rate in groups.places.route("device:0", "device:3")] == [2.0, 2.0, 100.0, 100.0]


def test_the_devices_of_a_host_share_its_ports():
    outs = {BOXES.places.route(f"device:{n}", "device:9")[0] for n in range(8)}
    assert outs == {(("host:0", 0, "out"), 25e9)}
    two = Cluster.parse(["1GiB"] * 4, hosts=2, network=Network(bandwidth=1.0, ports=2))
    assert [two.places.route(f"device:{n}", "device:4")[0][0][1] for n in range(4)] == [0, 0, 1, 1]
    assert BOXES.places.route("device:0", "device:1") == ()


def test_a_link_of_a_pair_goes_before_its_tier():
    own = PairLink(between=("device:0", "device:8"), bandwidth=1.0)
    cluster = BOXES.model_copy(update={"links": (own,)})
    assert cluster.link_between("device:8", "device:0") is own
    assert cluster.places.route("device:0", "device:8") == ()
    assert BOXES.link_between("device:8", "device:0").bandwidth == 25e9


def test_texts_describe_one_device_those_of_a_host_or_all():
    each = Cluster.parse(["24GiB", "16GiB@0.5"], hosts=2, network=1.0)
    assert [device.speed for device in each.devices] == [1.0, 0.5, 1.0, 0.5]
    all_of_them = Cluster.parse(["1GiB", "2GiB", "3GiB", "4GiB"], hosts=2, devices_per_host=2, network=1.0)
    assert [device.memory_bytes for device in all_of_them.devices] == [n * 2**30 for n in (1, 2, 3, 4)]
    assert [device.host for device in all_of_them.devices] == ["host:0", "host:0", "host:1", "host:1"]


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"hosts": 2}, "hosts=2 needs 1 network, as in network='25GB/s', got None"),
        ({"network": 1.0}, "network=1.0 joins hosts, and there is one"),
        ({"hosts": (2, 2), "network": 1.0}, "needs 2 networks"),
        ({"hosts": 0, "network": 1.0}, "hosts must be a number of at least 1"),
        ({"hosts": 2, "devices_per_host": 3, "network": 1.0}, "describe 1, 3 or 6"),
        ({"devices_per_host": 0}, "devices_per_host must be a whole number of at least 1, got 0"),
    ],
)
def test_numbers_that_do_not_agree_are_refused(given, fault):
    with pytest.raises(ValueError, match=fault):
        Cluster.parse(["1GiB", "1GiB"], **given)


def test_hosts_need_a_network_and_a_network_hosts():
    far = (Device(name="a", kind="x", host="one"), Device(name="b", kind="x", host="two"))
    with pytest.raises(ValueError, match="'a' and 'b' are in hosts 'one' and 'two': say what joins them"):
        Cluster(devices=far)
    with pytest.raises(ValueError, match="device 'a' is in host '': with a network of 1 tiers write"):
        Cluster(devices=(Device(name="a", kind="x"),), network=(Network(bandwidth=1.0),))


class Machine:
    """Three accelerators: 0 and 1 are joined by a fast link, 2 by a slow one, and its way back is slower still."""

    names = ("cuda:0", "cuda:1", "cuda:2")

    def __init__(self) -> None:
        self.copies = 0

    def time_copy(self, source: str, target: str, size: int) -> float:
        self.copies += 1
        rate = 12e9 if HOST in (source, target) else 10e9 if "cuda:2" in (source, target) else 100e9
        return 1e-5 + size / (rate / 2 if source == "cuda:2" else rate)


def test_links_are_measured_in_the_slower_direction_and_once():
    machine = Machine()
    time_copy = machine.time_copy
    measured = measure_links(machine.names, time_copy)
    copies = machine.copies
    assert measure_links(machine.names, time_copy) is measured
    assert machine.copies == copies > 0
    assert measured.link.bandwidth == pytest.approx(5e9, rel=1e-3)
    assert [pair.between for pair in measured.links] == [("cuda:0", "cuda:1")]
    assert measured.links[0].bandwidth == pytest.approx(100e9, rel=1e-3)
    assert measured.host_bandwidth == pytest.approx((12e9, 12e9, 6e9), rel=1e-3)
    assert measured.method.startswith("measured: median of 5 copies")


def test_local_measures_cuda_devices_unless_told_not_to(monkeypatch):
    devices = (Device(name="cuda:0", kind="A"), Device(name="cuda:1", kind="A"))
    measured = MeasuredLinks(Link(bandwidth=7.0), (), (3.0, None), "measured: by hand")
    monkeypatch.setattr(cluster_module, "measure_links", lambda names: measured)
    monkeypatch.setattr(
        cluster_module, "find_accelerators", lambda: [torch.device("cuda", n) for n in (0, 1)]
    )

    def of(found: list[torch.device], headroom: float | None = None) -> Cluster:
        return Cluster(devices=devices[: len(found)], links_from="assumed")

    monkeypatch.setattr(Cluster, "of", of)
    assert Cluster.local(measure=False).links_from == "assumed"
    cluster = Cluster.local()
    assert (cluster.link.bandwidth, cluster.links_from) == (7.0, "measured: by hand")
    assert [device.host_bandwidth for device in cluster.devices] == [3.0, None]
