"""A first layer that takes several arguments gets them, split into micro-batches, from every entrance."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipepart
from pipepart import Arguments, Pipeline
from tests.support import plain
from tests.support.chains import cut_by_hand

pytestmark = pytest.mark.usefixtures("short_profiles")


class Embed(nn.Module):
    """Embeds tokens ``[samples, positions]``, those that are masked as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        embedded = self.table(ids) * scale
        return embedded if attention_mask is None else embedded * attention_mask[..., None]


def network() -> nn.Sequential:
    return plain.in_double([Embed(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)])


IDS = torch.randint(9, (7, 5))
MASK = torch.randint(2, (7, 5)).double()
TARGET = torch.randn(7, 5, 2).double()
LOSS = nn.MSELoss()


@pytest.mark.parametrize(
    "sample", [(IDS, MASK), Arguments(IDS, attention_mask=MASK)], ids=["tuple", "arguments"]
)
def test_auto_takes_a_sample_in_every_form(sample):
    model, given = network(), Arguments.of(sample)
    reference = plain.twin(model)
    with Pipeline.auto(model, sample, target=TARGET, loss_fn=LOSS, micro_batches=2) as pipe:
        pipe.step(*given.args, target=TARGET, **given.kwargs)
    LOSS(plain.call(reference, given), TARGET).backward()
    plain.assert_close(plain.gradients(model), plain.gradients(reference))


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "none": ((), {}, "0 positional arguments: missing a required argument: 'ids'"),
    "three": ((IDS, MASK, MASK), {"target": TARGET}, "3 positional arguments: too many positional arguments"),
    "target by place": ((IDS, MASK, TARGET), {}, r"3 positional arguments.*by its name: target="),
    "unknown": ((IDS,), {"mask": MASK}, "1 positional arguments and the keywords mask: .* 'mask'"),
    "twice": ((IDS,), {"ids": IDS}, "multiple values for argument 'ids'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_arguments_that_the_first_layer_does_not_take_are_refused_before_anything_runs(case):
    args, kwargs, message = WRONG[case]
    model = network()
    ran = []
    model[1].register_forward_hook(lambda *_: ran.append(1))
    sample = Arguments(*args, **{name: value for name, value in kwargs.items() if name != "target"})
    with cut_by_hand(model, [1], loss_fn=LOSS) as pipe:
        entrances: list[Callable[[], Any]] = [
            lambda: pipe.step(*args, **kwargs),
            lambda: pipepart.profile(model, sample),
            lambda: Pipeline.auto(model, sample),
            lambda: pipepart.check(model, sample),
        ]
        if "target" not in kwargs:
            entrances.append(lambda: pipe(*args, **kwargs))
        for entrance in entrances:
            with pytest.raises(TypeError, match=rf"first layer '0' \(Embed\) takes \(ids.*{message}"):
                entrance()
    assert not ran


def test_a_model_whose_argument_is_a_dict_says_how_a_sample_is_given_and_how_it_was_called():
    class OfOneBatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 1)])

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.blocks[1](self.blocks[0](batch["x"]))

    batch = {"x": torch.randn(4, 3)}
    with pytest.raises(TypeError, match=r"missing a required argument: 'batch'.* the sample is \(dict,\)"):
        pipepart.profile(OfOneBatch(), batch, seconds=0)
    assert len(pipepart.profile(OfOneBatch(), (batch,), seconds=0).layers) == 2
    with pytest.raises(TypeError) as caught:
        pipepart.profile(OfOneBatch(), [torch.randn(4, 3), torch.randn(4, 3)], seconds=0)
    assert "called as OfOneBatch(list of 2)" in "".join(caught.value.__notes__)
    with pytest.raises(TypeError, match=r"key 3.*pipepart\.Arguments\(sample\)"):
        Arguments.of({3: IDS})
    assert Arguments.of(Arguments({3: IDS})).input == {3: IDS}
