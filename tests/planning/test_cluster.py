"""Clusters: detected, virtual or described."""

import json
from types import SimpleNamespace

import pytest
import torch

from pipepart import Cluster, Device, Link
from pipepart.cluster import as_cluster
from pipepart.cluster import devices as device_module


def test_virtual_devices_share_the_threads_of_the_process():
    torch.set_num_threads(2)
    cluster = Cluster.virtual(2, memory="2GiB")
    assert len(cluster) == 2
    assert [device.name for device in cluster.devices] == ["virtual:0", "virtual:1"]
    assert {device.memory_bytes for device in cluster.devices} == {2 * 2**30}
    assert {device.torch_device for device in cluster.devices} == {"cpu"}
    assert [device.threads for device in cluster.devices] == [1, 1]
    assert [device.threads for device in Cluster.virtual(8, threads=3).devices] == [3] * 8
    assert Cluster.virtual(1).devices[0].memory_bytes is None
    assert Cluster.virtual(1, memory=5000).devices[0].memory_bytes == 5000
    unlike = Cluster.virtual(2, memory=["2KiB", 5000])
    assert [device.memory_bytes for device in unlike.devices] == [2048, 5000]


def test_virtual_devices_of_unlike_speeds_and_slow_links_are_emulated():
    cluster = Cluster.virtual(4, speed=[1, 1, 0.5, 0.5], link="2GB/s", latency=1e-3)
    assert [device.speed for device in cluster.devices] == [1, 1, 0.5, 0.5]
    assert cluster.link == Link(bandwidth=2e9, latency=1e-3)
    assert cluster.emulated
    assert [device.speed for device in Cluster.virtual(2, speed=0.25).devices] == [0.25, 0.25]


@pytest.mark.parametrize("given", [{}, {"speed": [1.0, 1.0]}])
def test_virtual_devices_as_fast_as_the_machine_are_not_emulated(given):
    cluster = Cluster.virtual(2, **given)
    assert not cluster.emulated
    assert cluster.link == Link(latency=20e-6)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"speed": 2}, "virtual device 0 cannot have speed 2.0"),
        ({"speed": [1, 1.5]}, "virtual device 1 cannot have speed 1.5"),
        ({"speed": [1, 1, 1]}, "speed names 3 devices, there are 2"),
        ({"memory": ["1GiB"]}, "memory names 1 devices, there are 2"),
        ({"latency": 1e-6}, "cannot have a latency of 1e-06 s: threads need 2e-05 s"),
        ({"link": "2GB"}, "is not a bandwidth"),
    ],
)
def test_what_no_waiting_makes_of_a_machine_is_refused(given, fault):
    with pytest.raises(ValueError, match=fault):
        Cluster.virtual(2, **given)


def test_described_devices():
    cluster = Cluster.parse(["24GiB", "16GiB@0.6", "500MB@2"], link="12GB/s", latency=1e-5)
    assert [device.memory_bytes for device in cluster.devices] == [24 * 2**30, 16 * 2**30, 500 * 10**6]
    assert [device.speed for device in cluster.devices] == [1.0, 0.6, 2.0]
    assert all(device.torch_device is None for device in cluster.devices)
    assert cluster.link == Link(bandwidth=12e9, latency=1e-5)
    assert cluster.link.seconds(12e9) == pytest.approx(1.00001)


def test_a_box_without_accelerators_has_its_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    (device,) = Cluster.local().devices
    assert (device.torch_device, device.threads) == ("cpu", torch.get_num_threads())


def test_what_devices_may_be_given_as(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    cluster = Cluster.parse(["1GiB"])
    assert as_cluster(cluster) is cluster
    assert as_cluster(3) == Cluster.virtual(3)
    assert as_cluster(["cpu"]) == Cluster.of(["cpu"])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Cluster.virtual(0), "at least 1 device, got 0"),
        (lambda: Cluster.virtual(2, memory="much"), "'much' is not a size"),
        (lambda: Cluster.virtual(2, memory=0), "positive .*got 0$"),
        (lambda: Cluster.parse([]), "got none"),
        (lambda: Cluster.parse(["16GiB@fast"]), "device 0, '16GiB@fast': 'fast' is not a speed"),
        (lambda: Cluster.parse(["1GiB", "16GiB@0"]), "device 1, .* positive"),
        (lambda: Cluster.parse(["16 elephants"]), "'16 elephants' is not a size"),
        (lambda: Cluster.parse(["16GiB"], link="12GB"), "'12GB' is not a bandwidth"),
        (lambda: Cluster.parse(["16GiB"], link=-1.0), "positive"),
        (lambda: Cluster(devices=(Device(name="a", kind="x"),) * 2), "names must differ"),
    ],
)
def test_clusters_that_cannot_be_are_refused_with_their_values(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_device_is_found_by_name():
    cluster = Cluster.virtual(2)
    assert cluster.device("virtual:1") is cluster.devices[1]
    with pytest.raises(
        KeyError, match=r"no device 'virtual:2': the cluster has \['virtual:0', 'virtual:1'\]"
    ):
        cluster.device("virtual:2")


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster.virtual(3, memory="1GiB"),
        Cluster.parse(["24GiB", "16GiB@0.6"], link="12GB/s"),
        Cluster.of(["cpu"]),
    ],
    ids=["virtual", "described", "detected"],
)
def test_a_saved_cluster_loads_as_the_same_value(cluster, tmp_path):
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster


def test_a_cluster_file_may_be_written_by_hand(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text('{"devices": [{"name": "a", "kind": "A100"}, {"name": "b", "kind": "T4", "speed": 0.3}]}')
    assert [device.speed for device in Cluster.load(path).devices] == [1.0, 0.3]
    path.write_text(json.dumps({"devices": [{"name": "a"}]}))
    with pytest.raises(ValueError, match=r"devices\.0\.kind"):
        Cluster.load(path)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "find_accelerators", lambda: [torch.device("cuda:0")])
    properties = SimpleNamespace(total_memory=1000, name="made up")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_stages_may_use_what_is_left(one_gpu):
    assert Cluster.of(["cuda:0"]).devices[0].memory_bytes == 920
    (device,) = Cluster.of(["cuda:0"], headroom=0.25).devices
    assert (device.memory_bytes, device.headroom) == (750, 0.25)


def test_a_device_named_twice_shares_it(one_gpu):
    assert [device.memory_bytes for device in Cluster.of(["cuda:0"] * 2, headroom=0.5).devices] == [250, 250]


@pytest.mark.parametrize("headroom", [-0.1, 1.0])
def test_a_headroom_is_a_part(one_gpu, headroom):
    with pytest.raises(ValueError, match="headroom is a part of the memory"):
        Cluster.of(["cuda:0"], headroom=headroom)
