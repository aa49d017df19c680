"""Counts what each layer of a chain keeps between the two parts of a split backward, for its weights' gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..autograd import graph_cut
from ..autograd.sparse import dense_parts
from ..autograd.split_backward import WeightGradients, backward_inputs
from ..data.arguments import call
from .memory import storages_of
from .timing import Layers, Loss, blaming, fresh, named_calls


def count_waiting(model: nn.Module, layers: Layers, loss: Loss, sample: Any) -> list[int]:
    """Bytes of each layer, the loss counted with the last one, by one forward and backward of the chain.

    Storage that several tensors of a layer share counts once, that of parameters and buffers not at all. It is 0 where
    no weight can wait: all is computed in the first part there.
    """
    state = storages_of((*model.parameters(), *model.buffers()))
    names, modules = named_calls(layers, loss)
    steps = []
    message = fresh(sample)
    with torch.enable_grad():
        for index, module in enumerate(modules):
            given = message
            with blaming(names[index], "forward"):
                output = call(module, graph_cut.alias(given))
            message, roots = graph_cut.cut(output)
            del output
            steps.append((given, roots))
        gradients: graph_cut.Gradients = [torch.ones_like(leaf) for leaf in graph_cut.leaves(message)]
        del message
        found = [0] * len(layers)
        for index in reversed(range(len(steps))):
            given, roots = steps.pop()
            with blaming(names[index], "backward"):
                waiting = backward_inputs(roots, gradients)
            gradients = [leaf.grad for leaf in graph_cut.leaves(given)]
            found[min(index, len(layers) - 1)] += _bytes(waiting, state)
    return found


def _bytes(waiting: WeightGradients, state: set[int]) -> int:
    parts = (part for held in waiting.tensors() for part in dense_parts(held))
    storages = {storage._cdata: storage for storage in (part.untyped_storage() for part in parts)}
    return sum(storage.nbytes() for key, storage in storages.items() if key not in state)
