"""`python -m benchmarks.minimal_loop`: CPU time per action of pipepart beside the smallest loop that pipelines at all.

The smallest loop has one thread a device, a queue of messages for each, stages that are cut by ``detach``, one call of
autograd's engine a backward, and a note on the exception of a failed action. The difference is all else that pipepart
does. Both are compared with training micro-batch by micro-batch on one thread.
"""

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from threading import Thread
from typing import Annotated, Any, Self

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.nn import functional as F

import pipepart
import schedules
from schedules import Action, Kind

LAYERS = 4
MICRO_BATCHES = 64
WIDTH = 8

Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[], object]


class Own(nn.Module):
    """A layer of the user's own type."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return self.linear(x)


def torchs() -> nn.Module:
    """Return a layer of torch's."""
    return nn.Linear(WIDTH, WIDTH)


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    """Compute a loss of the user's own, around one of torch's."""
    return F.cross_entropy(output, target)


class MinimalLoop:
    """Trains stages under a schedule in threads, with nothing but messages, cuts and notes on errors.

    Args:
        model: a chain of layers, cut into equal stages.
        devices: the number of threads and of stages.
        loss: of a micro-batch.
    """

    def __init__(self, model: nn.Sequential, devices: int, loss: Loss) -> None:
        layers = list(model)
        self._apart = len(layers) // devices
        self._stages = [layers[at : at + self._apart] for at in range(0, len(layers), self._apart)]
        self._loss = loss
        self._rows = schedules.build("1f1b", devices=devices, micro_batches=MICRO_BATCHES).actions
        self._jobs: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in self._rows]
        self._threads: list[Thread] = []

    def __enter__(self) -> Self:
        self._threads = [Thread(target=_work, args=(jobs,), daemon=True) for jobs in self._jobs]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        for jobs, thread in zip(self._jobs, self._threads, strict=True):
            jobs.put(None)
            thread.join()

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Run forward and backward of all micro-batches; return the loss."""
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        mails = [_Mail() for _ in self._rows]
        losses: list[Tensor] = []
        weight = torch.tensor(1 / len(inputs))
        for stage, (jobs, row) in enumerate(zip(self._jobs, self._rows, strict=True)):
            run = self._actions(stage, mails, inputs, targets, losses, weight)
            jobs.put(_job(row, run, done, mails))
        for failure in [done.get() for _ in self._rows]:
            if failure is not None:
                raise failure
        return torch.stack(losses).mean()

    def _actions(
        self,
        stage: int,
        mails: "list[_Mail]",
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        losses: list[Tensor],
        weight: Tensor,
    ) -> dict[Kind, Callable[[Any], None]]:
        layers, mail, loss = self._stages[stage], mails[stage], self._loss
        is_first, is_last = stage == 0, stage == len(self._stages) - 1
        stash: dict[int, tuple[Tensor, GradientEdge]] = {}

        def forward(k: int) -> None:
            entered = value = inputs[k] if is_first else mail.take((Kind.F, k))
            for layer in layers:
                value = layer(value)
            if is_last:
                value = loss(value, targets[k])
                losses.append(value.detach())
            stash[k] = entered, GradientEdge(value.grad_fn, value.output_nr)  # type: ignore[arg-type]
            if not is_last:
                mails[stage + 1].put((Kind.F, k), value.detach().requires_grad_())

        def backward(k: int) -> None:
            entered, root = stash.pop(k)
            gradient = weight if is_last else mail.take((Kind.B, k))
            _engine_run_backward(
                (root,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
            if not is_first:
                mails[stage - 1].put((Kind.B, k), entered.grad)

        return {Kind.F: forward, Kind.B: backward}


class _Stopped(Exception):
    """Another stage has failed."""


class _Mail:
    def __init__(self) -> None:
        self._arrived: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        self._stored: dict[Any, Any] = {}

    def put(self, key: Any, message: Any) -> None:
        self._arrived.put((key, message))

    def take(self, wanted: Any) -> Any:
        if wanted in self._stored:
            return self._stored.pop(wanted)
        while True:
            key, message = self._arrived.get()
            if key == wanted:
                return message
            if key is None:
                self.put(None, None)
                raise _Stopped
            self._stored[key] = message


def _job(
    row: Sequence[Action],
    run: dict[Kind, Callable[[Any], None]],
    done: SimpleQueue[BaseException | None],
    mails: Sequence[_Mail],
) -> Callable[[], None]:
    def job() -> None:
        action = None
        try:
            for action in row:
                run[action.kind](action.micro_batch)
        except _Stopped:
            done.put(None)
        except BaseException as error:
            error.add_note(f"in action {action}")
            for mail in mails:
                mail.put(None, None)
            done.put(error)
        else:
            done.put(None)

    return job


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    torch.set_num_threads(1)
    while (job := jobs.get()) is not None:
        job()


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps a round; the least of all rounds is shown.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in which all take turns.")] = 15,
) -> None:
    """Print the CPU microseconds per action of the plain loop, the minimal loop and pipepart."""
    torch.set_num_threads(1)
    table = Table("devices", "layers", "loss", "plain", "minimal", "pipepart", "beyond minimal", "ratio")
    for devices in (1, 2):
        for layer, loss in ((torchs, F.cross_entropy), (Own, F.cross_entropy), (torchs, own_loss)):
            found = _least(_contenders(devices, layer, loss), steps, rounds)
            plain, minimal, piped = (1e6 * seconds / (2 * devices * MICRO_BATCHES) for seconds in found)
            row = (f"{one:.1f}" for one in (plain, minimal, piped, piped - minimal))
            names = str(devices), layer.__name__, loss.__name__
            table.add_row(*names, *row, f"{piped / minimal:.2f}")
    Console(width=110).print(table)


def _contenders(
    devices: int, layer: Callable[[], nn.Module], loss: Loss
) -> list[tuple[Step, AbstractContextManager[object]]]:
    """Return one step of the plain loop, the minimal loop and pipepart, and the block that each needs.

    The threads of the minimal loop end with its turn: beside other threads, pipepart's workers take shorter turns.
    """
    torch.manual_seed(0)
    x, y = torch.randn(MICRO_BATCHES * 4, WIDTH), torch.randint(WIDTH, (MICRO_BATCHES * 4,))
    models = [nn.Sequential(*(layer() for _ in range(LAYERS))) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    inputs, targets = x.split(4), y.split(4)
    minimal = MinimalLoop(models[1], devices, loss)
    cluster = pipepart.Cluster.virtual(devices, threads=1)
    names, apart = [name for name, _ in models[2].named_children()], LAYERS // devices
    stages = tuple(
        pipepart.planning.StagePlan(layers=tuple(names[at : at + apart]), device=device.name)
        for at, device in zip(range(0, LAYERS, apart), cluster.devices, strict=True)
    )
    plan = pipepart.Plan(stages=stages, cluster=cluster, schedule="1f1b", micro_batches=MICRO_BATCHES)
    pipe = pipepart.Pipeline(models[2], plan, loss_fn=loss)

    def plain() -> None:
        for one, target in zip(inputs, targets, strict=True):
            (loss(models[0](one), target) / MICRO_BATCHES).backward()

    contenders: list[tuple[Step, AbstractContextManager[object]]] = [
        (plain, nullcontext()),
        (lambda: minimal.step(inputs, targets), minimal),
        (lambda: pipe.step(x, target=y), nullcontext()),
    ]
    for step, running in contenders:
        with running:
            step()
    for own, other in zip(
        models[0].parameters(), zip(models[1].parameters(), models[2].parameters(), strict=True), strict=True
    ):
        for one in other:
            torch.testing.assert_close(own.grad, one.grad)
    return contenders


def _least(
    contenders: Sequence[tuple[Step, AbstractContextManager[object]]], steps: int, rounds: int
) -> list[float]:
    """Return the least CPU seconds a step of each contender; they take turns, as others use the machine."""
    found = [float("inf")] * len(contenders)
    for _ in range(rounds):
        for place, (step, running) in enumerate(contenders):
            with running:
                gc.collect()
                gc.disable()
                begin = time.process_time()
                for _ in range(steps):
                    step()
                found[place] = min(found[place], (time.process_time() - begin) / steps)
                gc.enable()
    return found


if __name__ == "__main__":
    typer.run(main)
