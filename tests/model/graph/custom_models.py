"""What a manifest can name in tests: models and samples, good ones and bad ones."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.model.graph import zoo

gpt2, llama, resnet101, unet = zoo.gpt2, zoo.llama, zoo.resnet101, zoo.unet


class Bag(nn.Module):
    """A linear model of the mean of embeddings; small, and quick to trace."""

    def __init__(self, known: int = 256) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(known, 8), nn.Linear(8, known)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.head(self.embed(tokens))
        return functional.cross_entropy(x.flatten(0, 1), target.flatten())


def _rows(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def bag() -> Any:
    return Bag(), (_rows(2, 5), _rows(2, 5))


class Scaled(Bag):
    """Multiplies by a number, or by a tensor that is no parameter."""

    def __init__(self, by: float | torch.Tensor) -> None:
        super().__init__()
        self.by = by

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, target) * self.by


def twice() -> Any:
    return Scaled(2.0), (_rows(2, 5), _rows(2, 5))


def thrice() -> Any:
    return Scaled(3.0), (_rows(2, 5), _rows(2, 5))


def by_tensor_two() -> Any:
    return Scaled(torch.tensor(2.0)), (_rows(2, 5), _rows(2, 5))


def by_tensor_three() -> Any:
    return Scaled(torch.tensor(3.0)), (_rows(2, 5), _rows(2, 5))


class Tied(Bag):
    """Reads one table three times: of what it sees, of what it has to say, and to say it."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.head(self.embed(tokens) + self.embed(target))
        return functional.cross_entropy(x.flatten(0, 1), target.flatten())


def tied() -> Any:
    return Tied(), (_rows(2, 5), _rows(2, 5))


def small_bag() -> Any:
    return Bag(100), (_rows(2, 5), _rows(2, 5))


def half_evaluated() -> Any:
    model = Bag()
    model.embed.eval()  # computes the same in training
    model.drop = nn.Dropout().eval()
    return model, (_rows(2, 5), _rows(2, 5))


def half_evaluated_loss() -> Any:
    loss = nn.Sequential(nn.Dropout().eval(), Mean())
    return nn.Linear(5, 4), torch.ones(2, 5), loss, ()


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def moody() -> Any:
    """Draws from a generator that nobody seeds."""
    model = Bag()
    nn.init.constant_(model.head.bias, random.SystemRandom().random())
    return model, (_rows(2, 5), _rows(2, 5))


class Waves(nn.Module):
    """Complex numbers between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.fft.fft(self.a(x))
        return self.b(y.real + y.imag).square().mean()


def waves() -> Any:
    return Waves(), torch.ones(2, 4)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, image: torch.Tensor, mask: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.b(functional.relu(self.a(image * mask))), label)


class NormedTwice(nn.Module):
    """One batch norm, without weights, behind each of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.b(self.norm(self.a(x)))).square().mean()


def normed_twice() -> Any:
    return NormedTwice(), (torch.ones(3, 4),)


class Chosen(nn.Module):
    """Tables looked up by number in several ways, the last by a number that the model makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Embedding(50, 4), nn.Embedding(4, 7), nn.Linear(7, 7)
        self.table = nn.Parameter(torch.rand(9, 7))

    def forward(self, first: torch.Tensor, second: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        made = self.a(first)
        best = made.argmax(-1)
        x = self.head(self.b(best)) + self.table[second] + made.sum()
        return functional.cross_entropy(x.flatten(0, 1), label.flatten())


def chosen() -> Any:
    return Chosen(), (_rows(2, 3), _rows(2, 3), _rows(2, 3))


def classifier() -> Any:
    return Classifier(), (torch.ones(2, 6), torch.ones(2, 6, dtype=torch.bool), _rows(2))


def scalar() -> Any:
    return Bag(), (_rows(2, 5), torch.tensor(1))


def empty() -> Any:
    return Bag(), (_rows(0, 5), _rows(0, 5))


class Masked(Bag):
    """What is masked becomes a vector that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.rand(8))

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x[tokens % 3 == 0] = self.mask
        return functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


def masked() -> Any:
    return Masked(), (_rows(3, 6), _rows(3, 6))


class Dice(Bag):
    """Draws by something else than torch."""

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, target) * np.random.random()


def dice() -> Any:
    return Dice(), (_rows(2, 5), _rows(2, 5))


def broken() -> Any:
    raise RuntimeError("no such luck\nsecond line")


def _sample(i: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(i)
    return rng.normal(size=6).astype(np.float32), rng.random(6) < 0.5, i % 3


class _Samples:
    def __init__(self, bad: Any = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> Any:
        return self.bad if self.bad is not None and i == 7 else _sample(i)


IMAGE, MASK = np.zeros(6, np.float32), np.zeros(6, bool)


def samples() -> Any:
    return _Samples()


def samples_of_four_classes() -> Any:
    return [(IMAGE, MASK, i % 4) for i in range(8)]


def samples_of_pairs() -> Any:
    return [(IMAGE, i % 3) for i in range(8)]


def samples_of_sevens() -> Any:
    return [(np.zeros(7, np.float32), np.zeros(7, bool), i % 3) for i in range(8)]


def samples_of_whole_images() -> Any:
    return [(IMAGE.astype(np.int64), MASK, i % 3) for i in range(8)]


def samples_uneven() -> Any:
    return _Samples((IMAGE[:5], MASK, 1))


def samples_of_infinity() -> Any:
    return _Samples((IMAGE + np.inf, MASK, 1))


def samples_of_words() -> Any:
    return _Samples(("a", MASK, 1))


def samples_too_large() -> Any:
    return _Samples((IMAGE, MASK, 300))


def samples_below_zero() -> Any:
    return _Samples((IMAGE, MASK, -1))


def samples_bare() -> Any:
    return _Samples(IMAGE)


def no_samples() -> Any:
    return []


def one_number() -> Any:
    return 3


class _Broken(_Samples):
    def __getitem__(self, i: int) -> Any:
        if i == 7:
            raise KeyError("lost")
        return _sample(i)


def samples_lost() -> Any:
    return _Broken()
