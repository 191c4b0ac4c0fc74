"""Models of users, as peers in processes of their own import them: `tests.process.models:NAME`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tests.model.graph.zoo import ResNet

CLASSES, SIZE = 4, 16


def resnet() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The four groups of ResNet-101 with six blocks in all and four channels, for images of 16 × 16."""
    model = ResNet((1, 2, 2, 1), width=4, classes=CLASSES)
    return model, (torch.zeros(2, 3, SIZE, SIZE), torch.zeros(2, dtype=torch.int64))


class Images(Sequence[tuple[torch.Tensor, int]]):
    """Noise around one picture a class."""

    def __init__(self, count: int, seed: int) -> None:
        chance = torch.Generator().manual_seed(0)
        self._of_class = torch.randn(CLASSES, 3, SIZE, SIZE, generator=chance)
        chance.manual_seed(seed)
        self._class = torch.randint(CLASSES, (count,), generator=chance)
        self._noise = torch.randn(count, 3, SIZE, SIZE, generator=chance)

    def __len__(self) -> int:
        return len(self._class)

    def __getitem__(self, i):  # type: ignore[no-untyped-def, override]
        return (self._of_class[self._class[i]] + 0.5 * self._noise[i]).numpy(), self._class[i].numpy()


def images() -> Images:
    """To train on."""
    return Images(256, seed=1)


def held_out_images() -> Images:
    """Others of the same classes."""
    return Images(64, seed=2)
