"""Two hosts with a slow network between them: two network namespaces of this machine, joined by a shaped link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
from torch import nn

import pipepart
from pipepart import Cluster, Pipeline
from pipepart.ranks import under_torchrun

HOSTS = ("pipepart-a", "pipepart-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
SCRIPT = "tests.distributed.test_two_hosts"
ROOT = Path(__file__).parents[2]
WIDTH, SAMPLES, PARTS, STEPS = 8192, 1024, 8, 6


def model() -> nn.Sequential:
    """Layers that make large messages of little work."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 16))


def main() -> None:
    """Train on one process, or on those of torchrun on each host; print losses, parameters and the bandwidth."""
    torch.set_num_threads(1)
    torch.manual_seed(2)
    x, y = torch.randn(SAMPLES, 16), torch.randn(SAMPLES, 16)
    loss_fn = nn.MSELoss()
    cluster = Cluster.of_ranks() if under_torchrun() else Cluster.virtual(2)
    texts = [""]
    if os.environ.get("RANK", "0") == "0":
        profile = pipepart.profile(model(), x, target=y, loss_fn=loss_fn, micro_batches=PARTS, seconds=2.0)
        # One direction at a time: where both are busy, acknowledgements of one wait behind messages of the other.
        plan = pipepart.plan(profile, cluster, schedule="gpipe", cut_before=["2"], recompute="never")
        texts = [plan.model_dump_json()]
    if under_torchrun():
        torch.distributed.broadcast_object_list(texts)
    plan = pipepart.Plan.model_validate_json(texts[0])
    with Pipeline(model(), plan, loss_fn) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            losses.append(float(pipe.step(x, target=y)))
            optimizer.step()
        state = pipe.full_state_dict()
    said = {
        "losses": losses,
        "sums": {name: float(value.double().sum()) for name, value in state.items()},
        "bandwidth": plan.cluster.link.bandwidth,
    }
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(json.dumps(said) + "\n")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)


def shape(*command: str) -> None:
    """Give a link 1 Gbit/s, and 0.2 ms of delay where the kernel can."""
    try:
        run(*command, "netem", "delay", "200us", "rate", "1gbit")
    except subprocess.CalledProcessError:
        run(*command, "tbf", "rate", "1gbit", "burst", "256kb", "latency", "200ms")


def remove() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "delete", host], capture_output=True, timeout=60)


@pytest.fixture
def two_hosts() -> Iterator[None]:
    """Joined by 1 Gbit/s in each direction."""
    if which("ip") is None or which("tc") is None:
        pytest.skip("there is no iproute2 here")
    remove()
    try:
        for host in HOSTS:
            run("ip", "netns", "add", host)
        run("ip", "link", "add", "ppa", "netns", HOSTS[0], "type", "veth", "peer", "ppb", "netns", HOSTS[1])
        for host, link, address in zip(HOSTS, ("ppa", "ppb"), ADDRESSES, strict=True):
            inside = ("ip", "netns", "exec", host)
            run(*inside, "ip", "address", "add", f"{address}/24", "dev", link)
            run(*inside, "ip", "link", "set", link, "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            shape(*inside, "tc", "qdisc", "add", "dev", link, "root")
    except subprocess.CalledProcessError as error:
        remove()
        pytest.skip(f"this machine forbids network namespaces: {error.stderr.strip()}")
    yield
    remove()


def start(host: int) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", HOSTS[host], sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", "1"]
    command += ["--master-addr", ADDRESSES[0], "--master-port", "29617", "-m", SCRIPT]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": ("ppa", "ppb")[host], "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def finished(*processes: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for the ends, and return what the first has said."""
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return json.loads(outputs[0][0].strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hosts_train_as_one_process_and_know_the_link_between_them(two_hosts):
    found = finished(start(0), start(1))
    command, pipe = [sys.executable, "-m", SCRIPT], subprocess.PIPE
    alone = finished(subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True))
    assert found["losses"] == alone["losses"]
    assert found["sums"] == alone["sums"]
    assert found["bandwidth"] < 1.15e9 / 8  # what is measured on a busy machine is less


if __name__ == "__main__":
    main()
