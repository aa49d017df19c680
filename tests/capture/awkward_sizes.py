# pyright: basic, reportCallIssue=false, reportIncompatibleMethodOverride=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
"""Models that read sizes which depend on values: of masked, nonzero and unique entries, of experts' tokens."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.awkward import Base, D, blocks, refused, right


@right
class MeanOfMaskedRows(Base):
    """The mask depends on the arguments alone, so it is asked before the first layer."""

    def forward(self, x):
        y = super().forward(x)
        kept = x[x[:, 0] > 0]
        return y + kept.sum(0) / (kept.shape[0] + 1)


@right
class DividesByAllKinds(Base):
    def forward(self, x):
        kinds = (x * 2).round().long().unique()
        return super().forward(x) / (len(kinds) + 1)


@right
class SizesOfTheOutputOfABlock(Base):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x = x.view(x.shape[0], -1) / x.size(1)
        return x


@right
class MaskWhoseSizeNobodyReads(Base):
    def forward(self, x):
        y = self.blocks[0](x)
        z = self.blocks[1](y)
        return self.blocks[2](z) + y[y > 0].sum() + torch.nonzero(z > 0).float().sum()


@refused(r"the size of a tensor made at capture/awkward_sizes\.py:\d+ depends on values that modules compute")
class MeanOfWhatBlocksSelect(Base):
    def forward(self, x):
        x = self.blocks[0](x)
        kept = x[x > 0]
        return self.blocks[2](self.blocks[1](x)) * kept.sum() / kept.numel()


@refused(r"the size of a tensor made at .* depends on values that modules compute")
class ExpertsWithoutTokens(Base):
    def make(self):
        self.router = nn.Linear(D, 3)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.blocks):
            at = (chosen == index).nonzero().flatten()
            if at.numel():
                y = y.index_add(0, at, expert(x[at]) * weights[at, None])
        return y


@right
class ExpertsInAPart(Base):
    """The part is left whole."""

    def make(self):
        class Experts(nn.Module):
            def __init__(self):
                super().__init__()
                self.router, self.experts = nn.Linear(D, 3), blocks(3)

            forward = ExpertsWithoutTokens.forward
            blocks = property(lambda self: self.experts)

        self.experts = Experts()
        self.last = nn.Linear(D, D)
        del self.blocks

    def forward(self, x):
        return self.last(self.experts(x))


@refused(r"module 'blocks\.0' gave \[\d+, 6\], and \[\d+, 6\] when the model was recorded")
class SizesOfWhatABlockSelects(Base):
    def make(self):
        class Block(nn.Linear):
            def forward(self, x):
                return super().forward(x)[x[:, 0] > 0]

        self.blocks = nn.ModuleList([Block(D, D), nn.Linear(D, D), nn.Linear(D, D)])

    def forward(self, x):
        y = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](x)) + y.sum(0) / (len(y) + 1)
