"""Mini-batches that a thread makes ready train to the same numbers, and no thread is left over."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from pipepart import Pipeline
from tests.support import plain
from tests.support.chains import cut_by_hand

DATA = TensorDataset(torch.randn(22, 4), torch.randn(22, 2))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 2))


@pytest.fixture
def pipe() -> Iterator[Pipeline]:
    with cut_by_hand(network(), [1], loss_fn=nn.MSELoss()) as made:
        yield made
    assert threads() == []


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pipepart-prefetch"]


def train(pipe: Pipeline, batches: Any) -> list[float]:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for x, y in batches:
        losses.append(pipe.step(x, target=y).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def pairs(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.full((size, 4), float(size)), torch.zeros(size, 2)) for size in sizes]


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_shuffled_epochs_give_the_same_numbers_bit_for_bit(loader_workers):
    """The last mini-batch has fewer samples than there are micro-batches; a layer draws."""
    results = []
    for prefetched in (False, True):
        torch.manual_seed(3)
        loader = DataLoader(DATA, batch_size=5, shuffle=True, num_workers=loader_workers)
        model = network()
        with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
            batches = pipe.prefetch(loader) if prefetched else loader
            losses = [loss for _ in range(2) for loss in train(pipe, batches)]
        results.append((losses, model.state_dict()))
        assert threads() == []
    (ours, our_state), (theirs, their_state) = results
    assert len(ours) == 10
    assert ours == theirs
    plain.assert_same(our_state, their_state)


BATCHES: dict[str, Any] = {
    "tensor": DATA.tensors[0],
    "list of one": [DATA.tensors[0]],
    "pair": DATA.tensors,
    "dict": {"x": DATA.tensors[0], "y": DATA.tensors[1], "id": 7},
    "three": (DATA.tensors[0], "name", DATA.tensors[1]),
}


@pytest.mark.parametrize("form", BATCHES)
def test_what_is_yielded_is_what_the_loader_yields(pipe, form):
    (given,) = pipe.prefetch([BATCHES[form]])
    assert type(given) is type(BATCHES[form])
    assert str(given) == str(BATCHES[form])


def test_the_user_may_name_the_target(pipe):
    assert len(list(pipe.prefetch([BATCHES["dict"]], target="y"))) == 1
    assert len(list(pipe.prefetch([BATCHES["three"]], target=-1))) == 1
    with pytest.raises(ValueError, match=r"target='label'.*entries \['x', 'y', 'id'\]"):
        list(pipe.prefetch([BATCHES["dict"]], target="label"))


def test_an_error_of_the_loader_arrives_in_its_place(pipe):
    def broken() -> Iterator[Any]:
        yield from pairs(4, 6)
        raise KeyError("on purpose")

    seen = []

    def loop() -> None:
        for x, _ in pipe.prefetch(broken()):
            seen.append(len(x))

    with pytest.raises(KeyError, match="on purpose") as caught:
        loop()
    assert seen == [4, 6]
    assert "broken" in [entry.name for entry in caught.traceback]
    assert threads() == []


def test_no_more_is_made_ahead_than_depth(pipe):
    made, third = [], threading.Event()

    def loader() -> Iterator[Any]:
        for index, pair in enumerate(pairs(*[4] * 9)):
            made.append(index)
            if index == 2:
                third.set()
            yield pair

    batches = iter(pipe.prefetch(loader(), depth=2))
    next(batches)
    assert third.wait(10)
    del batches
    assert made == [0, 1, 2]


def leave_by_break(batches: Any) -> None:
    for _ in batches:
        break


def leave_by_exception(batches: Any) -> None:
    def loop() -> None:
        for _ in batches:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()


def leave_by_garbage(batches: Any) -> None:
    circle = [iter(batches)]
    next(circle[0])
    circle.append(circle)  # type: ignore[arg-type]
    del circle
    gc.collect()


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_exception, leave_by_garbage, list])
def test_no_thread_outlives_its_pass(pipe, leave: Callable[[Any], Any]):
    leave(pipe.prefetch(pairs(*[4] * 9), depth=1))
    assert threads() == []


def test_closing_the_pipeline_ends_a_pass_and_refuses_others():
    pipe = cut_by_hand(network(), [1], loss_fn=nn.MSELoss())
    prefetch = pipe.prefetch(pairs(*[4] * 9))
    batches = iter(prefetch)
    next(batches)
    pipe.close()
    assert threads() == []
    for use in (lambda: next(batches), lambda: list(prefetch), lambda: pipe.prefetch([])):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_a_loader_that_never_returns_does_not_hold_up_a_break(pipe):
    released = threading.Event()

    def stuck() -> Iterator[Any]:
        yield from pairs(4)
        released.wait()

    leave_by_break(pipe.prefetch(stuck()))
    (thread,) = threads()
    assert thread.daemon
    released.set()
    thread.join(10)


def test_two_passes_at_once_do_not_mix(pipe):
    sizes = [
        (len(a), len(b))
        for (a, _), (b, _) in zip(pipe.prefetch(pairs(4, 5)), pipe.prefetch(pairs(6, 7, 8)), strict=False)
    ]
    assert sizes == [(4, 6), (5, 7)]


@pytest.mark.parametrize("as_batch_sampler", [False, True])
def test_the_epoch_reaches_the_sampler(pipe, as_batch_sampler):
    sampler = DistributedSampler(DATA, num_replicas=2, rank=0, shuffle=True)
    if as_batch_sampler:
        batched = torch.utils.data.BatchSampler(sampler, 5, False)
        prefetch = pipe.prefetch(DataLoader(DATA, batch_sampler=batched))
    else:
        prefetch = pipe.prefetch(DataLoader(DATA, batch_size=5, sampler=sampler))
    prefetch.set_epoch(3)
    found = torch.cat([x for x, _ in prefetch])
    order = DistributedSampler(DATA, num_replicas=2, rank=0, shuffle=True)
    order.set_epoch(3)
    assert found.equal(DATA.tensors[0][list(order)])
    assert len(prefetch) == 3


def test_what_cannot_be_gone_over_is_refused(pipe):
    with pytest.raises(TypeError, match="iterable of mini-batches, got a int"):
        pipe.prefetch(3)
    with pytest.raises(ValueError, match="depth must be at least 1 mini-batch ahead, got 0"):
        pipe.prefetch([], depth=0)


def test_a_mini_batch_that_is_let_go_of_is_gone():
    """At once, for the sake of the devices' memory, and not when a collector comes by."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    values: list[weakref.ref[Tensor]] = []
    gc.collect()
    gc.disable()
    try:
        with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
            for x, y in pipe.prefetch((torch.randn(6, 3), torch.randn(6, 3)) for _ in range(1)):
                pipe.step(x, target=y)
                values = [weakref.ref(x), weakref.ref(y)]
                del x, y
        assert [value() for value in values] == [None, None]
    finally:
        gc.enable()
