"""What can be wrong with the file of a plan, and the words that have to say so."""

import math
from collections.abc import Callable

from tests.planning.plan_edits import Data, costs, move, split_at, swap

# The tied plan: what is done to its file, and the faults that have to be named, all of them in one message.
FAULTS: dict[str, tuple[Callable[[Data], object], list[str]]] = {
    # layers
    "a layer is left out": (
        lambda d: d["stages"][1]["layers"].pop(),
        ["layer 'layer7' is in no stage"],
    ),
    "two layers are left out": (
        lambda d: (d["stages"][0]["layers"].pop(0), d["stages"][1]["layers"].pop()),
        ["layer 'layer0' is in no stage", "layer 'layer7' is in no stage"],
    ),
    "an unknown layer": (
        lambda d: d["stages"][0]["layers"].append("layer99"),
        ["stage 0 has layer 'layer99', which the model does not have"],
    ),
    "a layer in two stages": (
        lambda d: d["stages"][0]["layers"].append("layer7"),
        ["layer 'layer7' is there 2 times: in stages 0, 1"],
    ),
    "a layer twice in a stage": (
        lambda d: d["stages"][0]["layers"].append("layer0"),
        ["layer 'layer0' is there 2 times: in stages 0, 0"],
    ),
    "a renamed layer": (
        lambda d: d["stages"][0]["layers"].__setitem__(0, "first"),
        ["stage 0 has layer 'first', which the model does not have", "layer 'layer0' is in no stage"],
    ),
    "a stage without layers": (
        lambda d: d["stages"][0].update(layers=[]),
        ["stages.0.layers: Tuple should have at least 1 item"],
    ),
    "no stages": (lambda d: d.update(stages=[]), ["stages: Tuple should have at least 1 item"]),
    "layers in another order": (
        lambda d: d["stages"][1]["layers"].reverse(),
        ["stage 1 has layer 'layer7' where the model runs 'layer6': stages are consecutive layers"],
    ),
    "a stage that is not connected": (
        lambda d: (d["stages"][1]["layers"].append(d["stages"][0]["layers"].pop(0)), move(d, 1, 0, at=-2)),
        ["stage 0 has layer 'layer1' where the model runs 'layer0'"],
    ),
    "stages that change places": (
        lambda d: swap(d, "layers"),
        ["stage 0 has layer 'layer6' where the model runs 'layer0'"],
    ),
    # devices
    "an unknown device": (
        lambda d: d["stages"][1].update(device="c"),
        ["stage 1 is on device 'c', the cluster has ['a', 'b', 'idle']"],
    ),
    "one device for two stages": (
        lambda d: d["stages"][1].update(device=d["stages"][0]["device"]),
        ["stages 0 and 1 are both on device", "schedule '1f1b' has them on two"],
    ),
    "no devices": (
        lambda d: d["cluster"].update(devices=[]),
        ["cluster.devices: Tuple should have at least 1"],
    ),
    "two devices of a name": (
        lambda d: d["cluster"]["devices"][1].update(name="a"),
        ["cluster: device names must differ, got ['a', 'a', 'idle']"],
    ),
    "a device that is gone": (
        lambda d: (d["cluster"].update(links=[]), d["cluster"]["devices"].pop(0)),
        ["is on device 'a', the cluster has ['b', 'idle']"],
    ),
    "a link to nowhere": (
        lambda d: d["cluster"]["links"][0].update(between=["a", "z"]),
        ["cluster: a link joins 'z', the cluster has"],
    ),
    "a device without speed": (
        lambda d: d["cluster"]["devices"][0].update(speed=0),
        ["cluster.devices.0.speed: Input should be greater than 0"],
    ),
    "a speed that is no number": (
        lambda d: d["cluster"]["devices"][0].update(speed=math.nan),
        ["cluster.devices.0.speed: Input should be a finite number"],
    ),
    "a device without memory": (
        lambda d: d["cluster"]["devices"][0].update(memory_bytes=0),
        ["cluster.devices.0.memory_bytes: Input should be greater than 0"],
    ),
    "a memory in words": (
        lambda d: d["cluster"]["devices"][0].update(memory_bytes="4GiB"),
        ["cluster.devices.0.memory_bytes: Input should be a valid integer"],
    ),
    "a negative latency": (
        lambda d: d["cluster"]["link"].update(latency=-1),
        ["cluster.link.latency: Input should be greater than or equal to 0"],
    ),
    # schedule and numbers
    "an unknown schedule": (
        lambda d: d.update(schedule="zigzag"),
        ["no schedule is called 'zigzag': there are sequential, gpipe, 1f1b"],
    ),
    "no schedule that can be built by name": (
        lambda d: d.update(schedule="auto"),
        ["no schedule is called 'auto'"],
    ),
    "a schedule with two stages a device": (
        lambda d: d.update(schedule="zb-v"),
        ["schedule 'zb-v' does not exist for this plan: zb-v needs chunks=2, got chunks=1"],
    ),
    "a copy with too few devices": (
        lambda d: d.update(replica_devices=[["idle"]]),
        ["replica 1 of the model has 1 device, it needs one for each of the 2 stages"],
    ),
    "a copy on devices that are taken": (
        lambda d: d.update(replica_devices=[["idle", "b"]]),
        ["stages 1 and 1 of replica 1 are both on device 'b', schedule '1f1b' has them on two"],
    ),
    "a copy on an unknown device": (
        lambda d: d.update(replica_devices=[["idle", "c"]]),
        ["stage 1 of replica 1 is on device 'c', the cluster has ['a', 'b', 'idle']"],
    ),
    "chunks that the schedule has not": (
        lambda d: d.update(chunks=2),
        ["schedule '1f1b' does not exist for this plan: 1f1b needs chunks=1, got chunks=2"],
    ),
    "chunks that do not come out even": (
        lambda d: d.update(chunks=3),
        ["2 stages are not 3 (chunks) for each device"],
    ),
    "no chunks": (lambda d: d.update(chunks=0), ["chunks: Input should be greater than or equal to 1"]),
    "micro-batches without costs": (
        lambda d: d.update(micro_batches=3),
        ["micro_batches is 3, and the costs in the plan are those of [4]: plan again"],
    ),
    "more micro-batches than can be": (
        lambda d: d.update(micro_batches=10**12, profile=None),
        ["micro_batches: Input should be less than or equal to 100000"],
    ),
    "no micro-batches": (
        lambda d: d.update(micro_batches=0),
        ["micro_batches: Input should be greater than or equal to 1"],
    ),
    "micro-batches in quotes": (
        lambda d: d.update(micro_batches="4"),
        ["micro_batches: Input should be a valid integer"],
    ),
    "a yes for a number": (lambda d: d.update(chunks=True), ["chunks: Input should be a valid integer"]),
    "an unknown way of recompute": (
        lambda d: d["stages"][0].update(recompute="sometimes"),
        ["stages.0.recompute: Input should be 'never', 'except-last' or 'always'"],
    ),
    # the form of the file
    "a later version": (
        lambda d: d.update(version=2),
        ["a Plan of version 2, and this pipepart reads version 1: update pipepart"],
    ),
    "a later version of the profile": (lambda d: d["profile"].update(version=9), ["profile.version: Input"]),
    "extra fields": (
        lambda d: (d.update(colour="blue"), d["stages"][1].update(speed=1), d["cluster"].update(size=3)),
        ["colour: Extra inputs", "stages.1.speed: Extra inputs", "cluster.size: Extra inputs"],
    ),
    "a missing field": (lambda d: d.pop("schedule"), ["schedule: Field required"]),
    "a text for a list": (
        lambda d: d["stages"][0].update(layers="layer0"),
        ["stages.0.layers: Input should be a valid array"],
    ),
    "nothing for a text": (
        lambda d: d["stages"][0].update(device=None),
        ["stages.0.device: Input should be a valid string"],
    ),
    "negative figures of a stage": (
        lambda d: d["stages"][1].update(forward_seconds=-1.0, stash_bytes=-5, in_flight=-1),
        [
            f"stages.1.{field}: Input should be greater"
            for field in ("forward_seconds", "stash_bytes", "in_flight")
        ],
    ),
    "a figure of a stage that is no number": (
        lambda d: d["stages"][0].update(backward_input_seconds=math.nan, transfer_seconds=math.inf),
        [
            "stages.0.backward_input_seconds: Input should be a finite number",
            "stages.0.transfer_seconds: Input should be a finite number",
        ],
    ),
    "a negative prediction": (
        lambda d: d["prediction"].update(step_seconds=-1.0, memory_bytes=[-1, 2, 3]),
        [
            "prediction.step_seconds: Input should be greater",
            "prediction.memory_bytes.0: Input should be greater",
        ],
    ),
    "an output of an unknown type": (
        lambda d: d.update(outputs=[{"shape": [-1], "dtype": "float99"}]),
        ["outputs.0.shape.0: Input should be greater", "outputs.0.dtype: torch has no dtype 'float99'"],
    ),
    "outputs that are not the profile's": (
        lambda d: d.update(outputs=[{"shape": [1], "dtype": "float32"}]),
        ["the outputs of the plan are not those of its profile: plan again"],
    ),
    # the profile inside
    "another fingerprint": (
        lambda d: d.update(fingerprint="0" * 16),
        ["the layers in the plan's profile are not those that it was made for: plan again"],
    ),
    "another layer in the profile": (
        lambda d: d["profile"]["layers"][0].update(description="Other()"),
        ["the layers in the plan's profile are not those that it was made for: plan again"],
    ),
    "negative numbers in the profile": (
        lambda d: (
            costs(d)["layers"][2]["forward"].update(seconds=-0.5),
            costs(d)["layers"][3].update(output_bytes=-1),
            costs(d)["saved"][0].update(bytes=-1),
            d["profile"]["layers"][0].update(parameter_bytes=-1),
        ),
        [
            "profile.costs.0.layers.2.forward.seconds: Input should be greater",
            "profile.costs.0.layers.3.output_bytes: Input should be greater",
            "profile.costs.0.saved.0.bytes: Input should be greater",
            "profile.layers.0.parameter_bytes: Input should be greater",
        ],
    ),
    "seconds that are no number": (
        lambda d: costs(d)["layers"][2]["backward_input"].update(seconds=math.nan),
        ["profile.costs.0.layers.2.backward_input.seconds: Input should be a finite number"],
    ),
    "endless seconds": (
        lambda d: costs(d)["layers"][2]["backward_weight"].update(seconds=math.inf),
        ["profile.costs.0.layers.2.backward_weight.seconds: Input should be a finite number"],
    ),
    "bytes beyond all bounds": (
        lambda d: costs(d)["layers"][2].update(output_bytes=10**30),
        ["profile.costs.0.layers.2.output_bytes: Input should be less than"],
    ),
    "seconds beyond all bounds": (
        lambda d: [layer["forward"].update(seconds=1e308) for layer in costs(d)["layers"][:2]],
        [f"profile.costs.0.layers.{index}.forward.seconds: Input should be less than" for index in (0, 1)],
    ),
    "a speed that makes seconds endless": (
        lambda d: [device.update(speed=1e-320) for device in d["cluster"]["devices"]],
        ["holds a plan whose costs are too large", "forward_seconds: Input should be"],
    ),
    "too few costs": (
        lambda d: costs(d)["layers"].pop(),
        ["profile: costs.0: 7 layers have costs, and the profile has 8 layers"],
    ),
    "no costs": (
        lambda d: d["profile"].update(costs=[]),
        ["profile.costs: Tuple should have at least 1 item"],
    ),
    "costs of one number twice": (
        lambda d: d["profile"]["costs"].append(costs(d)),
        ["profile: there are two entries of costs for 4 micro-batches"],
    ),
    "memory kept by no layer": (
        lambda d: costs(d)["saved"][1].update(layers=[8], input_of=[-1]),
        ["profile: costs.0: saved.1 names layers [8, -1]: indices run from 0 to 7"],
    ),
    "two layers of a name in the profile": (
        lambda d: d["profile"]["layers"][1].update(name="layer0"),
        ["profile: two layers are called 'layer0'"],
    ),
    "sharing with no layer": (
        lambda d: d["profile"]["layers"][3].update(
            shared=[{"layer": "layer9", "name": "weight", "bytes": 0}]
        ),
        ["profile: layer 'layer3' shares with 'layer9', which is no layer before it"],
    ),
    "more trained than there is": (
        lambda d: d["profile"]["layers"][1].update(gradient_bytes=9),
        ["profile: layer 'layer1' has 9 bytes of gradients, which is more than its 4 bytes of parameters"],
    ),
    "an unknown optimizer": (
        lambda d: d["profile"].update(optimizer="lion"),
        ["profile: the state of optimizer 'lion' is not known: choose one of 'adam'"],
    ),
    # several at once
    "layers, devices, schedule and fingerprint": (
        lambda d: (
            d["stages"][0]["layers"].append("more"),
            d["stages"][1]["layers"].pop(),
            d["stages"][1].update(device="nowhere"),
            d.update(schedule="zigzag", fingerprint="f"),
        ),
        [
            "stage 0 has layer 'more', which the model does not have",
            "layer 'layer7' is in no stage",
            "stage 1 is on device 'nowhere'",
            "no schedule is called 'zigzag'",
            "the layers in the plan's profile are not those",
        ],
    ),
    "order, devices and micro-batches": (
        lambda d: (
            split_at(d, 3),
            d["stages"][1]["layers"].reverse(),
            d["stages"][0].update(device="nowhere"),
            d.update(micro_batches=5),
        ),
        [
            "stage 1 has layer 'layer7' where the model runs 'layer3'",
            "stage 0 is on device 'nowhere'",
            "micro_batches is 5",
        ],
    ),
}
