"""What people write in constructors: a deferred construction has the values of the plain one."""

import contextlib
import copy
import math
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.deferred import assert_same_values


class Module(nn.Module):
    """A module whose constructor is a function, for assignments of any kind."""

    def __init__(self, construct: Callable[["Module"], None]) -> None:
        super().__init__()
        construct(self)


CONSTRUCTORS: list[Callable[[Module], None]] = []


def constructor(function: Callable[[Module], None]) -> Callable[[Module], None]:
    CONSTRUCTORS.append(function)
    return function


@constructor
def initialisers(m: Module) -> None:
    for name in ("orthogonal_", "trunc_normal_", "kaiming_normal_", "xavier_uniform_", "eye_"):
        layer = nn.Linear(7, 6)
        getattr(nn.init, name)(layer.weight)
        setattr(m, name, layer)
    m.sparse, m.dirac = nn.Linear(30, 20), nn.Conv2d(4, 4, 3)
    nn.init.sparse_(m.sparse.weight, 0.3)
    nn.init.dirac_(m.dirac.weight)


@constructor
def applied_function(m: Module) -> None:
    def init(part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            part.weight.data.normal_(0, 0.02)
            part.bias.data.zero_()

    m.layers = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))
    m.apply(init)


@constructor
def old_style(m: Module) -> None:
    m.p = nn.Parameter(torch.Tensor(4, 5))
    m.p.data.uniform_(-1, 1)
    m.q = nn.Parameter(torch.FloatTensor(3).fill_(2))
    m.r = nn.Parameter(torch.zeros(3) + 1e-3 * torch.rand(3))
    m.s = torch.ones(2).new_tensor([3.0])
    m.t = torch.ones(3).type("torch.DoubleTensor")


@constructor
def data_of_numpy_and_python(m: Module) -> None:
    data = np.random.randn(4, 5).astype(np.float32)
    m.register_buffer("kept", torch.from_numpy(data))
    m.p = nn.Parameter(torch.as_tensor(data * 2))
    m.register_buffer("listed", torch.tensor([1, 2, random.randint(0, 9)]))
    reused = np.zeros(3, dtype=np.float32)
    m.w = nn.Parameter(torch.empty(2, 3))
    for row in range(2):
        reused[:] = row
        m.w.data[row].copy_(torch.from_numpy(reused))


@constructor
def values_are_read(m: Module) -> None:
    rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
    m.layers = nn.ModuleList(nn.Linear(2 + int(10 * rate), 2) for rate in rates)
    sizes = torch.linspace(1, 3, 3).tolist()
    if torch.rand(1).item() > 0.3:
        m.more = nn.Linear(4, int(sizes[2]))
    m.p = nn.Parameter(torch.randn(int(torch.arange(5).numpy().sum())))
    assert torch.equal(torch.arange(3), torch.tensor([0, 1, 2]))
    assert m.p.device == torch.device("cpu")
    assert not m.p.is_meta


@constructor
def shapes_depend_on_values(m: Module) -> None:
    numbers = torch.randn(10)
    m.register_buffer("chosen", numbers[numbers > 0])
    m.register_buffer("places", torch.nonzero(numbers > 0))
    numbers[numbers > 0] = 0
    m.register_buffer("clipped", numbers)
    m.register_buffer("unique", torch.unique(torch.tensor([1, 1, 2])))


@constructor
def seeds(m: Module) -> None:
    m.a = nn.Linear(3, 3)
    state = torch.get_rng_state()
    m.b = nn.Linear(3, 3)
    torch.manual_seed(0)  # the seed that the construction started from
    m.c = nn.Linear(3, 3)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        m.d = nn.Linear(3, 3)
    m.e = nn.Linear(3, 3)
    torch.set_rng_state(state)
    m.f = nn.Linear(3, 3)
    torch.manual_seed(5)
    m.g = nn.Linear(2, 2)
    with torch.random.fork_rng():
        torch.manual_seed(5)  # the same again, for another number of draws
        m.h = nn.Linear(9, 9)
    m.i = nn.Linear(3, 3)
    m.register_buffer("seed", torch.tensor(torch.initial_seed()))


@constructor
def generators(m: Module) -> None:
    generator = torch.Generator().manual_seed(3)
    m.l = nn.Linear(3, 3)
    m.a = nn.Parameter(torch.randn(4, generator=generator))
    m.b = nn.Linear(3, 3)
    nn.init.normal_(m.b.weight, generator=generator)
    generator.manual_seed(1)
    nn.init.uniform_(m.b.bias, generator=generator)
    m.order = torch.randperm(9, generator=generator)
    generator.set_state(torch.get_rng_state())
    m.c = nn.Parameter(torch.randn(4, generator=generator))
    m.d = nn.Linear(3, 3)


@constructor
def shared_memory(m: Module) -> None:
    m.embedding, m.head = nn.Embedding(10, 4), nn.Linear(4, 10)
    m.head.weight = m.embedding.weight
    m.part = nn.Parameter(m.embedding.weight.data[:3])
    nn.init.normal_(m.part)


