"""The decoder and its cut into stages; and the audit model, which counts.

Shapes: B samples, T tokens, H hidden, N heads, K of keys and values, D = H / N, V vocabulary, C channels that
cross a bottleneck, W of the code of a token behind it.

A block is pre-norm: x + attention(norm(x)), then x + mlp(norm(x)), without biases. There is no dropout on the
attention weights (fused kernels draw it from a generator of their own), only on what enters the residual
stream. Parameters have the same full name in every split (`layers.3.qkv.weight`), and their initial values
are functions of that name: any split trains the same model. With a bottleneck the cuts are part of the model:
its parameters are named after the layer behind the cut, also in a module of all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from swarm.ids import Microbatch, Stage
from swarm.manifest import ModelSpec, Run
from swarm.manifest.tables import CODES_BEFORE
from swarm.model.seeded_random import dropped, initial_normal

NORM_EPS = 1e-5
INIT_STD = 0.02
"""GPT-2's. The last matrix of each branch gets 1 / sqrt(2 layers) of it, lest residuals grow with depth."""


def weights_dtype(run: Run) -> torch.dtype:
    """The dtype of weights, sums and optimizer: float32, or float64 for proofs. bfloat16 is autocast."""
    return torch.float64 if run.dtype == "float64" else torch.float32


def layer_flops(model: ModelSpec, sequence_length: int) -> tuple[int, int]:
    """Multiply-adds per token of the forward of (one block, the head)."""
    H = model.hidden
    matrices = 3 if model.mlp == "swiglu" else 2
    projections = 2 * (model.heads + model.key_heads) * H * H // model.heads
    # Causal attention looks at T / 2 tokens on average, once for the scores and once for the values.
    return projections + matrices * H * model.ffn_hidden + H * sequence_length, H * model.vocab_size


