"""The headroom of accelerators: the part of their memory that no plan uses."""

from types import SimpleNamespace

import pytest
import torch

from pipepart import Cluster
from pipepart.cluster import real_devices


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_devices, "find_accelerators", lambda: [torch.device("cuda:0")])
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
