"""Buffers around a second forward: written once a micro-batch, read as the first forward found them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipepart.capture import flatten
from pipepart.runtime.replay.buffers import Buffers
from tests.support import plain
from tests.support.chains import Recompute, cut_by_hand
from tests.support.pairwise import pairwise

X, Y = torch.linspace(-1, 1, 40).reshape(10, 4), torch.linspace(1, 0, 40).reshape(10, 4)


class Moving(nn.Module):
    """Its output depends on a mean that it moves in every forward, in one of many ways."""

    constant: Tensor
    mean: Tensor | None
    twin: Tensor | None
    late: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("constant", torch.arange(4.0))
        self.register_buffer("mean", None if how == "made late" else torch.ones(4))
        self.register_buffer("twin", self.mean)

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.ones(4) if self.mean is None else self.mean
        moved = (0.9 * mean + 0.1 * x.detach().mean(dim=0) * self.constant).tanh()
        y = x * mean if self.how == "replaced" else x * mean.clone()
        if self.how in ("replaced", "made late"):
            self.mean = moved
        elif self.how == "copied":
            with torch.no_grad():
                mean.copy_(moved)
        elif self.how == "behind torch's back":
            mean.data.copy_(moved)
        elif self.how == "by its other name":
            assert isinstance(self.twin, Tensor)
            self.twin.copy_(moved)
        elif self.how == "registered late":
            if not hasattr(self, "late"):
                self.register_buffer("late", torch.zeros(4))
            self.late = self.late + moved
            y = y + self.late
        return y


WAYS = ["replaced", "made late", "copied", "behind torch's back", "by its other name", "registered late"]


def trained(model: nn.Module, recompute: Recompute, schedule: str = "1f1b", steps: int = 3) -> dict[str, Any]:
    ours = plain.twin(model)
    with cut_by_hand(
        ours,
        [1, 3],
        loss_fn=nn.MSELoss(),
        micro_batches=5,
        schedule=schedule,
        recompute=recompute,
    ) as pipe:
        losses = {f"loss {step}": pipe.step(X, target=Y) for step in range(steps)}
    return losses | plain.gradients(ours) | dict(ours.named_buffers())


@pytest.mark.parametrize(
    ("how", "schedule", "recompute"), pairwise(WAYS, ["1f1b", "gpipe"], ["except-last", "always"])
)
def test_a_buffer_written_in_any_way_that_the_output_depends_on(how, schedule, recompute):
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4), Moving(how), nn.Linear(4, 4), Moving(how), nn.Linear(4, 4)
    )
    again, once = trained(model, recompute, schedule), trained(model, "never", schedule)
    assert list(again) == list(once)  # the order of a state dict, too
    plain.assert_same(again, once)
    reference = plain.twin(model)
    for _ in range(3):
        plain.micro_batched_step(reference, X, Y, nn.MSELoss(), 5)
    plain.assert_same(
        {name: again[name] for name, _ in reference.named_buffers()}, dict(reference.named_buffers())
    )


@pytest.mark.parametrize("recompute", ["except-last", "always"])
@pytest.mark.parametrize("size", [4, 20_000])
def test_a_buffer_that_is_first_written_in_the_middle_of_training(size, recompute):
    """Of a large one there is no copy at that micro-batch: its graph is kept instead."""

    class Late(nn.Module):
        seen: Tensor

        def __init__(self, threshold: float) -> None:
            super().__init__()
            self.threshold = threshold
            self.register_buffer("seen", torch.zeros(size))

        def forward(self, x: Tensor) -> Tensor:
            y = x * (1 + self.seen[:4].clone())
            if x[0, 0] > self.threshold:
                self.seen[:4] += x.detach().mean(dim=0)
            return y

    for threshold in (-1.0, 0.2):
        late = [Late(threshold) for _ in range(3)]
        model = nn.Sequential(late[0], nn.Linear(4, 4), late[1], nn.Linear(4, 4), late[2])
        plain.assert_same(trained(model, recompute), trained(model, "never"))


@pytest.mark.parametrize(
    "norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm, nn.utils.weight_norm]
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_normed_weights(norm):
    """Spectral norm takes a step of its iteration, kept in buffers, in each forward."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        linears = [norm(nn.Linear(4, 4)) for _ in range(3)]
        return nn.Sequential(nn.Linear(4, 4), linears[0], linears[1], nn.Tanh(), linears[2])

    found = []
    for recompute in ("never", "except-last", "always"):
        ours = model()
        with cut_by_hand(
            ours, [1, 3], loss_fn=nn.MSELoss(), micro_batches=5, schedule="gpipe", recompute=recompute
        ) as pipe:
            for _ in range(2):
                pipe.step(X, target=Y)
        found.append(plain.gradients(ours) | dict(ours.named_buffers()))
    plain.assert_same(found[1], found[0])
    plain.assert_same(found[2], found[0])


