"""Which bytes go from which stage to which: values go past the stages that do not use them."""

from collections import Counter
from typing import Any

import torch
from torch.nn import functional as F

from pipepart import Arguments
from tests.capture import handwritten
from tests.support.recorded import borders_of, chain_for, piped
from tests.support.skipping import WIDTH, Hourglass, Woven, relayed

X, Y = torch.ones(4, WIDTH), torch.zeros(4, WIDTH)
VALUE = 2 * WIDTH * 4  # bytes of a value for one of two micro-batches


def moved(model, sample, stages, target=Y, parts=2, **options):
    """The bytes of a step by (kind, sender, receiver)."""
    settings: dict[str, Any] = {
        "loss_fn": F.mse_loss,
        "stages": stages,
        "parts": parts,
        "trace": True,
        **options,
    }
    with piped(model, sample, **settings) as pipe:
        pipe.step(Arguments.of(sample), target=target)
        found = Counter()
        for one in step_of(pipe).transfers:
            found[str(one.kind), one.source, one.target] += int(one.bytes)
    return found


def step_of(pipe):
    assert pipe.last_trace is not None
    return pipe.last_trace


def test_values_go_from_their_maker_to_their_users_and_their_gradients_back():
    found = moved(Hourglass(6), X, stages=4)  # layers 0 1 2 | 3 4 5 | 5 4 3 | 2 1 0
    forward = {
        (0, 1): 2 * VALUE,  # the output of layer 2, which layer 3 uses
        (0, 3): 2 * 2 * VALUE,  # those of layers 0 and 1
        (1, 2): 3 * 2 * VALUE,  # those of layers 3, 4 and 5
        (1, 3): 2 * VALUE,  # that of layer 2 again
        (2, 3): 2 * VALUE,
    }
    assert {ends[1:]: size for ends, size in found.items() if ends[0] == "F"} == forward
    assert {ends[:0:-1]: size for ends, size in found.items() if ends[0] == "B"} == forward


def test_eight_stages_of_a_u_net_move_what_is_used_and_nothing_twice():
    images, target = torch.ones(2, 3, 16, 16), torch.zeros(2, 2, 16, 16)
    model = handwritten.UNet(levels=4)
    found = moved(model, images, stages=8, target=target)
    with relayed():
        passed_on = moved(model, images, stages=8, target=target)
    chain: Any = chain_for(model, images, loss_fn=F.mse_loss)
    recording = chain.bind((images[:1],), {}).live.recording
    sizes = sizes_of(chain, images[:1])
    ends = [0, *borders_of(len(chain.layers), 8), len(chain.layers)]
    stage_of = [stage for stage in range(8) for _ in range(ends[stage], ends[stage + 1])]
    direct = sum(
        sizes[number] * (len({stage_of[layer] for layer in layers}) - 1)
        for number, layers in recording.touched.items()
    )
    assert sum(size for (kind, _, _), size in found.items() if kind == "F") == 2 * direct
    assert sum(passed_on.values()) > 1.5 * sum(found.values())


def sizes_of(chain, sample):
    """The bytes of each live value, by its number."""
    value: Any = chain.bind((sample,), {}).live
    parts = value.recording.parts
    found = dict(zip(parts[0].takes, (tensor.nbytes for tensor in value.tensors), strict=True))
    for (_, layer), part in zip(chain.layers[:-1], parts, strict=False):
        value = layer(value)
        found.update(zip(part.gives, (tensor.nbytes for tensor in value.tensors), strict=True))
    return found


def test_masks_have_no_way_back_and_a_value_with_several_uses_hops():
    mask = torch.ones(4, WIDTH, dtype=torch.int64)
    found = moved(Woven(), (X, mask), stages=9)
    past = {ends: size for ends, size in found.items() if abs(ends[1] - ends[2]) > 1}
    gradients = {("B", 4, 1): 2 * VALUE, ("B", 6, 4): 2 * VALUE, ("B", 7, 2): 2 * VALUE}
    values = {("F", 1, 4): 2 * VALUE, ("F", 4, 6): 2 * VALUE, ("F", 2, 7): 2 * VALUE}
    assert past == {("F", 0, 3): 2 * 2 * VALUE, ("F", 3, 8): 2 * 2 * VALUE, **values, **gradients}


def test_stages_on_one_device_hand_values_over():
    found = moved(Hourglass(4), X, stages=4, schedule="zb-v", chunks=2)  # stages 0 and 3 are on device 0
    assert ("F", 0, 3) not in found
    assert ("F", 1, 2) not in found
    assert found["F", 0, 1] == found["F", 2, 3] == 2 * VALUE
