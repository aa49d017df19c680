"""The memory of a plan: what each stage holds, to the byte, and what fits."""

from contextlib import suppress
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import pipepart
from pipepart import Cluster, Device, InfeasiblePlanError, Plan, Profile
from pipepart.capture import SharedTensor
from tests.planning.problems import Layer, profile_of

SCHEDULES = ["1f1b", "gpipe", "sequential"]
pytestmark = pytest.mark.usefixtures("no_suggestions")


def limited(*sizes: int) -> Cluster:
    return Cluster(
        devices=tuple(
            Device(name=f"device:{index}", kind="made up", memory_bytes=size)
            for index, size in enumerate(sizes)
        )
    )


def test_micro_batches_in_flight_decide_what_fits():
    """A stash of 10 bytes a layer: 1F1B holds 2 and 1 of them, GPipe all 8, one after the other 1."""
    layers = [Layer(saved=10)] * 2
    profile = profile_of(layers, [8])
    need = {
        name: pipepart.plan(profile, limited(10**6, 10**6), schedule=name).predicted.memory_bytes
        for name in SCHEDULES
    }
    assert need == {"1f1b": (20, 10), "gpipe": (80, 80), "sequential": (10, 10)}
    assert pipepart.plan(profile, limited(79, 79), schedule="1f1b", recompute="never")
    with pytest.raises(InfeasiblePlanError, match="short by 1 byte "):
        pipepart.plan(profile, limited(79, 79), schedule="gpipe", recompute="never")


def test_a_measured_model_holds_its_parameters_gradients_and_states():
    """A layer used twice is held once."""
    twice = nn.Linear(16, 16)
    model = nn.Sequential(nn.Linear(16, 16), twice, nn.ReLU(), twice, nn.Linear(16, 16).requires_grad_(False))
    profile = pipepart.profile(model, torch.randn(8, 16), optimizer="adam", seconds=0)
    plan = pipepart.plan(profile, Cluster.virtual(2), schedule="1f1b", stages=2)
    size = (16 * 16 + 16) * 4
    assert sum(stage.static_bytes for stage in plan.stages) == 2 * 4 * size + size


def test_a_loss_of_the_whole_batch_counts_all_outputs_twice(tmp_path):
    """In parts and gathered, on the last stage: also in a plan that is read from a file, and in one made from it."""
    profile = profile_of([Layer(parameters=1, output=7, peak=3)] * 4, [4])
    plain = pipepart.plan(profile, Cluster.virtual(2), schedule="gpipe")
    plan = pipepart.plan(profile, Cluster.virtual(2), schedule="gpipe", reduction="batch")
    outputs = 4 * 2 * 7
    first, last = plain.stages
    assert first.workspace_bytes == plan.stages[0].workspace_bytes
    assert plan.stages[1].workspace_bytes == tuple(size + outputs for size in last.workspace_bytes)
    assert plan.refreshed() is plan
    plan.save(tmp_path / "plan.json")
    assert pipepart.Plan.load(tmp_path / "plan.json") == plan
    limits = limited(*plain.predicted.memory_bytes)
    with pytest.raises(InfeasiblePlanError):
        pipepart.plan(profile, limits, schedule="gpipe", stages=2, reduction="batch", recompute="never")


def test_a_loss_of_the_whole_batch_fits_the_memory_that_is_planned_for_it():
    """On strict devices, which count; what is planned for losses of micro-batches is not enough."""

    def network() -> nn.Sequential:
        return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 512))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean().sqrt()

    x, y = torch.randn(64, 16), torch.randn(64, 512)
    profile = pipepart.profile(network(), x, target=y, loss_fn=loss_fn, micro_batches=8, seconds=0.0)
    options: dict[str, Any] = {"schedule": "gpipe", "recompute": "never", "cut_before": ["2"]}

    def step(reduction: Literal["batch"] | None) -> None:
        plan = pipepart.plan(profile, Cluster.virtual(2), reduction=reduction, **options)
        cluster = Cluster.virtual(2, memory=max(plan.predicted.memory_bytes))
        plan = plan.model_copy(update={"cluster": cluster})
        with pipepart.Pipeline(network(), plan, loss_fn=loss_fn, reduction="batch", strict=True) as pipe:
            optimizer = torch.optim.Adam(pipe.parameters())
            for _ in range(2):
                pipe.step(x, target=y)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)

    step("batch")
    with pytest.raises(torch.OutOfMemoryError):
        step(None)