def test_batch_norm_that_changes_its_mode_between_steps():
    found = []
    for recompute in ("never", "always"):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), norm, nn.Linear(4, 4))
        with cut_by_hand(model, [1], loss_fn=nn.MSELoss(), micro_batches=5, recompute=recompute) as pipe:
            for training in (False, True, False, True):
                norm.train(training)
                pipe.step(X, target=Y)
            pipe.eval()
            pipe.step(X, target=Y)
        assert norm.num_batches_tracked == 10
        found.append(plain.gradients(model) | dict(model.named_buffers()))
    plain.assert_same(found[1], found[0])


def test_a_scripted_batch_norm():
    found = []
    for recompute in ("never", "always"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 4), torch.jit.script(nn.BatchNorm1d(4)), nn.Linear(4, 4), nn.Linear(4, 4)
        )
        with cut_by_hand(model, [1, 3], loss_fn=nn.MSELoss(), micro_batches=5, recompute=recompute) as pipe:
            pipe.step(X, target=Y)
            pipe.step(X, target=Y)
        found.append(plain.gradients(model) | {name: b.clone() for name, b in model.named_buffers()})
    plain.assert_same(found[1], found[0])


def test_a_buffer_that_is_written_through_another_reference_is_refused_by_name():
    class Hidden(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.all = [self.count]

        def forward(self, x: Tensor) -> Tensor:
            self.all[0].add_(1)
            return x * 1

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Hidden()), nn.Linear(4, 4))
    with (
        cut_by_hand(model, [1], loss_fn=nn.MSELoss(), recompute="always") as pipe,
        pytest.raises(RuntimeError, match=r"buffer 1\.0\.count was written .* updated twice") as caught,
    ):
        pipe.step(X, target=Y)
    assert "stage 1 of 2" in caught.value.__notes__[-1]


def test_an_exception_in_the_second_forward_leaves_the_real_buffers():
    class Fuse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls > 5:
                raise ValueError("on purpose")
            return x * 1

    calls = 0
    norm = nn.BatchNorm1d(4)
    running = norm.running_mean
    model = nn.Sequential(nn.Linear(4, 4), norm, Fuse(), nn.Linear(4, 4))
    with (
        cut_by_hand(
            model, [1], loss_fn=nn.MSELoss(), micro_batches=5, schedule="gpipe", recompute="always"
        ) as pipe,
        pytest.raises(ValueError, match="on purpose"),
    ):
        pipe.step(X, target=Y)
    assert norm.running_mean is running
    assert norm.num_batches_tracked == 5


@pytest.mark.parametrize(("training", "copies"), [(True, [5, 4]), (False, [5, 0])])
def test_large_constants_are_copied_once_in_each_mode(training, copies):
    """A large mask is looked at once; small buffers at each micro-batch, but not in evaluation."""

    class Masked(nn.Module):
        mask: Tensor
        large: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(4))
            self.register_buffer("large", torch.ones(20_000))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.mask * self.large[:4]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal copied
            copied += func is torch.ops.aten.clone.default
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(4, 4), Masked(), nn.Linear(4, 4), nn.BatchNorm1d(4)).train(training)
    buffers = Buffers(flatten(model))
    for expected in copies:
        copied = 0
        with Watch():
            noted = buffers.note()
            model(X)
            values = buffers.values(noted)
        assert copied == expected
        assert values is not None
        assert sorted(name for _, name in values) == (
            ["num_batches_tracked", "running_mean", "running_var"] if training else []
        )
