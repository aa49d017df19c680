"""The memory of a plan: what each stage holds, to the byte, and who is short by how much."""

from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import pipepart
import schedules
from pipepart import Cluster, Device, InfeasiblePlanError, Plan
from tests.planning.held import held_by, moments, peak
from tests.planning.problems import Layer, chains, clusters, profile_of
from tests.planning.ways import enlarged

SCHEDULES = ["1f1b", "gpipe", "sequential"]


def limited(*sizes: int) -> Cluster:
    return Cluster(
        devices=tuple(
            Device(name=f"device:{index}", kind="made up", memory_bytes=size)
            for index, size in enumerate(sizes)
        )
    )


@given(
    layers=chains(),
    cluster=clusters(limited=False),
    schedule=st.sampled_from(SCHEDULES),
    micro_batches=st.integers(1, 6),
)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_the_memory_of_each_stage_is_the_sum_of_what_it_holds(layers, cluster, schedule, micro_batches):
    assume(len(cluster) <= len(layers))
    profile = profile_of(layers, [micro_batches], input_bytes=7)
    plan = pipepart.plan(profile, cluster, schedule=schedule)
    built = plan.build_schedule()
    in_flight = schedules.in_flight(built)
    step = plan.simulate()
    start, held = 0, {device.name: 0 for device in cluster.devices}
    for index, (stage, count) in enumerate(zip(plan.stages, in_flight, strict=True)):
        end = start + len(stage.layers)
        assert stage.in_flight == count
        own = held_by(layers, start, end, input_bytes=7)
        both = [moments(built, built.device_of[index], times) for times in (step, None)]
        assert stage.memory_bytes == max(peak(each, {index: own}, {}) for each in both)
        held[stage.device] = stage.memory_bytes
        start = end
    assert list(plan.predicted.memory_bytes) == list(held.values())


SHORT = {
    "layers": chains(sharing=True),
    "cluster": clusters(),
    "schedule": st.sampled_from([*SCHEDULES, "auto"]),
    "micro_batches": st.sampled_from([[1], [4], [1, 2, 4]]),
}


@given(**SHORT)
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_exactly_the_bytes_that_are_short_make_it_fit(layers, cluster, schedule, micro_batches):
    check_shortage(layers, cluster, schedule, micro_batches)


@pytest.mark.slow
@given(**SHORT)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_bytes_that_are_short_in_many_chains(layers, cluster, schedule, micro_batches):
    check_shortage(layers, cluster, schedule, micro_batches)


def check_shortage(layers, cluster, schedule, micro_batches) -> None:
    """With ``deficit_bytes`` more on every device there is a plan; with one byte less none, or one that fits."""
    assume(len(cluster) <= len(layers))
    profile = profile_of(layers, micro_batches)
    try:
        plan = pipepart.plan(profile, cluster, schedule=schedule)
    except InfeasiblePlanError as error:
        short = error.deficit_bytes
    else:
        for stage in plan.stages:
            limit = cluster.device(stage.device).memory_bytes
            assert limit is None or stage.memory_bytes <= limit
        return
    assert short > 0
    pipepart.plan(profile, enlarged(cluster, short), schedule=schedule)
    try:
        plan = pipepart.plan(profile, enlarged(cluster, short - 1), schedule=schedule)
    except InfeasiblePlanError as error:
        still_short = error.deficit_bytes
    else:
        still_short = 1 - plan.fits
    assert still_short in (0, 1)


def test_the_error_names_stage_layers_device_and_numbers():
    layers = [Layer(parameters=10), Layer(parameters=100), Layer(parameters=10)]
    with pytest.raises(InfeasiblePlanError) as caught:
        pipepart.plan(profile_of(layers), limited(100, 300, 100), schedule="1f1b", stages=3)
    error = caught.value
    assert (error.stage, error.deficit_bytes) == (1, 100)
    for words in (
        "3 stages",
        "4 micro-batches",
        "'1f1b'",
        "stage 1",
        "layer1",
        "device:1",
        "short by 100 bytes",
        "400",
        "300",
    ):
        assert words in str(error)
    plan = pipepart.plan(profile_of(layers), limited(100, 400, 100), schedule="1f1b", stages=3)
    assert plan.predicted.memory_bytes == (40, 400, 40)


