"""What a message to another rank is sent as."""

from itertools import product
from typing import Any

import torch

from pipepart.runtime.transport.wire import pack, whole_buffer


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
