"""A backward in two parts has the numbers of one in one part."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.support import plain
from tests.support.two_parts import SPLITS, Calls, assert_same_as_fused, inputs, train


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
    assert_same_as_fused(model, inputs(7, 6), 1)


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


@pytest.mark.parametrize("more", [0, 1, 3])
def test_weights_used_twice_do_not_wait(more: int):
    torch.manual_seed(0)
    assert_same_as_fused(TiedTwice(more), inputs(7, 6), 0)


def test_an_embedding_tied_to_the_head():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10))
    model[2].weight = model[0].weight
    assert_same_as_fused(model, [torch.randint(10, (3, 6)) for _ in range(2)], 1)


@pytest.mark.parametrize(
    ("function", "waits"),
    [
        (lambda x, a: F.linear(F.linear(x, a[:6]), a[6:]), 0),
        (lambda x, a: F.linear(F.linear(x, a.chunk(2)[0]), a.chunk(2)[1]), 0),
        (lambda x, a: F.linear(F.linear(x, a.view(2, 6, 6)[0]), a.view(2, 6, 6).unbind()[1]), 0),
        (lambda x, a: torch.cat([F.linear(x, part) for part in a.split([4, 8])], -1), 0),
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
    for layers, waits in ((model, 3), (tied, 0), (nn.Sequential(nn.Conv1d(6, 5, 3), nn.Conv1d(5, 2, 3)), 2)):
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
    assert_same_as_fused(Cross(), inputs(2, 5, 8), 4 if separate else 1)


def test_an_input_used_twice_and_an_output_written_into():
    torch.manual_seed(0)
    a, b, c = torch.randn(6, 6), torch.randn(6, 6), torch.randn(6)

    def layer(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        y = F.linear(x, a, c)
        y[:, 0] += 1
        y.sigmoid_()
        return F.linear(x, b) * y + x

    assert_same_as_fused(Calls(layer, a=a, b=b, c=c), inputs(7, 6), 2)
