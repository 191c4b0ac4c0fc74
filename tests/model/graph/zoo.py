"""Models as users bring them: plain torch, small, with the structure of the real ones.

Each `NAME()` returns (module that returns its loss, sample inputs), as `package.module:build` has to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Sample = tuple[torch.Tensor, ...]


class Bottleneck(nn.Module):
    """He et al. 2016, figure 5: 1×1, 3×3, 1×1 convolutions, each with batch norm, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        # Near the identity at first (Goyal et al. 2017, 5.1): else every block multiplies what rounding left.
        nn.init.constant_(self.bn3.weight, 0.1)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.shortcut is None else self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """He et al. 2016, table 1; `blocks` (3, 4, 23, 3) is ResNet-101."""

    def __init__(self, blocks: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)
        layers: list[nn.Module] = []
        inputs = width
        for group, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if group and not block else 1
                layers.append(Bottleneck(inputs, width << group, stride))
                inputs = 4 * (width << group)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)

    def forward(self, image_NCHW: torch.Tensor, label_N: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.relu(self.bn(self.conv(image_NCHW))))
        x = self.layers(x).mean(dim=(2, 3))
        return functional.cross_entropy(self.head(x), label_N)


class Gpt2Block(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, H = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, H // self.heads).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(B, T, H)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh")))


class Gpt2(nn.Module):
    """Radford et al. 2019: learned positions, and the head is the embedding (tied)."""

    def __init__(
        self, vocab: int, context: int, hidden: int, layers: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, hidden), nn.Embedding(context, hidden)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Gpt2Block(hidden, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        place_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x = self.drop(self.tokens(tokens_BT) + self.places(place_T))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels_BT.flatten())


class LlamaBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, hidden // heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, groups * self.width, bias=False)
        self.v = nn.Linear(hidden, groups * self.width, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, 2 * hidden, bias=False)
        self.up, self.down = (
            nn.Linear(hidden, 2 * hidden, bias=False),
            nn.Linear(2 * hidden, hidden, bias=False),
        )

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        B, T, H = x.shape
        y = self.norm1(x)
        q = _turn(self.q(y).view(B, T, self.heads, self.width).transpose(1, 2), cos, sin)
        k = _turn(self.k(y).view(B, T, self.groups, self.width).transpose(1, 2), cos, sin)
        v = self.v(y).view(B, T, self.groups, self.width).transpose(1, 2)
        z = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.out(z.transpose(1, 2).reshape(B, T, H))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Touvron et al. 2023: rotary positions, grouped queries, gated feed-forward; padding is masked."""

    rates: torch.Tensor

    def __init__(self, vocab: int, hidden: int, layers: int, heads: int, groups: int) -> None:
        super().__init__()
        width = hidden // heads
        self.tokens = nn.Embedding(vocab, hidden)
        self.register_buffer("rates", 10000.0 ** (-torch.arange(0, width, 2) / width), persistent=False)
        self.blocks = nn.ModuleList([LlamaBlock(hidden, heads, groups) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    @torch.no_grad()
    def tables(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            place = torch.arange(x.shape[1], device=x.device).to(self.rates.dtype)
            angle = place[:, None] @ self.rates[None, :]  # which autocast would round
            return angle.cos().to(x.dtype).repeat(1, 2), angle.sin().to(x.dtype).repeat(1, 2)

    def forward(
        self, tokens_BT: torch.Tensor, padding_BT: torch.Tensor, labels_BT: torch.Tensor
    ) -> torch.Tensor:
        T = tokens_BT.shape[1]
        x = self.tokens(tokens_BT)
        cos, sin = self.tables(x)
        causal = torch.ones((T, T), dtype=torch.bool, device=x.device).tril()
        mask = causal & ~padding_BT[:, None, None, :]
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels_BT.flatten())


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class UNet(nn.Module):
    """Ronneberger et al. 2015: every level of the way down is joined to the way up; it restores its input."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.ModuleList(
            [nn.Conv2d(width << i, width << i + 1, 3, stride=2, padding=1) for i in range(depth)]
        )
        self.up = nn.ModuleList(
            [nn.Conv2d(3 * (width << i), width << i, 3, padding=1) for i in reversed(range(depth))]
        )
        self.norms = nn.ModuleList([nn.GroupNorm(2, width << i + 1) for i in range(depth)])
        self.leave = nn.Conv2d(width, 1, 1)

    def forward(self, image_NCHW: torch.Tensor) -> torch.Tensor:
        x = self.enter(image_NCHW)
        skips = []
        for conv, norm in zip(self.down, self.norms, strict=True):
            skips.append(x)
            x = functional.silu(norm(conv(x)))
        for conv in self.up:
            x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = functional.silu(conv(torch.cat((x, skips.pop()), dim=1)))
        return functional.mse_loss(self.leave(x), image_NCHW)


class EncoderDecoder(nn.Module):
    """Vaswani et al. 2017: every block of the decoder looks at the last of the encoder; two inputs."""

    def __init__(self, vocab: int, hidden: int, encoders: int, decoders: int, heads: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, hidden), nn.Embedding(vocab, hidden)
        self.encoder = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(hidden, heads, 2 * hidden, 0.0, batch_first=True)
                for _ in range(encoders)
            ]
        )
        self.decoder = nn.ModuleList(
            [
                nn.TransformerDecoderLayer(hidden, heads, 2 * hidden, 0.0, batch_first=True)
                for _ in range(decoders)
            ]
        )
        self.head = nn.Linear(hidden, vocab)

    def forward(
        self, source_BS: torch.Tensor, target_BT: torch.Tensor, labels_BT: torch.Tensor
    ) -> torch.Tensor:
        padding_BS = source_BS == 0
        memory = self.source(source_BS)
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=padding_BS)
        T = target_BT.shape[1]
        future = torch.ones((T, T), dtype=torch.bool, device=target_BT.device).triu(1)
        x = self.target(target_BT)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=future, memory_key_padding_mask=padding_BS)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels_BT.flatten())


