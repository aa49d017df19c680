"""A model of seven billion parameters is captured, profiled and planned within little time and memory."""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import pytest
import torch

import pipepart

# By hand: of each block four projections, three matrices of the feed-forward, two norms; two embeddings, one norm.
BLOCK = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
EMBEDDING = 32000 * 4096
BYTES = 2  # bfloat16


def main() -> None:
    """Plan the model in this process, of which the time and the memory are those of the plan."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    with torch.device("meta"):
        sizes = {"hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000, "use_cache": False}
        config = LlamaConfig(num_hidden_layers=32, num_attention_heads=32, **sizes)
        model = LlamaForCausalLM(config).bfloat16()
    ids = torch.randint(32000, (8, 2048))
    sample = {"input_ids": ids, "labels": ids}
    start = time.process_time()
    roofline = pipepart.Roofline.parse("cuda: 150 TFLOP/s, 1.5 TB/s, 5 us")
    profile = pipepart.profile(
        model, sample, micro_batches=8, measure=False, optimizer="adam", roofline=roofline
    )
    plan = pipepart.plan(profile, pipepart.Cluster.parse(["24GiB"] * 4, link="12GB/s"))
    with pytest.raises(pipepart.InfeasiblePlanError) as caught:
        pipepart.plan(profile, pipepart.Cluster.parse(["12GiB"] * 4, link="12GB/s"))
    assert time.process_time() - start < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 2 * 2**30
    parameters = BYTES * (32 * BLOCK + 2 * EMBEDDING + 4096)
    assert sum(layer.parameter_bytes for layer in profile.layers) == parameters
    assert sum(profile.optimizer_bytes(layer) for layer in profile.layers) == 2 * parameters
    states = dict.fromkeys([device.name for device in plan.cluster.devices], 0.0)
    for stage in plan.stages:
        blocks = sum(".layers." in name for name in stage.layers)
        embeddings = sum("embed" in name or "head" in name for name in stage.layers)
        state = 4 * BYTES * (blocks * BLOCK + embeddings * EMBEDDING)  # weights, gradients, two moments
        assert stage.static_bytes - stage.buffer_bytes == pytest.approx(state, rel=0.02)
        states[stage.device] += state
    for state, memory in zip(states.values(), plan.predicted.memory_bytes, strict=True):
        assert state < memory <= 24 * 2**30
    # Weights, gradients and moments alone are 50 GiB: more than four devices of 12 GiB have.
    fits = [one.plan for one in caught.value.suggestions]
    assert fits
    assert all(len(one.cluster) > 4 and max(one.predicted.memory_bytes) <= 12 * 2**30 for one in fits)


@pytest.mark.slow
def test_a_llama_of_seven_billion_parameters_is_planned_on_four_devices() -> None:
    pytest.importorskip("transformers")
    subprocess.run([sys.executable, "-c", f"from {__name__} import main; main()"], check=True)
