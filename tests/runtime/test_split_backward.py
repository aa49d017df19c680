"""A backward in two parts has the numbers of one in one part, and holds no more than its second part needs."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from pipepart import boundary
from pipepart.runtime.blame import failed_layers
from pipepart.runtime.split_backward import WeightGradients, backward_inputs
from tests import plain

# An older torch does not say whether a saved tensor is made by a hook: all is left to autograd there.
_NODE: Any = nn.Linear(1, 1)(torch.ones(1, 1)).grad_fn
SPLITS = hasattr(_NODE._raw_saved_mat1, "unpack_hook")
splits = pytest.mark.skipif(not SPLITS, reason="this torch does not say how a saved tensor comes about")


class Outcome(NamedTuple):
    """What two micro-batches leave behind, and how many uses of weights waited in all."""

    inputs: dict[str, Tensor | None]
    weights: dict[str, Tensor | None]
    waited: int


def train(
    model: nn.Module, samples: list[Tensor], split: bool, context: Callable[[], Any] = nullcontext
) -> Outcome:
    """Forward and backward of each sample with made-up gradients of the output; all second parts at the end."""
    generator = torch.Generator().manual_seed(1)
    leaves = [sample.detach().requires_grad_(sample.requires_grad) for sample in samples]
    waiting: list[WeightGradients] = []
    for leaf in leaves:
        with context():
            message, roots = boundary.cut(model(leaf))
        gradients = [
            torch.randn(part.shape, generator=generator).to(part) for part in boundary.leaves(message)
        ]
        if split:
            waiting.append(backward_inputs(roots, gradients))
        else:
            boundary.backward(roots, gradients)
    waited = sum(len(part) for part in waiting)
    for part in waiting:
        part.accumulate()
    return Outcome(
        {str(index): leaf.grad for index, leaf in enumerate(leaves)}, plain.gradients(model), waited
    )


def assert_same_as_fused(
    model: nn.Module, samples: list[Tensor], waits: int, context: Callable[[], Any] = nullcontext
) -> None:
    """Both ways give the same bits, and ``waits`` uses of weights waited in each micro-batch."""
    fused = train(plain.twin(model), samples, False, context)
    ours = train(plain.twin(model), samples, True, context)
    plain.assert_same(ours.inputs, fused.inputs)
    plain.assert_same(ours.weights, fused.weights)
    assert any(gradient is not None for gradient in fused.weights.values())
    assert ours.waited == (waits * len(samples) if SPLITS else 0)


def inputs(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for _ in range(2)]


class Calls(nn.Module):
    """A layer that is one function of its input and of its parameters."""

    def __init__(self, function: Callable[..., Tensor], **parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **dict(self.named_parameters()))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3, groups=2)
    )


KNOWN_LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...], int]] = [
    (lambda: nn.Linear(6, 5), (7, 6), 1),
    (lambda: nn.Linear(6, 5, bias=False), (7, 6), 1),
    (lambda: nn.Linear(6, 5), (2, 7, 6), 1),
    (lambda: nn.Linear(6, 5, bias=False), (2, 7, 6), 1),
    (lambda: nn.Conv1d(6, 5, 3), (2, 6, 9), 1),
    (lambda: nn.Conv2d(6, 4, 3, stride=2, padding=1, groups=2), (2, 6, 9, 9), 1),
    (lambda: nn.Conv3d(2, 3, 2, dilation=2, bias=False), (2, 2, 5, 5, 5), 1),
    (lambda: nn.ConvTranspose1d(6, 5, 3, stride=2, output_padding=1), (2, 6, 9), 1),
    (lambda: nn.ConvTranspose2d(6, 5, 3), (2, 6, 5, 5), 1),
    (lambda: nn.ConvTranspose3d(2, 3, 2), (2, 2, 3, 3, 3), 1),
    (conv_net, (2, 3, 8, 8), 2),
    (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 4)), (7, 6), 2),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True), (3, 5, 8), 4),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0), (5, 3, 8), 4),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("layer", "shape", "waits"), KNOWN_LAYERS)
def test_known_layers_wait_and_have_the_same_bits(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], waits: int, dtype: torch.dtype
):
    torch.manual_seed(0)
    assert_same_as_fused(layer().to(dtype), inputs(*shape, dtype=dtype), waits)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_an_embedding_waits(options: dict[str, Any]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, **options), nn.Linear(4, 3))
    assert_same_as_fused(model, [torch.randint(10, (3, 6)) for _ in range(2)], 2)


def test_a_sparse_gradient_stays_sparse():
    torch.manual_seed(0)
    model = nn.Embedding(10, 4, sparse=True)
    samples = [torch.randint(10, (3, 6)) for _ in range(2)]
    fused, ours = (train(plain.twin(model), samples, split) for split in (False, True))
    theirs, found = fused.weights["weight"], ours.weights["weight"]
    assert theirs is not None
    assert found is not None
    assert found.is_sparse
    assert found.to_dense().equal(theirs.to_dense())
    assert ours.waited == (2 if SPLITS else 0)


def test_the_first_layer_waits_though_its_input_asks_for_no_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    assert_same_as_fused(model, inputs(7, 6, grad=False), 2)


def test_functions_that_a_layer_calls_itself_wait():
    torch.manual_seed(0)
    model = Calls(
        lambda x, a, b, c: torch.addmm(c, F.linear(x, a).tanh(), b.t()) @ a,
        a=torch.randn(9, 6),
        b=torch.randn(9, 9),
        c=torch.randn(1, 9),
    )
    assert_same_as_fused(model, inputs(7, 6), 3)


@pytest.mark.parametrize(
    ("frozen", "waits"),
    [(["0.weight"], 1), (["0.bias"], 2), (["2.weight", "2.bias"], 1), (["0.weight", "0.bias", "2.bias"], 1)],
)
def test_frozen_weights_and_biases_get_nothing_and_a_bias_alone_does_not_wait(frozen: list[str], waits: int):
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    convolution = nn.Sequential(nn.Conv1d(6, 5, 3), nn.Tanh(), nn.Conv1d(5, 5, 3))
    for model, shape in ((linear, (7, 6)), (convolution, (2, 6, 9))):
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        assert_same_as_fused(model, inputs(*shape), waits)


class TiedTwice(nn.Module):
    """One layer used twice, its weight used a third time, by itself, if asked for."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.layer(x).tanh())
        for _ in range(self.more):
            x = F.linear(x.tanh(), self.layer.weight)
        return x


