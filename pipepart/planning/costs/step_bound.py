"""Computes a lower bound of the step time for any cut, placement of stages and order of actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from schedules.searching.bounds import Trip, end_of_work, shared_work_bound

from ...cluster import Cluster, Device
from ...profiling import Costs, Overhead, Profile
from ..overhead import most_on_a_host, with_overhead
from ..partition.tensor_groups import tensor_groups

_ROUNDING = 1e-12  # the step of one device is the same sum as its bound, in another order


def bound_on_cluster(
    profile: Profile, cluster: Cluster, micro_batches: int, copies: int, tensor: int = 1
) -> float:
    """Return a lower bound in seconds of a step of any plan on a cluster, with what the runtime adds.

    Layers are faster beside fewer devices, so the bound is the smallest of those for each number of devices that
    compute at once.

    Args:
        profile: the layers, as measured one device at a time.
        cluster: the devices.
        micro_batches: their number.
        copies: of the model, which share the micro-batches.
        tensor: number of consecutive devices that share a stage.
    """
    action = min(device.action_seconds for device in cluster.devices)
    bounds: list[float] = []
    groups = tensor_groups(cluster, tensor).devices
    for computing in range(max(most_on_a_host(groups), 1), 0, -1):
        costs = with_overhead(profile, cluster, computing * tensor)[0].at(micro_batches)
        speeds = [device.speed for device in _fastest_on_each_host(groups, computing)]
        if bounds and (profile.overhead == Overhead() or len(speeds) < copies):
            break
        bounds.append(step_bound(costs, speeds, copies, action))
    return (min(bounds) + cluster.step_seconds) * (1 - _ROUNDING)


def step_bound(
    costs: Costs,
    speeds: Sequence[float],
    replicas: int = 1,
    action_seconds: float = 0.0,
) -> float:
    """Return a lower bound in seconds of a step of these layers on these devices.

    It holds for any cut, any placement of stages on devices, and any order of actions, with full or split backwards.
    Transfers, recomputes and sums of gradients over replicas take no time in it, and memory has no limit. It is the
    larger of two bounds:

    - *All devices together.* A device idles until the forward of the first micro-batch reaches one of its layers. The
      devices of a replica have different layers, so the first may begin at once, the second after one layer, the third
      after two. In the rest of the step they do the work of all micro-batches.
    - *One layer.* The device of a layer runs it for every micro-batch of its replica. It waits for the layers before,
      and for the first gradient if it runs out of forwards; after its last backward the layers before it run theirs.

    If micro-batches have unequal sizes, those that devices wait for count as the smallest.

    Args:
        costs: the costs of the layers for one micro-batch, in an order in which they can run.
        speeds: the speeds of the devices. The bound also holds for plans that leave some out.
        replicas: the number of replicas of the model, which share the micro-batches.
        action_seconds: the shortest overhead of an action on any device.
    """
    layers, loss = costs.layers, costs.loss
    share = _shortest_split(costs)
    forward = [layer.forward.seconds for layer in layers]
    inputs = [layer.backward_input.seconds for layer in layers]
    weights = [layer.backward_weight.seconds * share for layer in layers]
    forward[-1] += loss.forward.seconds
    inputs[-1] += loss.backward_seconds
    inputs = [seconds * share for seconds in inputs]
    smallest = min(costs.scale, default=1.0)
    trip = Trip(*([seconds * smallest for seconds in part] for part in (forward, inputs, weights)))
    backward = sum(layer.backward_seconds + min(layer.split_seconds or 0.0, 0.0) for layer in layers)
    together = shared_work_bound(
        costs.micro_batches
        * (sum(layer.forward.seconds for layer in layers) + max(backward, 0.0) + loss.seconds),
        [head for head in sorted(trip.head) for _ in range(replicas)],
        sorted(speeds, reverse=True),
        costs.micro_batches // replicas,
        action_seconds,
    )
    m, action = -(-costs.micro_batches // replicas), action_seconds * max(speeds)
    of_layers = (
        end_of_work(
            head=trip.head[at],
            work=m * (forward[at] + inputs[at] + weights[at] + 2 * action),
            turn=trip.turn[at] + action,
            forwards=m * (forward[at] + action),
            tail=trip.tail[at],
            weights=m * weights[at],
        )
        for at in range(len(forward))
    )
    return max(together, max(of_layers) / max(speeds))


def _shortest_split(costs: Costs) -> float:
    """Return a lower bound of the time of a split backward, as a share of the full backward, for any stage."""
    if any(layer.split_seconds is None for layer in costs.layers):
        return 1.0
    parts = [
        1 + (layer.split_seconds or 0.0) / layer.backward_seconds
        for layer in costs.layers
        if layer.backward_seconds
    ]
    if any((layer.split_seconds or 0.0) < 0 for layer in costs.layers if not layer.backward_seconds):
        return 0.0
    return min(1.0, max(0.0, min(parts, default=1.0)))


def _fastest_on_each_host(devices: Iterable[Device], most: int) -> list[Device]:
    """Return the devices without the slowest CPU devices of this machine: at most this many stay on each host."""
    left, remaining = Counter[str](), []
    for device in sorted(devices, key=lambda device: -device.speed):
        left[device.host] += device.torch_device == "cpu"
        if device.torch_device != "cpu" or left[device.host] <= most:
            remaining.append(device)
    return remaining
