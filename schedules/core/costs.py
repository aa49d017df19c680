"""The costs of stages and links: seconds and bytes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from .action import ScheduleError
from .schedule import Schedule

Link = float | Sequence[Sequence[float]] | Mapping[tuple[int, int], float]
Ports = Mapping[tuple[int, int], Sequence[tuple[Hashable, float]]]
# Not one number a stage.
_SHARED = ("latency", "bandwidth", "ports", "skips", "micro_batch_scale")


@dataclass(frozen=True)
class StageCosts:
    """Seconds and bytes of every stage, and of the links between the devices.

    Sequences have one number per stage; an empty one means zeros unless said otherwise. A full backward passes its
    gradient on when it ends.

    Args:
        forward: seconds of a forward.
        backward_input: seconds of a backward for the inputs.
        backward_weight: seconds of a backward for the weights.
        latency: seconds from device to device: one number, a matrix [from][to], or {(from, to): seconds} of the pairs
            that send to each other.
        bandwidth: bytes per second from device to device, in the same forms.
        ports: {(from, to): [(port, bytes per second), ...]}: what messages from a device to another share with those
            of other devices, as the network card of a host. It matters under contention only, where a port carries
            one message at a time. The same name is the same port.
        message_bytes: size of a stage's output, as sent to the next stage; its gradient is as large.
        stash_bytes: what one micro-batch in flight keeps on a stage from its forward on.
        weight_stash_bytes: what is kept between I and W; it may be more than the stash. Left out, it is the stash: then
            only W, or a full backward, releases memory.
        boundary_bytes: what a micro-batch that is recomputed keeps until its RECOMPUTE, and one that is offloaded
            between its OFFLOAD and its RELOAD.
        recompute: seconds of a RECOMPUTE; left out, those of the forward.
        host_copy: seconds that the copy of a micro-batch's stash to the host takes beside the computation, and the
            copy back. Each device makes one copy at a time.
        offload: seconds for which an OFFLOAD, and a RELOAD, keeps the device itself from computing.
        reduce_grad: seconds of a REDUCE_GRAD.
        optimizer_step: seconds of an OPT_STEP.
        skips: (source, target, bytes) of messages past stages: from a stage to one behind the next, beside its output.
            Their gradients are as large. Stages are those of one copy of the model.
        backward: seconds of a full backward; left out, backward_input + backward_weight.
        micro_batch_scale: one number a micro-batch, which multiplies the seconds of its forwards and backwards; left
            out, all take equal times.

    Raises:
        ScheduleError: two sequences differ in length, or a number is negative, not a number or infinite (only
            bandwidth may be infinite).
    """

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    latency: Link = 0.0
    bandwidth: Link = float("inf")
    ports: Ports = field(default_factory=dict)
    message_bytes: Sequence[float] = ()
    stash_bytes: Sequence[float] = ()
    weight_stash_bytes: Sequence[float] = ()
    boundary_bytes: Sequence[float] = ()
    recompute: Sequence[float] = ()
    host_copy: Sequence[float] = ()
    offload: Sequence[float] = ()
    reduce_grad: Sequence[float] = ()
    optimizer_step: Sequence[float] = ()
    backward: Sequence[float] = ()
    skips: Sequence[tuple[int, int, float]] = ()
    micro_batch_scale: Sequence[float] = ()

    def __post_init__(self) -> None:
        """Fill in what was left out, make every sequence a tuple of floats, and check the numbers."""
        stages = len(self.forward)
        zeros = (0.0,) * stages
        parts = tuple(map(sum, zip(self.backward_input, self.backward_weight, strict=False)))
        left_out = {
            "weight_stash_bytes": self.stash_bytes,
            "recompute": self.forward,
            "backward": parts if len(parts) == stages else (),
        }
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in _SHARED:
                continue
            entries = value if len(value) else left_out.get(entry.name, ())
            numbers = tuple(map(float, entries)) or zeros
            _check_numbers(entry.name, numbers, stages)
            object.__setattr__(self, entry.name, numbers)
        for source, target, size in self.skips:
            if not (0 <= source < target - 1 < stages - 1 and 0 <= size < float("inf")):
                raise ScheduleError(
                    f"skips has {(source, target, size)}: a message goes past a stage at least, to one of the {stages}"
                )
        for micro_batch, number in enumerate(self.micro_batch_scale):
            if not 0 <= number < float("inf"):
                raise ScheduleError(
                    f"micro_batch_scale of micro-batch {micro_batch} is {number}; it is finite and not negative"
                )
        for source, target, seconds in _link_numbers("latency", self.latency):
            if not 0 <= seconds < float("inf"):
                raise ScheduleError(
                    f"latency{_of_link(source, target)} is {seconds}; seconds are finite and not negative"
                )
        for source, target, speed in _link_numbers("bandwidth", self.bandwidth):
            if not speed > 0:
                raise ScheduleError(
                    f"bandwidth{_of_link(source, target)} is {speed}; bytes per second are more than 0"
                )
        _check_ports(self.ports)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    @property
    def stage_seconds(self) -> tuple[float, ...]:
        """Seconds of F, I and W together, for one micro-batch on each stage."""
        return tuple(map(sum, zip(self.forward, self.backward_input, self.backward_weight, strict=True)))

    @property
    def cheapest(self) -> StageCosts:
        """Costs for lower bounds: I and W are scaled down so that they never take longer than a full backward."""
        parts = list(map(sum, zip(self.backward_input, self.backward_weight, strict=True)))
        pairs = list(zip(self.backward, parts, strict=True))
        if all(whole >= split for whole, split in pairs):
            return self
        factors = [min(whole / split, 1.0) if split else 1.0 for whole, split in pairs]
        return replace(
            self,
            backward_input=[s * by for s, by in zip(self.backward_input, factors, strict=True)],
            backward_weight=[s * by for s, by in zip(self.backward_weight, factors, strict=True)],
        )

    def for_schedule(self, schedule: Schedule) -> StageCosts:
        """Return the costs of every stage of a schedule. Costs of one copy of the model are repeated for each copy.

        Raises ScheduleError if the costs are for another number of stages.
        """
        if self.stages == schedule.stages:
            return self
        if self.stages != schedule.model_stages:
            raise ScheduleError(
                f"the costs are for {self.stages} stages, {schedule.name} has {schedule.model_stages}"
            )
        per_stage = {
            field.name: getattr(self, field.name) * schedule.replicas
            for field in fields(self)
            if field.name not in _SHARED
        }
        return replace(self, **per_stage)

    def latency_between(self, source: int, target: int) -> float:
        """Return the latency of a message in seconds; zero within a device."""
        return 0.0 if source == target else _link(self.latency, source, target)

    def occupancy_between(self, source: int, target: int, message_bytes: float) -> float:
        """Return the seconds for which a message occupies the link; zero within a device."""
        return 0.0 if source == target else message_bytes / _link(self.bandwidth, source, target)


def _check_numbers(name: str, numbers: tuple[float, ...], stages: int) -> None:
    if len(numbers) != stages:
        raise ScheduleError(f"{name} has {len(numbers)} numbers for {stages} stages; give one a stage")
    for stage, number in enumerate(numbers):
        if not 0 <= number < float("inf"):
            raise ScheduleError(f"{name} of stage {stage} is {number}; costs are finite and not negative")


def _check_ports(ports: Ports) -> None:
    for (source, target), route in ports.items():
        for port, speed in route:
            if not speed > 0:
                raise ScheduleError(
                    f"port {port!r}{_of_link(source, target)} carries {speed}; bytes per second are more than 0"
                )


def _link_numbers(name: str, link: Link) -> Iterator[tuple[int, int, float]]:
    """Yield source, target and number of each link; (-1, -1, number) where one number is for all of them."""
    if isinstance(link, int | float):
        yield -1, -1, link
        return
    if isinstance(link, Mapping):
        yield from ((*pair, number) for pair, number in link.items())
        return
    for source, row in enumerate(link):
        if len(row) != len(link):
            raise ScheduleError(
                f"{name} must be a number or a square matrix; row {source} has {len(row)} of {len(link)}"
            )
        for target, number in enumerate(row):
            if source != target:  # nothing is sent within a device
                yield source, target, number


def _of_link(source: int, target: int) -> str:
    return "" if source < 0 else f" from device {source} to device {target}"


def _link(link: Link, source: int, target: int) -> float:
    if isinstance(link, int | float):
        return float(link)
    if not isinstance(link, Mapping):
        return float(link[source][target])
    if (source, target) not in link:
        raise ScheduleError(
            f"device {source} sends to device {target}, and the costs have no link between them"
        )
    return float(link[source, target])