@pytest.mark.parametrize(("schedule", "waiting"), [("gpipe", 16), ("1f1b", 2)])
def test_messages_that_pile_up_before_a_slow_stage_count(schedule, waiting):
    profile = profile_of([Layer(output=4), Layer(forward=160.0, backward_input=160.0)], [16])
    plan = pipepart.plan(profile, limited(10**6, 10**6), schedule=schedule, stages=2)
    assert plan.device_bytes(plan.simulate())["device:1"] == waiting * 4
    assert plan.predicted.memory_bytes == (4, waiting * 4)
    # One of them is in use.
    assert [stage.waiting_messages for stage in plan.stages] == [int(schedule == "1f1b"), waiting - 1]
    told = "up to 15 messages wait for stage 1: senders do not wait, the memory has room"
    assert (told in str(plan)) == (schedule == "gpipe")
    if schedule == "gpipe":  # a plan that has no room for them does not fit
        short = plan.model_copy(update={"cluster": limited(4, waiting * 4 - 1)})
        assert not short.predict().fits


UNLIKE_COSTS = st.sampled_from([0.01, 0.1, 0.5, 1.0])
REQUESTS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "any schedule": {},
    "replicas": {"schedule": "1f1b", "replicas": 2},
    "several stages a device": {"schedule": "interleaved-1f1b"},
    "split backwards": {"schedule": "zb-v", "stages": 2 * 2},
    "asynchronous": {"schedule": "pipedream"},
    "recompute": {"schedule": "gpipe", "recompute": "always"},
    "offload": {"schedule": "gpipe", "offload": "stash"},
}


@st.composite
def unlike_chains(draw: st.DrawFn) -> list[Layer]:
    """Layers whose seconds differ by a factor of up to 100, so that messages wait before the slow ones."""
    return [
        Layer(
            forward=draw(UNLIKE_COSTS),
            backward_input=draw(UNLIKE_COSTS),
            backward_weight=draw(UNLIKE_COSTS),
            parameters=1,
            output=draw(st.integers(0, 50)),
            saved=draw(st.integers(0, 50)),
            peak=draw(st.integers(0, 50)),
        )
        for _ in range(draw(st.integers(4, 6)))
    ]


@pytest.mark.parametrize(
    "request_of",
    [pytest.param(one, marks=() if REQUESTS[one] else pytest.mark.slow) for one in REQUESTS],
)
@given(
    layers=unlike_chains(),
    latency=st.sampled_from([0.0, 0.05]),
    micro_batches=st.sampled_from([4, 8]),
)
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_a_plan_needs_at_least_the_memory_of_its_own_simulated_step(
    layers, latency, micro_batches, request_of
):
    free = Cluster.parse(
        ["1KB"] * (4 if request_of == "replicas" else 2), link="1KB/s", latency=latency, host_link="1KB/s"
    )
    options = REQUESTS[request_of]
    plan = pipepart.plan(profile_of(layers, [micro_batches]), free, **options)
    check_fits(plan)
    # Limits just below the need: what the planner then returns has room for its own step.
    tight = free.with_memory(max(max(plan.predicted.memory_bytes) - 1, 1))
    with suppress(InfeasiblePlanError):
        check_fits(pipepart.plan(profile_of(layers, [micro_batches]), tight, **options))


