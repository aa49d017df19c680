"""Models as people write them: skips, branches, two encoders, experts, packed sequences, time steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


def _double(ins: int, outs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(ins, outs, 3, padding=1),
        nn.GroupNorm(2, outs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outs, outs, 3, padding=1),
    )


class UNet(nn.Module):
    """Skips from each level of the way down to the same level of the way up."""

    def __init__(self, channels: int = 4, levels: int = 3) -> None:
        super().__init__()
        sizes = [channels * 2**i for i in range(levels)]
        self.stem = nn.Conv2d(3, channels, 1)
        self.down = nn.ModuleList(
            [_double(a, b) for a, b in zip([channels, *sizes[:-1]], sizes, strict=True)]
        )
        self.pool = nn.MaxPool2d(2)
        self.middle = _double(sizes[-1], sizes[-1])
        self.up = nn.ModuleList([_double(2 * size, max(size // 2, channels)) for size in reversed(sizes)])
        self.head = nn.Conv2d(channels, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        x = self.stem(x)
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = self.pool(x)
        x = self.middle(x)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skip], dim=1))
        return self.head(x)


class EncoderDecoder(nn.Module):
    """torch's transformer layers: the decoder's layers all read what the encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(20, 16), nn.Embedding(20, 16)
        self.position = nn.Parameter(torch.randn(12, 16) / 10)
        self.encoder = nn.ModuleList(
            [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
        )
        self.decoder = nn.ModuleList(
            [nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
        )
        self.out = nn.Linear(16, 20, bias=False)
        self.out.weight = self.target.weight

    def forward(self, source: Tensor, target: Tensor, padding: Tensor | None = None) -> Tensor:
        memory = self.source(source) * math.sqrt(16) + self.position[: source.shape[1]]
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=padding)
        x = self.target(target) * math.sqrt(16) + self.position[: target.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=x.device)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask, memory_key_padding_mask=padding, tgt_is_causal=True)
        return self.out(x)


class Experts(nn.Module):
    """A layer of experts chosen by the values of each token, with a loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList([_ExpertLayer() for _ in range(2)])
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class _ExpertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 3)
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        share, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                out.index_add_(0, rows, expert(flat[rows]) * share[rows, None])
        return out.view_as(x)


class Recurrent(nn.Module):
    """Sequences of several lengths, packed for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([_Packed(8), _Packed(8)])
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, lengths)
        last = (lengths - 1).view(-1, 1, 1).expand(-1, 1, x.shape[-1])
        return self.head(x.gather(1, last).squeeze(1))


class _Packed(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gru = nn.GRU(size, size, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class Diffusion(nn.Module):
    """A noisy picture and its time step; returns a dict with its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.alphas: Tensor
        self.register_buffer("alphas", torch.linspace(0.99, 0.01, 10))
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)])
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor, steps: Tensor, noise: Tensor | None = None) -> Any:
        alpha = self.alphas[steps].view(-1, 1, 1, 1)
        noisy = x if noise is None else alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        frequencies = torch.exp(torch.arange(4, device=x.device) * -0.5)
        angles = steps[:, None] * frequencies.to(x.dtype)
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        h = self.stem(noisy)
        kept = []
        for number, block in enumerate(self.blocks):
            if number < 2:
                kept.append(h)
            else:
                h = h + kept.pop()
            h = h + F.silu(block(h) + time)
        found = self.out(h)
        if noise is None:
            return {"noise": found}
        return {"loss": F.mse_loss(found, noise), "noise": found}


class Gpt(nn.Module):
    """Returns its logits and then its loss. The head has the embedding's weight; masks are buffers of the blocks."""

    def __init__(self, width: int = 8, words: int = 20, length: int = 12) -> None:
        super().__init__()
        blocks = [_CausalBlock(width, length) for _ in range(3)]
        self.transformer = nn.ModuleDict(
            {
                "words": nn.Embedding(words, width),
                "places": nn.Embedding(length, width),
                "blocks": nn.ModuleList(blocks),
                "norm": nn.LayerNorm(width),
            }
        )
        self.head = nn.Linear(width, words, bias=False)
        self.transformer["words"].weight = self.head.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        parts = self.transformer
        x = parts["words"](ids) + parts["places"](torch.arange(ids.shape[1], device=ids.device))
        for block in parts["blocks"]:  # type: ignore[union-attr]
            x = block(x)
        x = parts["norm"](x)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)


class _CausalBlock(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(length, length).tril().view(1, length, length))
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        steps = x.shape[1]
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = (q @ k.mT / math.sqrt(x.shape[-1])).masked_fill(
            self.mask[:, :steps, :steps] == 0, -torch.inf
        )
        return x + self.out(weights.softmax(-1) @ v)


class Pyramid(nn.Module):
    """A list of pictures of several sizes in, a list out; each size is added to the next larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.ModuleList([nn.Conv2d(channels, 8, 1) for channels in (3, 4, 5)])
        self.leave = nn.ModuleList([nn.Conv2d(8, 2, 3, padding=1) for _ in range(3)])

    def forward(self, pictures: list[Tensor]) -> list[Tensor]:
        found = [layer(picture) for layer, picture in zip(self.enter, pictures, strict=True)]
        for index in (1, 0):
            found[index] = found[index] + F.interpolate(found[index + 1], scale_factor=2.0, mode="nearest")
        return [layer(one) for layer, one in zip(self.leave, found, strict=True)]


class Codebook(nn.Module):
    """A quantizer whose codes are moving averages in buffers, with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.quantize = _Quantizer(8, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found, distance = self.quantize(self.encoder(x))
        return self.decoder(found), distance


class _Quantizer(nn.Module):
    def __init__(self, codes: int, width: int) -> None:
        super().__init__()
        self.codes: Tensor
        self.register_buffer("codes", torch.randn(codes, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        nearest = torch.cdist(x, self.codes).argmin(1)
        found = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                self.codes.index_add_(0, nearest, 0.1 * (x - found))
        return x + (found - x).detach(), (x - found.detach()).square().mean(1)
