"""The unpipelined model on one thread: the time to beat and the gradients to match."""

import copy

from torch import Tensor

from benchmarks.contender import Course, InThisProcess


class Plain(InThisProcess):
    """Forward and backward of the mini-batch in `micro_batches` pieces, one after the other."""

    def __init__(self, course: Course, *, micro_batches: int = 1) -> None:
        self.name = "plain" if micro_batches == 1 else "plain, micro-batches"
        self._model = copy.deepcopy(course.workload.model)
        self._loss_fn = course.workload.loss_fn
        self._micro_batches = micro_batches
        self._pairs = list(
            zip(
                course.workload.sample.chunk(micro_batches),
                course.workload.target.chunk(micro_batches),
                strict=True,
            )
        )

    def step(self) -> None:
        self._model.zero_grad(set_to_none=True)
        for sample, target in self._pairs:
            loss = self._loss_fn(self._model(sample), target)
            (loss / self._micro_batches).backward()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}