def _tokens(rows: int, length: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randint(1, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.get_default_dtype())


def resnet101() -> tuple[nn.Module, Sample]:
    """Real depth, four channels instead of 64."""
    return ResNet((3, 4, 23, 3), width=4, classes=7), (_normal(3, 3, 32, 32), _tokens(3, 1, 7, 1)[:, 0])


def resnet() -> tuple[nn.Module, Sample]:
    """The same four groups of blocks, six blocks in all."""
    return ResNet((1, 2, 2, 1), width=4, classes=7), (_normal(3, 3, 32, 32), _tokens(3, 1, 7, 1)[:, 0])


def gpt2(dropout: float = 0.0) -> tuple[nn.Module, Sample]:
    """Two layers."""
    model = Gpt2(vocab=41, context=16, hidden=24, layers=2, heads=3, dropout=dropout)
    return model, (_tokens(3, 10, 41, 1), _tokens(3, 10, 41, 2))


def llama() -> tuple[nn.Module, Sample]:
    """Two layers, two groups of two heads."""
    padding = torch.zeros((3, 10), dtype=torch.bool)
    padding[1, 7:] = True
    model = Llama(vocab=41, hidden=32, layers=2, heads=4, groups=2)
    return model, (_tokens(3, 10, 41, 1), padding, _tokens(3, 10, 41, 2))


class Deep(nn.Module):
    """Branches that are skipped at random (stochastic depth), noise, and dropout in place."""

    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.drop, self.head = nn.Dropout(0.2, inplace=True), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = x + 0.1 * torch.randn_like(x)
        for layer in self.layers:
            kept = x.new_empty((x.shape[0], 1)).bernoulli_(0.7).div_(0.7)
            x = x + kept * layer(x).tanh()
        self.drop(x.view(-1))
        return functional.cross_entropy(self.head(x), labels)


def deep() -> tuple[nn.Module, Sample]:
    """Four layers."""
    return Deep(width=8, layers=4, classes=7), (_normal(3, 8), _tokens(3, 1, 7, 1)[:, 0])


class Coarse(torch.autograd.Function):
    """A product [N, E] @ [E, D], rounded to eighths as if it were not; its gradients are clipped."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bound: float) -> torch.Tensor:
        made = x @ weight
        ctx.save_for_backward(x, weight, made.abs() < 2.0)
        ctx.bound = bound
        return (made * 8).round().div_(8)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, inside = ctx.saved_tensors
        grad = (grads[0] * inside).clamp(-ctx.bound, ctx.bound).to(x.dtype)
        return grad @ weight.T, x.T @ grad, None


class Quantised(nn.Module):
    """Layers whose products are coarse, and a classifier."""

    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = x + functional.gelu(Coarse.apply(x, layer.weight, 0.1) + layer.bias)
        return functional.cross_entropy(self.head(x), labels)


def quantised() -> tuple[nn.Module, Sample]:
    """Three layers."""
    return Quantised(width=8, layers=3, classes=7), (_normal(3, 8), _tokens(3, 1, 7, 1)[:, 0])


class Barred(nn.Module):
    """A softmax over rows, of which a mask without a gradient bars those whose activations are small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.no_grad():
            mask = torch.where(x < x.mean(), -torch.inf, 0.0)
        x = self.second(x.tanh())
        return functional.cross_entropy((x + mask).softmax(-1), labels)


def barred() -> tuple[nn.Module, Sample]:
    """Two layers."""
    return Barred(width=8), (_normal(3, 8), _tokens(3, 1, 7, 1)[:, 0])


class Biased(nn.Module):
    """An LSTM, and attention with a mask that is learned: torch computes either otherwise without a graph."""

    def __init__(self, width: int, length: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.bias, self.head = nn.Parameter(torch.randn(length, length)), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.lstm(x)[0][:, None]
        x = functional.scaled_dot_product_attention(x, x, x, self.bias * 2.0)
        return functional.cross_entropy(self.head(x[:, 0].tanh().mean(1)), labels)


def biased() -> tuple[nn.Module, Sample]:
    """Of 16 vectors each."""
    return Biased(width=8, length=16, classes=7), (_normal(3, 16, 8), _tokens(3, 1, 7, 1)[:, 0])


def unet() -> tuple[nn.Module, Sample]:
    """Four levels."""
    return UNet(width=2, depth=4), (_normal(2, 1, 32, 32),)


def encoder_decoder() -> tuple[nn.Module, Sample]:
    """One layer, and two that look at it."""
    source = _tokens(3, 12, 41, 1)
    source[0, 9:] = 0
    return EncoderDecoder(41, 16, encoders=1, decoders=2, heads=2), (
        source,
        _tokens(3, 8, 41, 2),
        _tokens(3, 8, 41, 3),
    )


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "resnet101": resnet101,
    "resnet": resnet,
    "gpt2": gpt2,
    "llama": llama,
    "unet": unet,
    "encoder_decoder": encoder_decoder,
}