@constructor
def draws_that_depend_on_draws(m: Module) -> None:
    torch.multinomial(torch.rand(5), 3)
    torch.poisson(torch.rand(5) * 4)
    m.a = nn.Linear(3, 3)
    m.register_buffer("b", torch.bernoulli(torch.rand(5)))
    m.register_buffer("c", nn.functional.dropout(torch.ones(9)))
    m.register_buffer("d", torch.normal(torch.zeros(3), torch.rand(3)))
    m.register_buffer("e", torch.empty(4).exponential_())
    torch.rand(3)
    m.f = nn.Linear(3, 3)


@constructor
def tables(m: Module) -> None:
    position, places = torch.arange(8).unsqueeze(1), torch.zeros(8, 6)
    rate = torch.exp(torch.arange(0, 6, 2) * (-math.log(1e4) / 6))
    places[:, 0::2], places[:, 1::2] = torch.sin(position * rate), torch.cos(position * rate)
    m.register_buffer("places", places.unsqueeze(0), persistent=False)
    m.register_buffer("mask", torch.tril(torch.ones(4, 4)).view(1, 1, 4, 4))
    m.turns = torch.polar(torch.ones(3), torch.arange(3.0))  # a plain attribute
    m.register_buffer("back", m.turns.conj())


@constructor
def dtypes(m: Module) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    m.a = nn.Linear(4, 4)
    m.register_buffer("ones", torch.ones(3))
    torch.set_default_dtype(before)
    m.b = nn.Linear(3, 3).double()
    m.c = nn.Linear(3, 3).half().to("cpu")


@constructor
def copies(m: Module) -> None:
    m.a = nn.Linear(4, 4)
    m.b = nn.ModuleList(copy.deepcopy(m.a) for _ in range(2))
    nn.init.zeros_(m.a.weight)


_FROM_OUTSIDE = torch.arange(20.0).view(5, 4)


@constructor
def tensors_from_outside(m: Module) -> None:
    m.a = nn.Embedding.from_pretrained(_FROM_OUTSIDE, freeze=False)
    m.b = nn.Parameter(_FROM_OUTSIDE * 2 + torch.rand(4))
    m.c = nn.Parameter(torch.empty(5, 4))
    m.c.data.copy_(_FROM_OUTSIDE)


@constructor
def writes_in_place(m: Module) -> None:
    m.a = nn.Linear(3, 3)
    with torch.no_grad():
        m.a.weight.add_(torch.randn_like(m.a.weight) * 0.1).clamp_(-1, 1)
        m.a.weight /= m.a.weight.norm(dim=1, keepdim=True)
        m.a.bias.copy_(m.a.weight.sum(0))
        m.a.weight[m.a.weight.abs() < 0.3] = 0
    m.b = nn.Parameter(torch.randn(4, 4).t_().unsqueeze_(0))
    m.b.data = m.b.data * 2
    m.b.data[0, 1, 2] = 5.0
    m.b.data[0, :, 2].uniform_()
    m.frozen = nn.Linear(4, 4).requires_grad_(False)
    m.scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))


@constructor
def forward_and_backward(m: Module) -> None:
    m.a = nn.Linear(3, 3)
    m.register_buffer("b", m.a(torch.rand(2, 3)).detach())
    x: Tensor = torch.randn(3, requires_grad=True)
    (x * x).sum().backward()
    m.register_buffer("c", x.grad)


_SAVED = Path(tempfile.mkdtemp()) / "state.pt"
torch.save({"weight": torch.ones(3, 3), "bias": torch.arange(3.0)}, _SAVED)


@constructor
def saved_tensors(m: Module) -> None:
    state = torch.load(_SAVED)
    m.table = state["bias"] * 2
    m.a = nn.Linear(3, 3)
    m.a.load_state_dict(state)
    m.b = nn.Linear(3, 3)
    m.b.load_state_dict(state, assign=True)


@constructor
def errors_that_are_caught(m: Module) -> None:
    m.a = nn.Parameter(torch.zeros(3))
    with contextlib.suppress(RuntimeError):
        m.a.data.copy_(torch.ones(4))
        m.a.data.fill_(7)
    with contextlib.suppress(RuntimeError):
        m.b = nn.Parameter(torch.ones(3) + torch.ones(4))


@constructor
def sizes_from_a_forward(m: Module) -> None:
    m.a = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    m.b = nn.Linear(m.a(torch.zeros(1, 1, 8, 8)).shape[1], 3)
    m.c = nn.LazyLinear(4)
    m.c(torch.zeros(2, 3))
    m.register_buffer("d", torch.vmap(lambda x: x * 2)(torch.rand(3, 2)))


@constructor
def tensors_of_inference_mode(m: Module) -> None:
    with torch.inference_mode():
        m.a = nn.Linear(3, 3)
        m.table = torch.arange(3) / 3
        m.register_buffer("b", torch.rand(3), persistent=False)


@pytest.mark.parametrize("construct", CONSTRUCTORS, ids=lambda construct: construct.__name__)
def test_constructors(construct):
    assert_same_values(lambda: Module(construct))
