"""A process makes streams on the devices of its own workers only: a foreign device may not exist on its host."""

import torch

from pipepart.runtime.transport.cuda import Streams

CPU, FOREIGN = torch.device("cpu"), torch.device("cuda:63")


def test_no_stream_is_made_on_the_device_of_another_rank():
    assert Streams.of([CPU, FOREIGN], [0]) is None


def test_a_worker_is_alone_on_its_device_if_other_ranks_have_one_of_the_same_name(late_devices: None):
    home = torch.device("vdev:0")
    streams = Streams.of([home, home, FOREIGN], [1])
    assert streams is not None
    caller = streams.callers()
    assert list(caller) == [home]
    streams.begin(caller)
    with streams.entered(1):
        assert torch.accelerator.current_stream(home) == caller[home]
    streams.end(caller)
