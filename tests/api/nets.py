"""A small network with everything that is different in training, and samples for it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    """Numbers of a few words, and which of three classes they are."""

    def __init__(self, words: int = 10) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 8)
        self.wide, self.norm, self.narrow = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.dropout = nn.Dropout(0.1)
        self.idle = nn.Parameter(torch.ones(2))
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.scale * torch.tensor([0.5, 0.25]).sum()
        hidden = functional.relu(self.norm(self.wide(self.words(tokens).mean(1)))) * scale
        return self.narrow(self.dropout(hidden))


def net(words: int = 10) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(words)


def samples(count: int = 24, words: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """A class is the first word's number modulo 3."""
    tokens = torch.randint(words, (count, 5), generator=torch.Generator().manual_seed(0))
    return tokens, tokens[:, 0] % 3
