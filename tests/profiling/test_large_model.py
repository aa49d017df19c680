"""A model of seven billion parameters is captured, profiled and planned within little time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.usefixtures("short_profiles")

pytest.importorskip("transformers")

SCRIPT = textwrap.dedent(
    """
    import json, resource, time

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import pipepart

    torch.set_num_threads(1)
    with torch.device("meta"):
        config = LlamaConfig(
            hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=11008,
            vocab_size=32000, use_cache=False,
        )
        model = LlamaForCausalLM(config).bfloat16()
    ids = torch.randint(32000, (8, 2048))
    start = time.process_time()
    profile = pipepart.profile(
        model, dict(input_ids=ids, labels=ids), micro_batches=8, measure=False, optimizer="adam",
        roofline=pipepart.Roofline.parse("cuda: 150 TFLOP/s, 1.5 TB/s, 5 us"),
    )
    cluster = pipepart.Cluster.parse(["24GiB"] * 4, link="12GB/s")
    plan = pipepart.plan(profile, cluster)
    try:
        pipepart.plan(profile, pipepart.Cluster.parse(["12GiB"] * 4, link="12GB/s"))
        fits = []
    except pipepart.InfeasiblePlanError as error:
        fits = [(len(one.plan.cluster), max(one.plan.prediction.memory_bytes)) for one in error.suggestions]
    print(json.dumps({
        "seconds": time.process_time() - start,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "parameters": sum(layer.parameter_bytes for layer in profile.layers),
        "optimizer": sum(profile.optimizer_bytes(layer) for layer in profile.layers),
        "stages": [stage.model_dump() for stage in plan.stages],
        "devices": [device.name for device in cluster.devices],
        "memory": plan.prediction.memory_bytes,
        "fits": fits,
    }))
    """
)

# By hand: of each block four projections, three matrices of the feed-forward, two norms; two embeddings, one norm.
BLOCK = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
PARAMETERS = 32 * BLOCK + 2 * 32000 * 4096 + 4096
BYTES = 2  # bfloat16


@pytest.mark.slow
def test_a_llama_of_seven_billion_parameters_is_planned_on_four_devices() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["seconds"] < 30
    assert found["host_bytes"] < 2 * 2**30
    assert found["parameters"] == BYTES * PARAMETERS
    assert found["optimizer"] == 2 * BYTES * PARAMETERS
    states = dict.fromkeys(found["devices"], 0.0)
    for stage in found["stages"]:
        blocks = sum(".layers." in name for name in stage["layers"])
        embeddings = sum("embed" in name or "head" in name for name in stage["layers"])
        state = 4 * BYTES * (blocks * BLOCK + embeddings * 32000 * 4096)  # weights, gradients, two moments
        assert stage["static_bytes"] - stage["buffer_bytes"] == pytest.approx(state, rel=0.02)
        states[stage["device"]] += state
    for state, memory in zip(states.values(), found["memory"], strict=True):
        assert state < memory <= 24 * 2**30
    # Weights, gradients and moments alone are 50 GiB: more than four devices of 12 GiB have.
    assert found["fits"]
    assert all(devices > 4 and most <= 12 * 2**30 for devices, most in found["fits"])
