"""Trains a small language model on the bytes of Python's own help texts, cut into stages on two virtual devices."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

import pipepart
from pipepart.reporting import plan_summary, show, stage_table

WIDTH, HEADS, BLOCKS, CONTEXT = 64, 4, 4, 64
BATCH, MICRO_BATCHES, STEPS, WARM_UP = 32, 4, 300, 30
WANTED_BITS = 3.4  # a byte; 8 know nothing, 4.7 know how often each byte comes


class Front(nn.Module):
    """Bytes and their positions as vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        nn.init.normal_(self.position.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.byte(tokens) + self.position.weight[: tokens.shape[1]]


class Attention(nn.Module):
    """Each position looks at those before it; the result is added to what went in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(self.norm(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(seen.transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    """Each position by itself; the result is added to what went in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def network() -> nn.Sequential:
    """Eleven layers for sequences of bytes: each is an attention, a perceptron, or at one of the ends."""
    blocks = (layer for _ in range(BLOCKS) for layer in (Attention(), Perceptron()))
    return nn.Sequential(Front(), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))


def text() -> Tensor:
    """Half a megabyte that comes with Python: what ``help("topics")`` shows."""
    from pydoc_data.topics import topics

    return torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))


def windows(data: Tensor, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Some stretches of a text, and the same one byte on."""
    starts = torch.randint(len(data) - CONTEXT, (count, 1), generator=generator)
    index = starts + torch.arange(CONTEXT)
    return data[index], data[index + 1]


def next_byte_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean over all bytes of how surprised the model is by the next one."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def model() -> tuple[nn.Module, Tensor, Tensor, object]:
    """What ``pipepart check examples/language.py:model`` tries: a model, a sample, a target and a loss."""
    x, y = windows(text(), BATCH, torch.Generator().manual_seed(0))
    return network(), x, y, next_byte_loss


def speed(step: int) -> float:
    """The part of the learning rate: up in a line, down as a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 + 0.5 * math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP))


def main() -> int:
    """Trains, and shows what the model has learned; 0 when it reads unseen text well enough."""
    torch.manual_seed(0)
    data = text()
    train, held_out = data[: -len(data) // 10], data[-len(data) // 10 :]
    x, y = windows(train, BATCH)
    pipe = pipepart.Pipeline.auto(
        network(), x, target=y, loss_fn=next_byte_loss, devices=2, micro_batches=MICRO_BATCHES
    )
    show(plan_summary(pipe.plan), stage_table(pipe.plan))

    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    slower = torch.optim.lr_scheduler.LambdaLR(optimizer, speed)
    with pipe:
        for step in range(STEPS):
            x, y = windows(train, BATCH)
            loss = pipe.step(x, target=y)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            slower.step()
            if step % 50 == 49:
                print(f"step {step + 1} of {STEPS}   {loss.item() / math.log(2):.2f} bits a byte", flush=True)
        pipe.eval()
        bits = held_out_bits(pipe, held_out)
        print(f"Unseen text: {bits:.2f} bits a byte\n{continued(pipe, 'The statement ')}")
    return int(bits > WANTED_BITS)


def held_out_bits(pipe: pipepart.Pipeline, data: Tensor) -> float:
    """How surprised the model is by a text that it has not seen."""
    x, y = windows(data, 256)
    with torch.no_grad():
        return next_byte_loss(pipe(x), y).item() / math.log(2)


def continued(pipe: pipepart.Pipeline, start: str, length: int = 200) -> str:
    """A text that goes on as the model would."""
    tokens = torch.tensor([list(start.encode())])
    with torch.no_grad():
        for _ in range(length):
            likely = torch.softmax(pipe(tokens[:, -CONTEXT:])[:, -1] / 0.7, dim=1)
            tokens = torch.cat([tokens, torch.multinomial(likely, 1)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