def check_fits(plan: Plan) -> None:
    """The plan fits, and so does its simulated step; with a byte less than that step needs, it does not."""
    step = plan.device_bytes(plan.simulate())
    predicted = {
        d.name: need for d, need in zip(plan.cluster.devices, plan.predicted.memory_bytes, strict=True)
    }
    assert all(need <= predicted[name] for name, need in step.items())
    assert plan.device_bytes() == {name: predicted[name] for name in step}
    assert plan.fits
    least = max(step.values())
    assert not plan.model_copy(update={"cluster": plan.cluster.with_memory(least - 1)}).predict().fits


def with_layers(profile: Profile, **updates: dict) -> Profile:
    """The profile with other fields of some layers, by their names."""
    layers = [info.model_copy(update=updates.get(info.name, {})) for info in profile.layers]
    return profile.model_copy(update={"layers": tuple(layers)})


def test_buffers_count():
    """A mask of 800 bytes: the stage that holds it needs them, and does not fit without."""
    profile = with_layers(profile_of([Layer(parameters=10)] * 2, [2]), layer1={"buffer_bytes": 800})
    plan = pipepart.plan(profile, Cluster.virtual(2), schedule="1f1b")
    assert [stage.static_bytes for stage in plan.stages] == [40, 840]
    assert [stage.parameter_bytes for stage in plan.stages] == [10, 10]
    assert plan.predicted.memory_bytes == (40, 840)
    with pytest.raises(InfeasiblePlanError, match="short by 1 byte "):
        pipepart.plan(profile, Cluster.virtual(2, memory=839), schedule="1f1b")


def test_a_later_stage_copies_each_shared_tensor_once():
    """Two layers of the second stage share one tensor of layer 0 and one of layer 1: 7 + 7 and 5 + 0 bytes."""
    weight = SharedTensor(layer="layer0", name="weight", bytes=7, gradient_bytes=7)
    table = SharedTensor(layer="layer1", name="table", bytes=5)
    profile = with_layers(
        profile_of([Layer(parameters=10)] * 4, [2]),
        layer2={"shared": (weight, table)},
        layer3={"shared": (weight,)},
    )
    options = {"schedule": "1f1b", "allow_split_ties": True}
    plan = pipepart.plan(profile, Cluster.virtual(2), cut_before=["layer2"], **options)
    assert [stage.static_bytes for stage in plan.stages] == [80, 80 + 14 + 5]
    three = pipepart.plan(profile, Cluster.virtual(3), cut_before=["layer1", "layer3"], **options)
    assert [stage.static_bytes for stage in three.stages] == [40, 80 + 14, 40 + 14]
    one = pipepart.plan(profile, Cluster.virtual(1), **options)
    assert one.stages[0].static_bytes == 160


LAYERS = [Layer(parameters=1000, output=1) for _ in range(4)]
FROZEN = [Layer(parameters=1000, output=1, trained=index > 1) for index in range(4)]


def static_bytes(layers: list[Layer], schedule: str) -> list[int]:
    plan = pipepart.plan(profile_of(layers, [8], optimizer="sgd"), Cluster.virtual(4), schedule=schedule)
    return [stage.static_bytes for stage in plan.stages]


@pytest.mark.parametrize(
    ("schedule", "versions"),
    [("1f1b", [1, 1, 1, 1]), ("pipedream", [4, 3, 2, 1]), ("pipedream-2bw", [2, 2, 2, 2])],
)
def test_a_stage_holds_as_many_versions_of_its_weights_as_the_papers_say(schedule, versions):
    assert static_bytes(LAYERS, schedule) == [count * 1000 + 1000 for count in versions]


def test_weights_that_are_not_trained_are_there_once():
    assert static_bytes(FROZEN, "pipedream") == [1000, 1000, 2 * 1000 + 1000, 1000 + 1000]


def test_copies_of_the_model_do_not_train_asynchronously():
    with pytest.raises(ValueError, match="replicas would have to agree on their weights"):
        pipepart.plan(profile_of(LAYERS, [8]), Cluster.virtual(4), schedule="pipedream", replicas=2)
