"""Clusters: detected, virtual, described, of one host or several; their links by tier, measured once."""

from types import SimpleNamespace

import pytest
import torch

import pipepart.cluster.cluster as cluster_module
from pipepart import Cluster, Device, Link
from pipepart.cluster import Network, PairLink, as_cluster
from pipepart.cluster import devices as device_module
from pipepart.cluster.measuring import HOST, MeasuredLinks, measure_links

BOXES = Cluster.parse(
    ["24GiB"], hosts=2, devices_per_host=8, link="300GB/s", network="25GB/s", network_latency=1e-5
)


def memory(cluster: Cluster) -> list[int | None]:
    return [device.memory_bytes for device in cluster.devices]


def speeds(cluster: Cluster) -> list[float]:
    return [device.speed for device in cluster.devices]


def test_virtual_devices_share_the_threads_of_the_process():
    torch.set_num_threads(2)
    cluster = Cluster.virtual(2, memory="2GiB")
    assert [(device.name, device.torch_device) for device in cluster.devices] == [
        ("virtual:0", "cpu"),
        ("virtual:1", "cpu"),
    ]
    assert [device.threads for device in cluster.devices] == [1, 1]
    assert [device.threads for device in Cluster.virtual(8, threads=3).devices] == [3] * 8
    assert memory(cluster) == [2 * 2**30] * 2
    assert memory(Cluster.virtual(1)) == [None]
    assert memory(Cluster.virtual(2, memory=["2KiB", 5000])) == [2048, 5000]


def test_virtual_devices_of_unlike_speeds_and_slow_links_are_emulated():
    cluster = Cluster.virtual(4, speed=[1, 1, 0.5, 0.5], link="2GB/s", latency=1e-3)
    assert speeds(cluster) == [1, 1, 0.5, 0.5]
    assert cluster.link == Link(bandwidth=2e9, latency=1e-3)
    assert cluster.emulated
    assert speeds(Cluster.virtual(2, speed=0.25)) == [0.25, 0.25]
    for fast in (Cluster.virtual(2), Cluster.virtual(2, speed=[1.0, 1.0])):
        assert not fast.emulated
        assert fast.link == Link(latency=20e-6)


def test_described_devices():
    cluster = Cluster.parse(["24GiB", "16GiB@0.6", "500MB@2"], link="12GB/s", latency=1e-5)
    assert memory(cluster) == [24 * 2**30, 16 * 2**30, 500 * 10**6]
    assert speeds(cluster) == [1.0, 0.6, 2.0]
    assert all(device.torch_device is None for device in cluster.devices)
    assert cluster.link == Link(bandwidth=12e9, latency=1e-5)
    assert cluster.link.seconds(12e9) == pytest.approx(1.00001)


def test_texts_describe_one_device_those_of_a_host_or_all():
    each = Cluster.parse(["24GiB", "16GiB@0.5"], hosts=2, network=1.0)
    assert speeds(each) == [1.0, 0.5, 1.0, 0.5]
    all_of_them = Cluster.parse(["1GiB", "2GiB", "3GiB", "4GiB"], hosts=2, devices_per_host=2, network=1.0)
    assert memory(all_of_them) == [n * 2**30 for n in (1, 2, 3, 4)]
    assert [device.host for device in all_of_them.devices] == ["host:0", "host:0", "host:1", "host:1"]