@pytest.mark.parametrize(("more", "waits"), [(0, 2), (1, 0), (3, 0)])
def test_weights_used_twice_wait_and_are_added_up_first(more: int, waits: int):
    torch.manual_seed(0)
    assert_same_as_fused(TiedTwice(more), inputs(7, 6), waits)


def test_an_embedding_tied_to_the_head():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10))
    model[2].weight = model[0].weight
    assert_same_as_fused(model, [torch.randint(10, (3, 6)) for _ in range(2)], 3)


@pytest.mark.parametrize(
    ("function", "waits"),
    [
        (lambda x, a: F.linear(F.linear(x, a[:6]), a[6:]), 2),
        (lambda x, a: F.linear(F.linear(x, a.chunk(2)[0]), a.chunk(2)[1]), 2),
        (lambda x, a: F.linear(F.linear(x, a.view(2, 6, 6)[0]), a.view(2, 6, 6).unbind()[1]), 2),
        (lambda x, a: torch.cat([F.linear(x, part) for part in a.split([4, 8])], -1), 2),
        (lambda x, a: F.conv1d(x.unsqueeze(-1), a.unsqueeze(-1)), 1),
        (lambda x, a: F.linear(x, a.to(torch.float64).to(torch.float32)), 1),
        (lambda x, a: F.linear(x, a * 2), 0),
        (lambda x, a: F.linear(x, a) * a.sum(), 0),
        (lambda x, a: F.linear(F.linear(x, a), a.t() * 2), 0),
        (lambda x, a: F.linear(x, a, x.sum() * a[:, 0]), 0),
        (lambda x, a: F.linear(x, a, x.mean() * torch.ones(12)), 1),
        (lambda x, a: F.conv1d(x.unsqueeze(-1), a.unsqueeze(-1), x.mean() * torch.ones(12)), 0),
        (lambda x, a: F.linear(x, (b := a.t().t())) + b.sum(1), 0),
        (lambda x, a: torch.addmm(x, x, a[:6], alpha=2), 0),
        (lambda x, a: torch.addmm(x, x, a[:6]), 1),
        (lambda x, a: a @ x.t(), 0),
        (lambda x, a: a @ a.t() @ x.sum(0).repeat(2), 0),
        (lambda x, a: a[:6] @ a[6:], 0),
        (lambda x, a: torch.einsum("bi,oi->bo", x, a), 0),
        (lambda x, a: x @ a[:6].t() + x, 1),
    ],
)
def test_views_of_weights_wait_and_what_is_made_of_them_does_not(function: Callable[..., Tensor], waits: int):
    torch.manual_seed(0)
    assert_same_as_fused(Calls(function, a=torch.randn(12, 6)), inputs(7, 6), waits)


