"""Requests that cannot be planned, each refused with its values; what needs no profile, before a model is profiled."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import pipepart
from pipepart import Cluster
from tests.planning.problems import Layer, profile_of

PROFILE = profile_of([Layer(forward=1, backward_input=1, backward_weight=1)] * 8)
ASYNCHRONOUS = "several versions or copies of the weights"

# Devices, keywords of `plan` and of `Pipeline.auto`, and a part of the message.
KEYWORDS: list[tuple[int, dict[str, Any], str]] = [
    (2, {"schedule": "zigzag"}, "'zigzag': choose one of 1f1b, gpipe, eager-1f1b"),
    (2, {"micro_batches": 0}, "micro_batches must be 'auto' or a whole number of at least 1, got 0"),
    (2, {"micro_batches": "some"}, "got 'some'"),
    (2, {"recompute": "offload"}, "recompute must be one of 'auto', 'never', 'except-last', 'always'"),
    (2, {"offload": "state"}, "offload must be one of 'auto', 'never', 'stash', got 'state'"),
    (2, {"offload": "stash", "recompute": "always"}, "choose one of the two"),
    (2, {"offload": "stash", "schedule": "pipedream"}, "asynchronous"),
    (2, {"replicas": 3}, "replicas must be between 1 and the number of devices, 2"),
    (2, {"replicas": 1.5}, "replicas must be between 1 and the number of devices, 2"),
    (2, {"reduction": "batch", "replicas": 2}, "it needs replicas=1"),
    (2, {"reduction": "batch", "schedule": "1f1b"}, "runs all forwards first"),
    (2, {"compress": "fp8"}, "must be None, 'bf16' or 'int8', or one of these for .*; got 'fp8'"),
    (2, {"compress": {"links": "int8"}}, "got {'links': 'int8'}"),
    (2, {"compress": {"link": None}}, "compress must be None"),
    (2, {"compress": {"network": "int8"}}, "all devices of the cluster are in one: write compress={'link': 'int8'}"),
    (8, {"tensor": 3}, "groups of 3 devices, and the cluster has 8"),
    (8, {"tensor": 0}, "tensor must be a whole number of at least 1, got 0"),
    (8, {"tensor": True}, "tensor must be a whole number of at least 1, got True"),
    (8, {"tensor": 4, "replicas": 3}, "between 1 and the number of devices, 2"),
    (8, {"tensor": 2, "schedule": "pipedream"}, ASYNCHRONOUS),
    (8, {"tensor": 2, "schedule": "chimera"}, ASYNCHRONOUS),
    (8, {"shard": True}, "needs replicas='auto' or at least 2"),
    (8, {"tensor": 8, "replicas": "auto", "shard": True}, "1 device of 8 processes"),
    (8, {"shard": True, "replicas": 2, "offload": "stash"}, "offload='stash' cannot be combined"),
]  # fmt: skip


@pytest.mark.parametrize(("devices", "keywords", "message"), KEYWORDS, ids=str)
def test_keywords_are_refused_by_plan_and_before_anything_is_profiled(devices, keywords, message):
    with pytest.raises(ValueError, match=message):
        pipepart.plan(PROFILE, Cluster.virtual(devices), **keywords)
    with pytest.raises(ValueError, match=message):
        pipepart.Pipeline.auto(nn.Linear(1, 1), "no tensor", devices=devices, **keywords)


UNLIKE = Cluster.parse(["1GiB", "1GiB@0.5", "1GiB@0.5", "1GiB"])
TWO, FOUR = Cluster.virtual(2), Cluster.virtual(4)
OF_TWO_PROCESSES = PROFILE.model_copy(update={"tensor": 2})

# Arguments of `plan`, and a part of the message.
REQUESTS: list[tuple[Any, Any, dict[str, Any], str]] = [
    (PROFILE, TWO, {"micro_batches": 3}, r"measured for \[4\] micro-batches, not for 3"),
    (PROFILE, TWO, {"stages": 9}, "between 1 and 8 .* got 9"),
    (PROFILE, TWO, {"stages": 3, "schedule": "1f1b"}, "between 1 and 2 .* got 3"),
    (PROFILE, TWO, {"stages": True}, "got True"),
    (PROFILE, TWO, {"schedule": "zb-v", "chunks": 3}, "zb-v needs chunks=2, got chunks=3"),
    (PROFILE, TWO, {"schedule": "chimera", "chunks": 2}, "'chimera' has one stage a device, got chunks=2"),
    (PROFILE, TWO, {"cut_before": ["layer2"], "stages": 3}, "is the whole cut and makes 2 stages, got stages=3"),
    (PROFILE, Cluster.virtual(1), {"schedule": "chimera"}, "needs an even number of devices, got 1; 2 would do"),
    (profile_of([Layer()], [1]), TWO, {"replicas": 2}, "1 micro-batch cannot be shared by 2 replicas"),
    (PROFILE, FOUR, {"schedule": "pipedream", "replicas": 2}, "replicas would have to agree on their weights"),
    (PROFILE, UNLIKE, {"offload": "stash"}, r"between 'device:0' and its host.*host_link='25GB/s'"),
    (PROFILE, UNLIKE, {"tensor": 2}, r"'device:0' .* speed 1, 'device:1' .* speed 0\.5\. List devices"),
    (OF_TWO_PROCESSES, FOUR, {"tensor": 4}, "one of 2 processes has .*: plan with tensor=2, got tensor=4"),
    (OF_TWO_PROCESSES, FOUR, {}, "plan with tensor=2, got tensor=1"),
    ([], FOUR, {"tensor": "auto"}, "chooses from several profiles, got none"),
]  # fmt: skip


@pytest.mark.parametrize(("profile", "cluster", "keywords", "message"), REQUESTS, ids=lambda _: "")
def test_a_request_is_refused_with_its_values(profile, cluster, keywords, message):
    with pytest.raises(ValueError, match=message):
        pipepart.plan(profile, cluster, **keywords)


def test_arguments_of_other_types_are_named():
    with pytest.raises(TypeError, match=r"plan needs a Profile, as pipepart.profile returns it, got None"):
        pipepart.plan(None, TWO)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"a Cluster, got 2: write for example pipepart.Cluster.virtual"):
        pipepart.plan(PROFILE, 2)  # pyright: ignore[reportArgumentType]


def test_weights_of_several_versions_need_an_optimizer_a_stage():
    with pytest.raises(ValueError, match="'pipedream' is asynchronous and wants an optimizer a stage"):
        pipepart.Pipeline.auto(nn.Linear(1, 1), "no tensor", devices=2, schedule="pipedream")