def test_what_devices_may_be_given_as(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    (device,) = Cluster.local().devices
    assert (device.torch_device, device.threads) == ("cpu", torch.get_num_threads())
    cluster = Cluster.parse(["1GiB"])
    assert as_cluster(cluster) is cluster
    assert as_cluster(3) == Cluster.virtual(3)
    assert as_cluster(["cpu"]) == Cluster.of(["cpu"])


FAR = (Device(name="a", kind="x", host="one"), Device(name="b", kind="x", host="two"))
REFUSED = {
    "at least 1 device, got 0": lambda: Cluster.virtual(0),
    "'much' is not a size": lambda: Cluster.virtual(2, memory="much"),
    "positive .*got 0$": lambda: Cluster.virtual(2, memory=0),
    "memory names 1 devices, there are 2": lambda: Cluster.virtual(2, memory=["1GiB"]),
    "virtual device 1 cannot have speed 1.5": lambda: Cluster.virtual(2, speed=[1, 1.5]),
    "speed names 3 devices, there are 2": lambda: Cluster.virtual(2, speed=[1, 1, 1]),
    "cannot have a latency of 1e-06 s: threads need 2e-05 s": lambda: Cluster.virtual(2, latency=1e-6),
    "is not a bandwidth": lambda: Cluster.virtual(2, link="2GB"),
    "got none": lambda: Cluster.parse([]),
    "device 0, '16GiB@fast': 'fast' is not a speed": lambda: Cluster.parse(["16GiB@fast"]),
    "device 1, .* positive": lambda: Cluster.parse(["1GiB", "16GiB@0"]),
    "positive": lambda: Cluster.parse(["16GiB"], link=-1.0),
    "names must differ": lambda: Cluster(devices=(Device(name="a", kind="x"),) * 2),
    "hosts=2 needs 1 network, as in network='25GB/s', got None": lambda: Cluster.parse(["1GiB"], hosts=2),
    "network=1.0 joins hosts, and there is one": lambda: Cluster.parse(["1GiB"], network=1.0),
    "needs 2 networks": lambda: Cluster.parse(["1GiB"], hosts=(2, 2), network=1.0),
    "hosts must be a number of at least 1": lambda: Cluster.parse(["1GiB"], hosts=0, network=1.0),
    "describe 1, 3 or 6": lambda: Cluster.parse(["1GiB"] * 2, hosts=2, devices_per_host=3, network=1.0),
    "a whole number of at least 1, got 0": lambda: Cluster.parse(["1GiB"], devices_per_host=0),
    "'a' and 'b' are in hosts 'one' and 'two': say what joins them": lambda: Cluster(devices=FAR),
    "device 'a' is in host '': with a network of 1 tiers write": lambda: Cluster(
        devices=(Device(name="a", kind="x"),), network=(Network(bandwidth=1.0),)
    ),
    "headroom is a part of the memory": lambda: Cluster.of(["cuda:0"], headroom=1.0),
}


@pytest.mark.parametrize("words", REFUSED)
def test_clusters_that_cannot_be_are_refused_with_their_values(words, one_gpu):
    with pytest.raises(ValueError, match=words):
        REFUSED[words]()


def test_a_device_is_found_by_name():
    cluster = Cluster.virtual(2)
    assert cluster.device("virtual:1") is cluster.devices[1]
    with pytest.raises(
        KeyError, match=r"no device 'virtual:2': the cluster has \['virtual:0', 'virtual:1'\]"
    ):
        cluster.device("virtual:2")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "find_accelerators", lambda: [torch.device("cuda:0")])
    properties = SimpleNamespace(total_memory=1000, name="made up")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_stages_may_use_what_is_left_and_a_device_named_twice_shares_it(one_gpu):
    assert memory(Cluster.of(["cuda:0"])) == [920]
    assert memory(Cluster.of(["cuda:0"], headroom=0.25)) == [750]
    assert memory(Cluster.of(["cuda:0"] * 2, headroom=0.5)) == [250, 250]


def test_two_devices_are_joined_by_the_lowest_tier_that_has_both():
    assert BOXES.link_between("device:0", "device:7") == Link(bandwidth=300e9)
    assert BOXES.link_between("device:7", "device:8") == Link(bandwidth=25e9, latency=1e-5)
    groups = Cluster.parse(
        ["1GiB"], hosts=(2, 3), devices_per_host=2, link=9.0, network=[5.0, 3.0], network_latency=1.0
    )
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
    assumed = Cluster(devices=devices, links_from="assumed")
    monkeypatch.setattr(Cluster, "of", lambda found, headroom=None: assumed)
    assert Cluster.local(measure=False).links_from == "assumed"
    cluster = Cluster.local()
    assert (cluster.link.bandwidth, cluster.links_from) == (7.0, "measured: by hand")
    assert [device.host_bandwidth for device in cluster.devices] == [3.0, None]