@pytest.mark.parametrize(
    "parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
def test_weights_that_are_computed_do_not_wait(parametrize: Callable[[nn.Module], nn.Module]):
    torch.manual_seed(0)
    model = nn.Sequential(parametrize(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 4))
    assert_same_as_fused(model, inputs(7, 6), 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast(dtype: torch.dtype):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 4, bias=False)
    )
    tied = TiedTwice(0)
    for layers, waits in ((model, 3), (tied, 2), (nn.Sequential(nn.Conv1d(6, 5, 3), nn.Conv1d(5, 2, 3)), 2)):
        samples = inputs(2, 6, 6)
        assert_same_as_fused(layers, samples, waits, lambda: torch.autocast("cpu", dtype))


def test_under_autocast_of_each_layer_by_itself():
    class Casts(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(input).float()

    torch.manual_seed(0)
    assert_same_as_fused(nn.Sequential(Casts(6, 9), nn.Tanh(), Casts(9, 4)), inputs(7, 6), 2)


@pytest.mark.parametrize(
    ("layer", "waits"),
    # The weights of the state are used in each of the four steps, those of the input once.
    [(nn.LSTM, 0), (nn.GRU, 1), (nn.RNN, 1), (lambda *widths: nn.Bilinear(6, *widths), 0)],
)
def test_recurrent_and_other_layers_beside_a_known_one(layer: Callable[..., nn.Module], waits: int):
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.layer = nn.Linear(6, 6), layer(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.before(x)
            return self.layer(y, y) if isinstance(self.layer, nn.Bilinear) else self.layer(y)[0]

    torch.manual_seed(0)
    assert_same_as_fused(Around(), inputs(4, 3, 6), 1 + waits)


@pytest.mark.parametrize("separate", [False, True])
def test_attention_with_a_key_of_its_own(separate: bool):
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = 6 if separate else 8
            self.attention = nn.MultiheadAttention(8, 2, kdim=width, vdim=width, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            key = x[..., :6] if separate else x * 2
            return self.attention(x, key, key)[0]

    torch.manual_seed(0)
    assert_same_as_fused(Cross(), inputs(2, 5, 8), 4 if separate else 3)


def test_an_input_used_twice_and_an_output_written_into():
    torch.manual_seed(0)
    a, b, c = torch.randn(6, 6), torch.randn(6, 6), torch.randn(6)

    def layer(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        y = F.linear(x, a, c)
        y[:, 0] += 1
        y.sigmoid_()
        return F.linear(x, b) * y + x

    assert_same_as_fused(Calls(layer, a=a, b=b, c=c), inputs(7, 6), 2)


def test_hooks_on_tensors_on_the_way_change_both_parts():
    def layer(x: Tensor, a: Tensor) -> Tensor:
        y = F.linear(x, a)
        y.register_hook(lambda gradient: gradient * 3)
        y.grad_fn.register_prehook(lambda gradients: (gradients[0] + 1,))  # type: ignore[union-attr]
        return y.tanh()

    torch.manual_seed(0)
    assert_same_as_fused(Calls(layer, a=torch.randn(6, 6)), inputs(7, 6), 1)


def test_full_backward_hooks_of_modules():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    model[2].register_full_backward_hook(lambda module, inner, outer: (inner[0] * 2,))
    assert_same_as_fused(model, inputs(7, 6), 2)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameters_hook_is_called_once_a_backward_with_the_whole_gradient(kind: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    samples = inputs(7, 6)
    seen: dict[bool, list[Tensor]] = {False: [], True: []}
    outcomes = {}
    for split, calls in seen.items():
        copy = plain.twin(model)
        hook = getattr(copy.get_parameter("2.weight"), kind)
        hook(
            lambda tensor, calls=calls: calls.append((tensor if tensor.grad is None else tensor.grad).clone())
        )
        outcomes[split] = train(copy, samples, split)
    plain.assert_same(outcomes[True].weights, outcomes[False].weights)
    assert len(seen[True]) == 2
    assert all(found.equal(expected) for found, expected in zip(seen[True], seen[False], strict=True))
    assert outcomes[True].waited == (2 if SPLITS else 0)  # the layer without a hook


def test_hooks_that_wait_for_several_gradients_are_called():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    calls = []
    torch.autograd.graph.register_multi_grad_hook(
        tuple(model.parameters()), lambda got: calls.append(len(got))
    )
    train(model, inputs(7, 6), True)
    assert calls == [4, 4]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.outer = nn.Linear(6, 6)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize(("reentrant", "waits"), [(False, 1), (True, 0)])
def test_a_checkpoint_inside_is_left_to_autograd(reentrant: bool, waits: int):
    torch.manual_seed(0)
    assert_same_as_fused(Checkpointed(reentrant), inputs(7, 6), waits)


def test_tensors_saved_through_hooks_are_left_to_autograd():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    assert_same_as_fused(model, inputs(7, 6), 0, lambda: torch.autograd.graph.save_on_cpu())


def test_a_gradient_penalty_inside():
    def layer(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = F.linear(F.linear(x, a).tanh(), b)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.square().sum()

    torch.manual_seed(0)
    weights = {"a": torch.randn(9, 6), "b": torch.randn(6, 9)}
    assert_same_as_fused(Calls(layer, **weights), inputs(7, 6), 4)


def test_function_transforms_inside():
    def layer(x: Tensor, a: Tensor) -> Tensor:
        per_sample = torch.vmap(lambda row: torch.func.grad(lambda r: F.linear(r, a).tanh().sum())(row))(x)
        return torch.vmap(lambda row: F.linear(row, a))(per_sample + x)

    torch.manual_seed(0)
    model = Calls(layer, a=torch.randn(9, 6))
    fused, ours = (train(plain.twin(model), inputs(7, 6), split) for split in (False, True))
    plain.assert_same(ours.weights, fused.weights)
    plain.assert_same(ours.inputs, fused.inputs)


def test_complex_weights_are_left_to_autograd():
    torch.manual_seed(0)
    model = nn.Linear(6, 5, dtype=torch.complex64)
    assert_same_as_fused(model, inputs(7, 6, dtype=torch.complex64), 0)


def test_a_stage_without_known_layers_has_no_second_part():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(6), nn.PReLU())
    assert_same_as_fused(model, inputs(7, 6), 0)


def test_stages_of_several_threads_do_not_meet():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)) for _ in range(8)]
    samples = [[torch.randn(7, 6, requires_grad=True) for _ in range(20)] for _ in models]
    with ThreadPoolExecutor(4) as pool:
        ours = list(
            pool.map(
                lambda pair: train(plain.twin(pair[0]), pair[1], True), zip(models, samples, strict=True)
            )
        )
    for model, own, outcome in zip(models, samples, ours, strict=True):
        fused = train(plain.twin(model), own, False)
        plain.assert_same(outcome.weights, fused.weights)
        plain.assert_same(outcome.inputs, fused.inputs)


def test_the_second_part_may_run_in_another_thread():
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    x = inputs(7, 6)[0]
    fused = plain.twin(model)
    fused(x).sum().backward()
    _, roots = boundary.cut(model(x))
    part = backward_inputs(roots, [torch.ones(7, 5)])
    with ThreadPoolExecutor(1) as pool:
        pool.submit(part.accumulate).result()
    plain.assert_same(plain.gradients(model), plain.gradients(fused))


def test_an_output_without_a_gradient_takes_no_part():
    torch.manual_seed(0)
    x = inputs(7, 6)[0]
    first, second = nn.Linear(6, 5), nn.Linear(6, 4)
    _, roots = boundary.cut((first(x), second(x)))
    part = backward_inputs(roots, [None, torch.ones(7, 4)])
    part.accumulate()
    assert first.weight.grad is None
    assert second.bias.grad is not None
    assert second.bias.grad.equal(torch.full((4,), 7.0))


def test_a_graph_without_roots_has_no_backward():
    part = backward_inputs((), ())
    part.accumulate()
    assert len(part) == 0


@splits
def test_hooks_on_the_input_see_its_gradient_in_the_first_part():
    torch.manual_seed(0)
    x = inputs(7, 6)[0]
    seen: list[Tensor] = []
    x.register_hook(seen.append)
    layer = nn.Linear(6, 5)
    _, roots = boundary.cut(layer(x))
    part = backward_inputs(roots, [torch.ones(7, 5)])
    (gradient,) = seen
    assert gradient.equal(torch.ones(7, 5) @ layer.weight.detach())
    assert x.grad is not None
    assert x.grad.equal(gradient)
    assert layer.weight.grad is None
    part.accumulate()
    assert len(seen) == 1
    assert layer.weight.grad is not None


@splits
def test_an_input_written_into_between_the_parts_is_an_error():
    held = torch.ones(7, 6)
    layer = nn.Linear(6, 5)
    _, roots = boundary.cut(layer(held))
    part = backward_inputs(roots, [torch.ones(7, 5)])
    held += 1
    with pytest.raises(RuntimeError, match="has been written into"):
        part.accumulate()


def test_an_input_written_into_before_the_backward_is_autograds_error():
    held = torch.ones(7, 6)
    _, roots = boundary.cut(nn.Linear(6, 5)(held))
    held += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward_inputs(roots, [torch.ones(7, 5)])


@pytest.fixture
def no_collector():
    """What is to be freed is freed by its last reference, not when the collector comes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Token:
    """Something to hold."""


class Marked(torch.autograd.Function):
    """The identity, with a node that lives as long as its token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * 1, None


@splits
@pytest.mark.usefixtures("no_collector")
def test_only_what_the_second_part_needs_is_held_until_then():
    torch.manual_seed(0)
    held: dict[str, weakref.ref[Any]] = {}

    def watch(name: str, tensor: Tensor) -> Tensor:
        held[name] = weakref.ref(tensor.untyped_storage())
        return tensor

    def mark(name: str, tensor: Tensor) -> Tensor:
        token = Token()
        held[name] = weakref.ref(token)
        return Marked.apply(tensor, token)

    def alive() -> set[str]:
        return {name for name, reference in held.items() if reference() is not None}

    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    given = watch("first's input", torch.randn(7, 6))
    hidden = watch("last's input", mark("node between", watch("first's output", first(given)).exp()).sin())
    value = mark("node behind", watch("last's output", last(hidden)).sin())
    _, roots = boundary.cut(value)
    del given, hidden, value
    assert alive() == {*held} - {"first's output"}  # exp keeps what it gave, sin what it got

    gradients = [watch("gradient of the output", torch.randn(7, 6))]
    part = backward_inputs(roots, gradients)
    del roots, gradients
    assert alive() == {"first's input", "last's input"}
    assert first.weight.grad is None

    part.accumulate()
    assert alive() == set()
    assert first.weight.grad is not None


@pytest.mark.usefixtures("no_collector")
def test_a_failed_first_part_holds_nothing():
    def fail(gradient: Tensor) -> Tensor:
        raise ValueError("no")

    torch.manual_seed(0)
    hidden = nn.Linear(6, 6)(torch.randn(7, 6))
    hidden.register_hook(fail)
    output = nn.Linear(6, 6)(hidden)
    held = weakref.ref(hidden.untyped_storage())
    _, roots = boundary.cut(output)
    del hidden, output
    with pytest.raises(ValueError, match="no"):
        backward_inputs(roots, [torch.ones(7, 6)])
    del roots
    assert held() is None


def test_a_failure_in_the_first_part_is_blamed_on_the_layer_that_failed():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise ValueError("on purpose")

    outputs = [nn.Linear(6, 6)(torch.randn(7, 6))]
    for layer in (Failing.apply, nn.Linear(6, 6)):
        outputs.append(layer(outputs[-1]))
    _, roots = boundary.cut(outputs[-1])
    with pytest.raises(ValueError, match="on purpose") as caught:
        backward_inputs(roots, [torch.ones(7, 6)])
    assert failed_layers([output.grad_fn for output in outputs], caught.value) == [1]