def test_a_byte_decides():
    """Four copies of the parameters (weights, gradients, two states of Adam) at a byte each."""
    layers = [Layer(parameters=25)] * 4
    pipepart.plan(profile_of(layers), limited(200, 200))
    with pytest.raises(InfeasiblePlanError, match="short by 1 byte "):
        pipepart.plan(profile_of(layers), limited(200, 199))


def test_tight_memory_moves_the_cut_away_from_balance():
    layers = [Layer(parameters=25)] * 6
    cluster = limited(200, 1000)
    plan = pipepart.plan(profile_of(layers), cluster, schedule="1f1b")
    assert {stage.device: len(stage.layers) for stage in plan.stages} == {
        cluster.devices[0].name: 2,
        cluster.devices[1].name: 4,
    }


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


def test_fewer_stages_where_only_fewer_fit():
    layers = [Layer(parameters=10), Layer(parameters=10), Layer(parameters=10)]
    plan = pipepart.plan(profile_of(layers), limited(120, 1, 1))
    assert [stage.device for stage in plan.stages] == ["device:0"]
    assert plan.predicted.memory_bytes == (120, 0, 0)


def test_a_device_without_limit_is_never_short():
    layers = [Layer(parameters=1000), Layer(parameters=1)]
    devices = (Device(name="a", kind="x"), Device(name="b", kind="x", memory_bytes=3))
    with pytest.raises(InfeasiblePlanError) as caught:
        pipepart.plan(profile_of(layers), Cluster(devices=devices), schedule="1f1b", stages=2)
    assert (caught.value.stage, caught.value.deficit_bytes) == (1, 1)


def test_sharing_does_not_hide_what_is_short():
    layers = [Layer(parameters=10), Layer(), Layer(shares_with=(0,))]
    with pytest.raises(InfeasiblePlanError, match="short by 10 bytes") as caught:
        pipepart.plan(profile_of(layers), limited(30, 30))
    assert caught.value.deficit_bytes == 10


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_a_measured_model_holds_its_parameters_gradients_and_states(optimizer):
    """A layer used twice is held once."""
    twice = nn.Linear(16, 16)
    model = nn.Sequential(nn.Linear(16, 16), twice, nn.ReLU(), twice, nn.Linear(16, 16).requires_grad_(False))
    profile = pipepart.profile(model, torch.randn(8, 16), optimizer=optimizer, seconds=0.01)
    plan = pipepart.plan(profile, Cluster.virtual(2), stages=2)
    size = (16 * 16 + 16) * 4
    copies = {"sgd": 2, "momentum": 3, "adam": 4}[optimizer]
    assert sum(stage.static_bytes for stage in plan.stages) == 2 * copies * size + size


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_measured_plan_promises_no_more_than_its_devices_hold(schedule):
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())))
    profile = pipepart.profile(model, torch.randn(64, 16), micro_batches=8, seconds=0.01)
    free = pipepart.plan(profile, Cluster.virtual(3), schedule=schedule)
    largest = max(free.predicted.memory_bytes)
    tight = pipepart.plan(profile, Cluster.virtual(3, memory=largest), schedule=schedule)
    assert max(tight.predicted.memory_bytes) <= largest
    assert sum(len(stage.layers) for stage in tight.stages) == 8


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
    with pytest.raises(InfeasiblePlanError):
        pipepart.plan(profile, limited(*plain.predicted.memory_bytes), reduction="batch", recompute="never")


@pytest.mark.parametrize(
    "loss_fn", [nn.MSELoss(), lambda output, target: (output - target).square().mean().sqrt()]
)
def test_a_loss_of_the_whole_batch_fits_the_memory_that_is_planned_for_it(loss_fn):
    """On strict devices, which count; what is planned for losses of micro-batches is not enough."""

    def network() -> nn.Sequential:
        return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 512))

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


@pytest.mark.parametrize("request_of", REQUESTS)
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
    try:
        check_fits(pipepart.plan(profile_of(layers, [micro_batches]), tight, **options))
    except InfeasiblePlanError as error:
        for suggestion in error.suggestions:
            check_fits(suggestion.plan)


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
