"""Random layers: what they draw depends on the seed alone, not on the cut, the schedule or the threads."""

import re
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipepart
from pipepart.autograd.random_operations import RandomMode
from pipepart.generators import GENERATOR_LOCKS, draws_undone
from tests.support import plain
from tests.support.chains import cut_by_hand
from tests.support.pieces import Noise
from tests.support.two_parts import Calls


def noisy() -> nn.Sequential:
    """Seven layers, most of which draw."""
    return nn.Sequential(
        nn.Linear(16, 16),
        nn.Dropout(0.5),
        Noise(),
        nn.Linear(16, 16),
        nn.RReLU(),
        nn.Dropout(0.3),
        nn.Linear(16, 1),
    )


X, Y = torch.linspace(-1, 1, 256).reshape(16, 16), torch.zeros(16, 1)


def test_operations_that_draw_nothing_run_without_a_call_of_python():
    """Python would take longer for each than a small layer computes."""
    seen = []

    class Seen(RandomMode):
        def draw(self, operation, args, kwargs):
            seen.append(operation.name())
            return operation(*args, **kwargs)

    model = noisy()
    with Seen():
        model(X)
    assert [name.partition("::")[2] for name in seen] == [
        "bernoulli_.float",
        "randn_like",
        "rrelu_with_noise",
        "bernoulli_.float",
    ]


def test_draws_of_a_layer_layers_micro_batches_and_steps_differ():
    """Forty-eight masks, of which no two are the same."""

    def draw_twice(x: Tensor) -> Tensor:
        for _ in range(2):
            drawn.put(tuple((nn.functional.dropout(x) == 0).flatten().tolist()))
        return x

    drawn: SimpleQueue[tuple[bool, ...]] = SimpleQueue()  # layers that share Python values need a profile
    with cut_by_hand(nn.Sequential(Calls(draw_twice), Calls(draw_twice)), [1], micro_batches=4) as pipe:
        for _ in range(3):
            pipe(torch.ones(8, 64))
    masks = [drawn.get_nowait() for _ in range(drawn.qsize())]
    assert len(masks) == len(set(masks)) == 48


def test_dropout_under_a_checkpoint_is_refused():
    """Its recomputed forward would drop something else."""

    dropped = Calls(lambda x: checkpoint(nn.functional.dropout, x, use_reentrant=False))
    model = nn.Sequential(nn.Linear(16, 16), dropped, nn.Linear(16, 1))
    with (
        cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe,
        pytest.raises(RuntimeError, match=r"under torch\.utils\.checkpoint") as caught,
    ):
        pipe.step(X, target=Y)
    assert "layer '1' (Calls)" in "".join(caught.value.__notes__)


def test_attention_without_dropout_draws_nothing():
    """Operations that could draw but are told not to leave the caller's random numbers alone."""

    def attend(x: Tensor) -> Tensor:
        query, key, value = x.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)

    attention = Calls(lambda x: checkpoint(attend, x, use_reentrant=False))
    model = nn.Sequential(nn.Linear(8, 24), attention, nn.Linear(8, 1))
    x, y = torch.randn(6, 5, 8), torch.randn(6, 5, 1)
    state = torch.get_rng_state()
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss()) as pipe:
        plain.check_step(pipe, x, y, nn.MSELoss())
    assert torch.get_rng_state().equal(state)


class Rising(nn.Module):
    """Dropout by a rate that training raises, as drop-path does: at first it draws nothing."""

    rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.rate, self.training)


def test_a_layer_that_begins_to_draw_at_a_later_step_is_recomputed_with_the_same_mask():
    rising = Rising()
    model = nn.Sequential(nn.Linear(16, 16), rising, nn.Linear(16, 1)).double()
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), micro_batches=4, recompute="always") as pipe:
        for rising.rate in (0.0, 0.5):
            plain.check_step(pipe, X.double(), Y.double(), nn.MSELoss(), 4, seed=1)


class Hidden(nn.Module):
    """Draws nothing until something that is not among its attributes says so."""

    draws: ClassVar[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5) if self.draws else x * 1.0


def test_a_layer_that_its_user_has_compiled_draws_by_its_place_as_well():
    """Whether its operations are compiled in this step or were before."""

    class Dropped(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(input), 0.5)

    torch.compiler.reset()
    model = nn.Sequential(Dropped(16, 16), Dropped(16, 16), nn.Linear(16, 1)).double()
    for layer in (model[0], model[1]):
        layer.compile(backend="aot_eager")
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), micro_batches=4) as pipe:
        for _ in range(2):
            plain.check_step(pipe, X.double(), Y.double(), nn.MSELoss(), 4, seed=1)


def test_a_layer_that_begins_to_draw_unseen_draws_by_its_place_from_the_next_step_on():
    Hidden.draws.clear()
    model = nn.Sequential(nn.Linear(16, 16), Hidden(), nn.Linear(16, 1)).double()
    with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), micro_batches=4) as pipe:
        pipe.step(X.double(), target=Y.double())
        pipe.step(X.double(), target=Y.double())
        Hidden.draws.append(True)
        pipe.step(X.double(), target=Y.double())
        plain.check_step(pipe, X.double(), Y.double(), nn.MSELoss(), 4, seed=1)


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_a_step_moves_the_generator_by_one_number_whatever_its_layers_draw(default):
    torch.manual_seed(3)
    with cut_by_hand(noisy(), [3], loss_fn=nn.MSELoss(), micro_batches=4) as pipe:
        torch.manual_seed(3)
        with torch.device(default):  # on which the caller has new tensors made
            pipe.step(X, target=Y)
    found = torch.get_rng_state()
    torch.manual_seed(3)
    torch.rand(())
    assert found.equal(torch.get_rng_state())


def test_a_state_that_another_thread_has_set_for_a_moment_is_not_kept():
    """Put back later, it would change the numbers of the next step."""
    inside, go_on = Event(), Event()

    def run() -> None:
        with draws_undone():
            inside.set()
            go_on.wait(60)

    torch.manual_seed(0)
    before, other = torch.get_rng_state(), Thread(target=run)
    with GENERATOR_LOCKS[torch.device("cpu")]:
        torch.manual_seed(99)
        other.start()
        inside.wait(0.5)  # one that does not wait for the lock has copied the state by then
        torch.set_rng_state(before)
    go_on.set()
    other.join()
    assert torch.equal(torch.get_rng_state(), before)


def test_one_module_reads_the_states_of_generators_with_their_locks_held():
    files = Path(pipepart.__file__).parent.rglob("*.py")
    found = {
        file.name for file in files if re.search(r"rng_state|fork_rng", file.read_text(encoding="utf-8"))
    }
    assert found == {"generators.py"}


def test_a_loss_may_wait_for_threads_that_draw():
    """As one does that calls a pipeline: also while it is called without data, as it reads the number of samples."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        lock = GENERATOR_LOCKS[torch.device("cpu")]
        assert lock.acquire(timeout=60)
        lock.release()
        return (output - target).abs().sum() / len(output)

    with cut_by_hand(noisy(), [3], loss_fn=loss, micro_batches=4) as pipe:
        assert torch.isfinite(pipe.step(X, target=Y))