def layer_split(run: Run) -> list[range]:
    """The layers of each stage: contiguous, at least one each, the most expensive stage as cheap as possible.

    The last stage also has the head. The embedding is a lookup and counts nothing. Among equally good splits
    the one with the least sum of squares, then the lexicographically first. In whole numbers,
    which all peers compare alike.
    """
    model = run.built_in
    if model.kind == "counting":
        return [range(stage, stage + 1) for stage in range(run.S)]
    block, head = layer_flops(model, run.data.sequence_length)

    def split(last: int) -> tuple[int, int, list[int]]:
        """(the largest cost, the sum of squares, ends) with so many layers in the last stage."""
        stages, rest = run.S - 1, model.layers - last
        counts = [(rest + stage) // stages for stage in range(stages)] + [last]
        costs = [count * block for count in counts[:-1]] + [last * block + head]
        return max(costs), sum(cost * cost for cost in costs), list(accumulate(counts))

    least = 1 if run.S > 1 else model.layers
    *_, ends = min(split(last) for last in range(least, model.layers - run.S + 2))
    return [range(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]


class Block(nn.Module):
    """One transformer block, [B, T, H] -> [B, T, H]."""

    def __init__(self, model: ModelSpec, name: str) -> None:
        super().__init__()
        H, D = model.hidden, model.hidden // model.heads
        self.name, self.heads, self.kv_heads = name, model.heads, model.key_heads
        self.gated, self.normed = model.mlp == "swiglu", model.qk_norm
        self.norm1, self.norm2 = _norm(model, H), _norm(model, H)
        self.qkv = nn.Linear(H, (self.heads + 2 * self.kv_heads) * D, bias=False)
        if self.normed:
            self.q_norm, self.k_norm = _norm(model, D), _norm(model, D)
        self.out = nn.Linear(H, H, bias=False)
        self.up = nn.Linear(H, (2 if self.gated else 1) * model.ffn_hidden, bias=False)
        self.down = nn.Linear(model.ffn_hidden, H, bias=False)

    def forward(
        self, x_BTH: torch.Tensor, turn_TD: torch.Tensor | None, mask_B1TT: torch.Tensor | None,
        dropout: Callable[[torch.Tensor, str], torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        B, T, H = x_BTH.shape
        N, K = self.heads, self.kv_heads
        heads = self.qkv(self.norm1(x_BTH)).view(B, T, N + 2 * K, H // N).transpose(1, 2)
        q_BNTD, k_BNTD, v_BNTD = heads.split([N, K, K], 1)
        if self.normed:
            dtype = self.q_norm.weight.dtype  # autocast leaves these in bfloat16
            q_BNTD, k_BNTD = self.q_norm(q_BNTD.to(dtype)), self.k_norm(k_BNTD.to(dtype))
        if turn_TD is not None:
            q_BNTD, k_BNTD = _rotate(q_BNTD, turn_TD), _rotate(k_BNTD, turn_TD)
        if K < N:
            k_BNTD, v_BNTD = (x.repeat_interleave(N // K, 1) for x in (k_BNTD, v_BNTD))
        mixed = functional.scaled_dot_product_attention(
            q_BNTD, k_BNTD, v_BNTD, attn_mask=mask_B1TT, is_causal=mask_B1TT is None
        )
        y_BTH = self.out(mixed.transpose(1, 2).reshape(B, T, H))
        x_BTH = x_BTH + dropout(y_BTH, f"{self.name}.attention")
        y_BTF = self.up(self.norm2(x_BTH))
        if self.gated:
            gate_BTF, y_BTF = y_BTF.chunk(2, -1)
            y_BTF = functional.silu(gate_BTF) * y_BTF
        else:
            y_BTF = functional.gelu(y_BTF)
        return x_BTH + dropout(self.down(y_BTF), f"{self.name}.mlp")


class Embedding(nn.Embedding):
    """Without values of its own, see `initial_value`: for random ones torch would import its compiler."""

    def reset_parameters(self) -> None:
        pass


class Narrow(nn.Module):
    """What of the residual stream crosses a cut, [B, T, H] -> [B, T, C]: its first channels, so that
    gradients have a way that needs no learning, and what is learned beside them.
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.encode = nn.Linear(model.hidden, model.bottleneck, bias=False)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        return x_BTH[..., : self.encode.out_features] + self.encode(x_BTH)


class Widen(nn.Module):
    """The residual stream behind a cut, [B, T, C] -> [B, T, H]: what came, and what this token and some
    before it are, from a table W wide, which is narrower than the embedding.
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.decode = nn.Linear(model.bottleneck, model.hidden, bias=False)
        self.codes = Embedding(model.vocab_size, model.code_width)
        self.lift = nn.Linear(model.code_width, model.hidden, bias=False)
        self.recall = nn.Linear(CODES_BEFORE * model.code_width, model.hidden, bias=False)

    def forward(self, x_BTC: torch.Tensor, ids_BT: torch.Tensor, eos: int | None) -> torch.Tensor:
        """`eos`: the token that ends a document, if nothing is to be seen of the one before."""
        codes_BTW, T = self.codes(ids_BT), ids_BT.shape[1]
        before = [functional.pad(codes_BTW, (0, 0, n, 0))[:, :T] for n in range(1, CODES_BEFORE + 1)]
        if eos is not None:
            places_BT = _places(ids_BT, eos)
            before = [codes * (places_BT >= n)[..., None] for n, codes in enumerate(before, 1)]
        known_BTH = self.lift(codes_BTW) + self.recall(torch.cat(before, -1))
        more = self.decode.out_features - self.decode.in_features
        return functional.pad(x_BTC, (0, more)) + self.decode(x_BTC) + known_BTH


class GptStage(nn.Module):
    """Some layers, with the embedding if they are the first and the head if they are the last."""

    def __init__(self, run: Run, layers: range) -> None:
        super().__init__()
        model = run.built_in
        first, last = layers.start == 0, layers.stop == model.layers
        self.first, self.last, self.end = first, last, str(layers.stop)
        self._seed, self._p, self._z_loss = run.seed, model.dropout, model.z_loss
        self._eos = run.data.eos if run.data.document_mask else None
        self.recomputes_layers = False
        """Keep of each layer only its input until the backward, and run it once more there: the same bits."""
        self.learned = model.positions == "learned"
        tied = model.head == "tied"
        if first or (last and tied):
            self.tokens = Embedding(model.vocab_size, model.hidden)
        if first and self.learned:
            self.places = Embedding(run.data.sequence_length, model.hidden)
        self.layers = nn.ModuleDict({str(i): Block(model, f"layers.{i}") for i in layers})
        cuts = [behind.start for behind in layer_split(run)[1:]] if model.bottleneck else []
        self.narrow = nn.ModuleDict({str(i): Narrow(model) for i in cuts if layers.start < i <= layers.stop})
        self.widen = nn.ModuleDict({str(i): Widen(model) for i in cuts if i in layers})
        if last:
            self.norm = _norm(model, model.hidden)
            self.head = None if tied else nn.Linear(model.hidden, model.vocab_size, bias=False)
        # On the CPU also when the rest is built on the meta device: `.to` moves it with the weights.
        turn = None if self.learned else _rotations(model, run.data.sequence_length, run.dtype)
        self.register_buffer("turn", turn, persistent=False)

    def forward(
        self, x: torch.Tensor, labels_BT: torch.Tensor | None = None, *, ids_BT: torch.Tensor | None = None,
        mb: Microbatch | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Tokens [B, T] int64 (first stage) or what crosses the cut before it -> what crosses that behind it,
        or the mean loss (last stage).

        `ids_BT`: the tokens, for a stage behind a bottleneck or with a document mask. `mb` decides the
        dropout; without it there is none, and no `z_loss`. Without labels the last stage gives logits
        [B, T, V].
        """
        dropout = partial(dropped, p=self._p, seed=self._seed, mb=mb)
        if self.first:
            ids_BT = x
            x = self.tokens(x)
            if self.learned:
                if self._eos is None:
                    x = x + self.places.weight[: x.shape[1]]
                else:
                    x = x + self.places(_places(ids_BT, self._eos))
            x = dropout(x, "tokens")
        elif x.dtype == torch.bfloat16:
            # The residual stream is float32 inside a stage (autocast), and rounded to bfloat16 on its way to
            # the next: half the bytes with codec `none`, and an error a tenth of blockwise8's.
            x = x.float()
        turn = None if self.learned else cast(torch.Tensor, self.turn)[: x.shape[1]]
        mask = None
        if self._eos is not None:
            assert ids_BT is not None, "tokens say where documents end"
            autocast = torch.is_autocast_enabled(x.device.type)
            mask = _document_mask(
                ids_BT, self._eos, torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
            )
        for layer, block in self.layers.items():
            if layer in self.widen:
                assert ids_BT is not None, "behind a bottleneck the tokens are added again"
                x = self.narrow[layer](x) if layer in self.narrow else x
                x = self.widen[layer](x, ids_BT, self._eos)
            if self.recomputes_layers and torch.is_grad_enabled():
                # What is dropped follows from names: there is no generator to set back.
                x = checkpoint(block, x, turn, mask, dropout, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, turn, mask, dropout)
        if not self.last:
            return self.narrow[self.end](x) if self.narrow else x
        x = self.norm(x)
        logits_BTV = functional.linear(x, self.tokens.weight) if self.head is None else self.head(x)
        if labels_BT is None:
            return logits_BTV
        flat = logits_BTV.flatten(0, 1)
        # Autocast leaves the logits in bfloat16: too coarse for a sum over the vocabulary.
        flat = flat.float() if flat.dtype == torch.bfloat16 else flat
        loss = functional.cross_entropy(flat, labels_BT.flatten())
        if self._z_loss and mb is not None:
            loss = loss + self._z_loss * flat.logsumexp(-1).square().mean()
        return loss


class AuditStage(nn.Module):
    """A stage of the audit model, whose weights count how often each microbatch entered a step.

    It has one weight per microbatch of a step and adds w[m] to the single number that passes through, so the
    gradient of microbatch m is 1 at w[m] and 0 elsewhere, exactly, whatever the codec. With SGD, learning
    rate 1 and no clipping a stage's weights fall by count[m] / M in a step: a lost or a doubled microbatch
    shows by name. Anything [..] -> [1, 1, 1]; the last stage gives its mean.
    """

    def __init__(self, microbatches: int, *, name: str, last: bool) -> None:
        super().__init__()
        self.last = last
        # Stages need different names for their weights, as the layers of the decoder have.
        self.count = nn.ParameterDict({name: nn.Parameter(torch.zeros(microbatches))})

    def forward(
        self, x: torch.Tensor, labels_BT: torch.Tensor | None = None, *, ids_BT: torch.Tensor | None = None,
        mb: Microbatch | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Add this microbatch's weight to the tokens (first stage; any will do) or to the number so far."""
        if mb is None:
            raise ValueError("the audit model needs to know which microbatch it computes")
        (weights,) = self.count.values()
        added = weights[mb.m].view(1, 1, 1)
        y = x + added if x.is_floating_point() else added
        return y.mean() if self.last else y


def stage_skeleton(run: Run, stage: Stage) -> nn.Module:
    """The module of a stage whose parameters are on the meta device: shapes without memory."""
    if not 0 <= stage < run.S:
        raise ValueError(f"no stage {stage} in a run of {run.S}")
    with torch.device("meta"):
        if run.model.kind == "counting":
            return AuditStage(run.whole.M, name=f"stage{stage}", last=stage == run.S - 1)
        return GptStage(run, layer_split(run)[stage])


def initial_value(run: Run, name: str, shape: torch.Size) -> torch.Tensor:
    """The initial value of the parameter with this full name: float32 on the CPU."""
    if run.model.kind == "counting":
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    if name.endswith((".encode.weight", ".decode.weight", ".recall.weight")):
        return torch.zeros(shape)  # first the channels that cross as they are, and the token, say all
    depth = math.sqrt(2 * run.built_in.layers) if name.endswith((".out.weight", ".down.weight")) else 1.0
    # What the codes of tokens add behind a cut is as large as what an embedding adds.
    std = 1.0 / math.sqrt(shape[1]) if name.endswith(".lift.weight") else INIT_STD / depth
    return initial_normal(run.seed, name, shape, std)


def replace_parameters(module: nn.Module, value: Callable[[str, nn.Parameter], torch.Tensor]) -> None:
    """Give every parameter the memory of `value(full name, old parameter)`."""
    for name, old in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(value(name, old)))


def _document_mask(ids_BT: torch.Tensor, eos: int, dtype: torch.dtype) -> torch.Tensor:
    """What is added to scores [B, 1, T, T]: 0 where a token sees another one, itself or before it in its
    document.

    As numbers, and in the dtype of the scores: each layer would keep a copy of its own else.
    """
    ends_BT = (ids_BT == eos).long()
    document_BT = ends_BT.cumsum(1) - ends_BT  # its end belongs to a document
    seen_BTT = (document_BT[:, :, None] == document_BT[:, None, :]).tril()
    return torch.zeros(seen_BTT.shape, dtype=dtype, device=ids_BT.device).masked_fill(~seen_BTT, -math.inf)[
        :, None
    ]


def _places(ids_BT: torch.Tensor, eos: int) -> torch.Tensor:
    """The place of each token in its document [B, T]; that at the beginning of a window begins there."""
    place_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    ends_BT = functional.pad(ids_BT[:, :-1] == eos, (1, 0))
    return place_T - (ends_BT * place_T).cummax(1).values


def _norm(model: ModelSpec, width: int) -> nn.Module:
    norm = nn.LayerNorm if model.norm == "layernorm" else nn.RMSNorm
    return norm(width, eps=NORM_EPS)


def _rotations(model: ModelSpec, T: int, dtype: str) -> torch.Tensor:
    """Rotary positions: unit complex numbers [T, D / 2]; pair i of token t turns by t * base^(-2i / D), less
    where positions are scaled.

    Computed in float64 in any case: in float32 the angles of late tokens would be off by 1e-4.
    """
    D = model.hidden // model.heads
    rate = model.rotary_base ** (-torch.arange(0, D, 2, dtype=torch.float64, device="cpu") / D)
    if model.rotary_scaling:
        factor, *of_llama = model.scaling
        if of_llama:  # pairs that turn often in the original length stay as they are
            low, high, tokens = of_llama
            kept = ((tokens * rate / (2 * math.pi) - low) / (high - low)).clamp(0.0, 1.0)
            rate = rate * (kept + (1.0 - kept) / factor)
        else:
            rate = rate / factor
    angle = torch.outer(torch.arange(T, dtype=torch.float64, device="cpu"), rate)
    return torch.polar(torch.ones_like(angle), angle).to(
        torch.complex128 if dtype == "float64" else torch.complex64
    )


def _rotate(x_BNTD: torch.Tensor, turn_TD: torch.Tensor) -> torch.Tensor:
    """Turn neighbouring pairs. As complex numbers: five times as fast on a CPU as with halves and cat."""
    wide = x_BNTD if x_BNTD.dtype in (torch.float32, torch.float64) else x_BNTD.float()
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn_TD).flatten(-2).to(x_BNTD.dtype)
