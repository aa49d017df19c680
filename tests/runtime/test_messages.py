"""Messages between stages: how gradients are laid out, and what a message to another rank is sent as."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipepart.runtime.transport.wire import pack, whole_buffer
from tests.support import plain
from tests.support.chains import cut_by_hand


class Strides(nn.Module):
    """Notes the strides of the gradients of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        y.register_hook(lambda gradient: self.seen.append(gradient.stride()))
        return y


class Turned(nn.Linear):
    """Multiplies from the left, so that the gradient of its input is a transposed matrix."""

    def forward(self, input: Tensor) -> Tensor:
        return (self.weight @ input.t().contiguous()).t()


@pytest.mark.parametrize("after", [lambda: Turned(6, 6), nn.Tanh], ids=["turned", "as it is"])
def test_a_gradient_comes_back_in_the_layout_that_it_has_without_stages(
    after: Callable[[], nn.Module],
) -> None:
    """In every micro-batch and step, not only where a stage first sees its input: sums depend on the layout."""
    model = nn.Sequential(nn.Linear(6, 6), Strides(), after(), nn.Linear(6, 6))
    reference = plain.twin(model)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    with cut_by_hand(model, [2], loss_fn=nn.MSELoss(), micro_batches=4) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
            plain.micro_batched_step(reference, x, y, nn.MSELoss(), 4)
    assert len(model[1].seen) == 8  # type: ignore[arg-type]
    assert model[1].seen == reference[1].seen  # type: ignore[union-attr]


def test_a_message_is_sent_as_its_one_tensor_only_if_its_form_is_the_known_one() -> None:
    one = torch.randn(4, 6)
    tensors = [
        *(one, one.double(), one.t(), one[:2], torch.randn(6, 4), one.clone().requires_grad_()),
        *(torch.zeros(4, 6, dtype=torch.int32), torch.randn(4, 12)[:, ::2]),
    ]
    messages: list[Any] = [*tensors, *([tensor] for tensor in tensors), [one, one], [None], [], (one,)]
    for message, known in product(messages, messages):
        (form, buffers), (known_form, _) = pack(message), pack(known)
        found = whole_buffer(message, known_form, torch.device("cpu"))
        assert (found is not None) == (form == known_form and form.whole)
        if found is not None:
            assert found.data_ptr() == buffers[0].data_ptr()
            assert found.nbytes == buffers[0].nbytes
