"""What a stage holds in its graphs under a split backward is what each part needs."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from pipepart.runtime.step import Step
from schedules import Action
from tests.support.chains import Recompute, cut_by_hand
from tests.support.observed_actions import after_each_action
from tests.support.two_parts import splits


def held_bytes(step: Step, stage: int) -> int:
    """Bytes of every tensor that a stage's graphs and its waiting weights keep alive, parameters apart."""
    run = step.runs[stage]
    own = {p.data_ptr() for _, module in run.stage.layers for p in module.parameters()}
    found = [tensor for stash in run.stashes.values() for tensor in saved_in(stash.roots)]
    found += [leaf for stash in run.stashes.values() for leaf in stash.entered[0]]
    found += [tensor for deferred in run.deferred.values() for tensor in deferred.tensors()]
    return sum({t.data_ptr(): t.nbytes for t in found if t.data_ptr() not in own}.values())


def saved_in(roots: Iterable[Any]) -> Iterator[Tensor]:
    """All that autograd has saved in a graph."""
    seen: set[Node] = set()
    waiting = [root.node for root in roots]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        names = [name for name in dir(node) if name.startswith("_saved_")]
        values = [getattr(node, name) for name in names]
        yield from (value for value in values if isinstance(value, Tensor))
        yield from getattr(node, "saved_tensors", ())


def bytes_after_each_action(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[str, int]]]:
    """For each stage what it holds after each of its actions, in their order."""
    found: dict[int, list[tuple[str, int]]] = defaultdict(list)

    def count(step: Step, action: Action) -> None:
        found[action.stage].append((str(action), held_bytes(step, action.stage)))

    after_each_action(monkeypatch, count)
    return found


ROW = 4 * 16  # bytes of one sample between two layers


def network() -> nn.Sequential:
    """Two stages of the same layers: two linear ones and two that keep something for their input's gradient alone."""
    stage = (lambda: nn.Linear(16, 16), nn.GELU, lambda: nn.Linear(16, 16), nn.GELU)
    return nn.Sequential(*(make() for make in stage * 2))


@splits
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_stage_holds_what_its_parts_need(recompute: Recompute, monkeypatch: pytest.MonkeyPatch):
    """Before I the input of each layer, after it input and output gradient of the linear ones, after W nothing."""
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    with cut_by_hand(
        network(), [4], loss_fn=nn.MSELoss(), micro_batches=4, schedule="zb-h1", recompute=recompute
    ) as pipe:
        found = bytes_after_each_action(monkeypatch)
        pipe.step(x, target=y)
    micro_batch = 2 * ROW
    before, after = 4 * micro_batch, 4 * micro_batch
    if recompute == "never":
        assert dict(found[0])["0F0"] == before
        assert dict(found[1])["1F0"] == before + 2 * micro_batch  # output and target, which the loss keeps
    else:
        assert dict(found[0])["0F0"] == 0
    assert dict(found[0])["0I0"] == after + (before if recompute == "never" else 0)  # beside micro-batch 1
    assert found[0][-1] == ("0W3", 0)
    assert found[1][-1] == ("1W3", 0)
    assert dict(found[1])["1I3"] == 2 * after  # that of micro-batch 2 waits as well
    assert dict(found[1])["1W2"] == after
