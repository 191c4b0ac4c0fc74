"""The tables of a manifest but for its own keys (`swarm.manifest.run`): each a dataclass with rules."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

from swarm.codecs import PPM, ROUNDED, VALUES, parse_codec
from swarm.ids import PEER_ID
from swarm.manifest import rules
from swarm.manifest.rules import FLAG, Rules, Spec, choice, integer, number, setting, text, values_of, wrong

MAX_TRAINERS = 200
MAX_FOUNDERS = 40

MAX_CODE_WIDTH = 64
"""Of the table of tokens that each stage behind a bottleneck has: as wide as `hidden` it would be the largest
part of a stage. Part of what a manifest means."""

CODES_BEFORE = 3
"""Tokens before its own whose codes each position behind a bottleneck has. Part of what a manifest means."""

MODEL_KINDS = ("gpt", "counting", "code", "hf")
"""The first two are built in (`ModelSpec`), the others are custom models (`CustomModelSpec`)."""


_DECIMAL = r"[0-9]{1,9}(\.[0-9]{1,9})?"


class ModelSpec(Spec, section="model"):
    """A built-in model, and the number of stages that it is cut into."""

    kind: Literal["gpt", "counting"] = setting(choice("gpt", "counting", told=MODEL_KINDS), "gpt")
    """A decoder without biases; or the audit model whose weights count microbatches (its sizes below mean
    nothing)."""
    layers: int = setting(integer(1, 1024))
    """Transformer blocks in all stages together; at least one per stage."""
    hidden: int = setting(integer(1, 65_536))
    """Width of the residual stream, which is what crosses a stage boundary per token."""
    heads: int = setting(integer(1, 1024))
    """Attention heads; divides `hidden`."""
    ffn_hidden: int = setting(integer(1, 524_288))
    """Width inside the feed-forward part of a block."""
    vocab_size: int = setting(integer(2, 1_048_576))
    """Tokens the model knows; at least as many as the tokenizer makes (256 for bytes)."""
    norm: Literal["rmsnorm", "layernorm"] = setting(choice("rmsnorm", "layernorm"), "rmsnorm")
    """Normalisation before attention, before the feed-forward part and before the head."""
    positions: Literal["rotary", "learned"] = setting(choice("rotary", "learned"), "rotary")
    """How a token knows its place. Rotary needs an even number of channels per head."""
    dropout: float = setting(number(0.0, 1.0, below=True), 0.0)
    """Probability of dropping a channel; the random numbers are a function of the microbatch."""
    stages: int = setting(integer(1, 1024))
    """S: the number of stages that the model is cut into."""
    z_loss: float = setting(number(0.0, 1.0), 0.0, later=True)
    """So many times the square of the log of the softmax's denominator is added to the loss in training, so
    that logits stay small; 1e-4 is usual."""
    kv_heads: int = setting(integer(0, 1024), 0, later=True)
    """Heads of keys and values, each of which several attention heads share; divides `heads`. 0: as many as
    `heads`."""
    mlp: Literal["gelu", "swiglu"] = setting(choice("gelu", "swiglu"), "gelu", later=True)
    """The feed-forward part: two matrices, or three with a gate. With `swiglu`, `rmsnorm` and `rotary` the
    decoder is Llama's, and `swarm export --hf` makes a folder that transformers reads."""
    head: Literal["free", "tied"] = setting(choice("free", "tied"), "free", later=True)
    """Whether the head has a matrix of its own or that of the embedding, which first and last stage share
    then."""
    qk_norm: bool = setting(FLAG, False, later=True)
    """Normalise queries and keys of each head before they are turned."""
    rotary_base: float = setting(number(1.0, 1e12), 10_000.0, later=True)
    """The slowest pair of channels turns once in about 2 pi times as many tokens."""
    rotary_scaling: str = setting(
        text(rf"(linear {_DECIMAL}|llama3( {_DECIMAL}){{3}} [0-9]{{1,9}})?", "empty, \"linear FACTOR\" or "
              '"llama3 FACTOR LOW HIGH TOKENS"'), "", later=True,
    )  # fmt: skip
    """How rotary positions are stretched for longer texts than before: all by a factor, or, as Llama 3.1,
    those that turn slowly: fewer than LOW times in TOKENS all, more than HIGH times none."""
    bottleneck: int = setting(integer(0, 65_536), 0, later=True)
    """Channels that cross a stage boundary per token, instead of `hidden`: what narrows and widens the
    residual stream there is trained with the model, which so depends on `stages`. 0: all."""

    def _together(self) -> Rules:
        if self.kind == "counting":
            return
        least = "0 when model.stages is 1" if self.stages == 1 else f"less than hidden ({self.hidden})"
        yield self.bottleneck >= (self.hidden if self.stages > 1 else 1), "bottleneck", least
        yield self.hidden % self.heads, "heads", f"a divisor of model.hidden ({self.hidden})"
        yield self.heads % self.key_heads, "kv_heads", f"a divisor of model.heads ({self.heads})"
        scales = not self.rotary_scaling or self._scales()
        yield not scales, "rotary_scaling", "of factors of at least 1, LOW below HIGH, and TOKENS above 0"
        odd = self.positions == "rotary" and (self.hidden // self.heads) % 2
        even = f"such that model.hidden ({self.hidden}) / heads is even, which rotary positions need"
        yield odd, "heads", even
        most = f"at most model.layers ({self.layers}): one layer per stage"
        yield self.stages > self.layers, "stages", most

    def _scales(self) -> bool:
        factor, *of_llama = self.scaling
        low, high, tokens = of_llama or (1.0, 2.0, 1.0)
        return factor >= 1.0 and 0.0 < low < high and tokens > 0

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def code_width(self) -> int:
        """Width of the table of tokens behind a bottleneck."""
        return min(MAX_CODE_WIDTH, self.hidden)

    @property
    def scaling(self) -> tuple[float, ...]:
        """The numbers in `rotary_scaling`: none, one, or Llama's four."""
        return tuple(float(word) for word in self.rotary_scaling.split()[1:])


_FUNCTION = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"


class CustomModelSpec(Spec, section="model"):
    """A custom model, and how it is cut. `swarm.model.graph.custom_model` builds it, and fills in the last
    ones.
    """

    kind: Literal["code", "hf"] = setting(choice("code", "hf", told=MODEL_KINDS))
    """A function that is installed on every peer, or a config of Hugging Face's transformers."""
    source: str = setting(
        text(rf"({_FUNCTION})?", 'package.module:function, or empty when model.kind is "hf"'), ""
    )
    """The function, for `code`: it returns (module, inputs), or (module, inputs, loss, targets)."""
    config: str = setting(rules.JSON, "")
    """The content of a `config.json`, as text, for `hf`."""
    inputs: tuple[str, ...] = setting(rules.INPUTS, (), later=True)
    """For `hf`: what its `forward` is given, and the sizes of one sample of each; empty = tokens and labels,
    or images and labels."""
    stages: int = setting(integer(1, 1024))
    """S: the number of stages that the model is cut into."""
    vocab_size: int = setting(integer(2, 1_048_576), 256)
    """Integers that enter the model (tokens, labels) are 0 … vocab_size - 1."""
    frozen: tuple[str, ...] = setting(rules.NAMES, (), later=True)
    """Weights that stay as they are at the start: they are not summed, sent or stored."""
    version: str = setting(
        text(
            r"([A-Za-z0-9][A-Za-z0-9._-]{0,100} [A-Za-z0-9][A-Za-z0-9.+!_-]{0,100})?",
            "transformers and its version, or sha256 and the digest of a file; or empty: not pinned yet",
        ),
        "",
    )
    """Of the code: `transformers 5.1.0`; `sha256 …` of the source file of a user's own."""
    graph: str = setting(rules.DIGEST, "")
    """SHA-256 of the operators as traced."""
    weights: str = setting(text("", "empty: model.digests pins them, stage by stage"), "")
    """Always empty; a part of the text that is hashed."""
    digests: tuple[str, ...] = setting(rules.DIGESTS, (), later=True)
    """SHA-256 of what each stage begins with: the code initialises it, and each of its draws has a seed of
    its own, so that no peer has to make the weights of other stages."""
    cut: str = setting(rules.CUT, "")
    """The stage of each operator."""

    def _together(self) -> Rules:
        given, other = ("source", "config") if self.kind == "code" else ("config", "source")
        what = "package.module:function" if given == "source" else rules.JSON.allowed
        yield not getattr(self, given), given, f'{what} when model.kind is "{self.kind}"'
        yield getattr(self, other), other, f'empty when model.kind is "{self.kind}"'
        no_inputs = 'empty when model.kind is "code": the function returns its inputs'
        yield self.inputs and self.kind != "hf", "inputs", no_inputs
        each = f"a list of {self.stages}, one for each stage; or empty"
        yield len(self.digests) not in (0, self.stages), "digests", each

    @property
    def pinned(self) -> bool:
        """Whether the manifest says exactly which model it is, so that peers can compare."""
        return bool(self.version and self.graph and self.digests and self.cut)


AnyModel: TypeAlias = ModelSpec | CustomModelSpec


class DataSpec(Spec, section="data"):
    """The text, as tokens; or samples that code makes."""

    source: Literal["tales", "files", "code"] = setting(choice("tales", "files", "code"))
    """Little tales that every machine tells itself alike (2 MB), the user's text files, or samples that an
    installed function makes."""
    code: str = setting(
        text(rf"({_FUNCTION})?", 'package.module:function, or empty unless data.source is "code"'),
        "",
        later=True,
    )
    """The function: it returns a sequence of samples, each a tuple of arrays, one for each input of the model
    and without the batch's dimension."""
    sha256: str = setting(rules.DIGEST, "")
    """Root of the Merkle tree over the tokens, of which an index has more; or SHA-256 of all samples.
    Filled in when the run is published."""
    root: str = setting(rules.DIGEST, "", later=True)
    """The same root, if what trainers send is proven to be of it. Filled in when the run is published, if
    it names trainers and has a built-in model."""
    tokens: int = setting(integer(0, 2**48), 0)
    """Number of tokens, or of samples; 0 = not pinned yet. Filled in when the run is published."""
    mixture: str = setting(rules.MIXTURE, "", later=True)
    """The sources that the tokens are of, one behind the other: of so many samples as all weights sum up
    to, exactly the weight is from each. Filled in from an index; empty = one source."""
    tokenizer: Literal["bytes", "file"] = setting(choice("bytes", "file"), "bytes")
    """One token per byte, or a JSON file of `tokenizers`, given with `--tokenizer`."""
    tokenizer_sha256: str = setting(rules.DIGEST, "")
    """SHA-256 of that file. Filled in when the run is published."""
    sequence_length: int = setting(integer(1, 1_048_576))
    """T: tokens the model sees in one sample; a sample reads one more, for the last label. Of samples that
    code makes: tokens in each, for a model of transformers; else 1, which may be left out."""
    document_mask: bool = setting(FLAG, False, later=True)
    """Attention does not cross the end of a document (`eos`), and learned positions begin anew behind it.
    Of the built-in decoder."""
    eos: int = setting(integer(-1, 1_048_575), -1, later=True)
    """The token that ends each document, for `document_mask`. Filled in from an index when the run is
    published; -1 = not known yet."""

    def _together(self) -> Rules:
        coded, most = self.source == "code", f"more than data.sequence_length ({self.sequence_length})"
        yield self.eos >= 0 and not self.document_mask, "eos", "left out when data.document_mask is false"
        yield coded and not self.code, "code", 'package.module:function when data.source is "code"'
        own_tokens = '"bytes", or left out, when data.source is "code"'
        yield coded and self.tokenizer != "bytes", "tokenizer", own_tokens
        yield not coded and self.code, "code", f'empty when data.source is "{self.source}"'
        for key in ("sha256", "root"):
            counted = f"the number of tokens when data.{key} is set"
            yield getattr(self, key) and not self.tokens, "tokens", counted
        few = not coded and 0 < self.tokens <= self.sequence_length
        yield few, "tokens", f"{most}, or 0: not pinned"
        sizes = [tokens for _, tokens in self.sources]
        other = self.mixture and (self.source != "files" or self.tokens != sum(sizes))
        yield other, "mixture", f"of all {self.tokens} tokens (data.tokens), or empty"
        yield any(n <= self.sequence_length for n in sizes), "mixture", f"of sources with {most} tokens"
        no_file = 'empty when data.tokenizer is "bytes"'
        yield self.tokenizer == "bytes" and self.tokenizer_sha256, "tokenizer_sha256", no_file

    @property
    def sources(self) -> list[tuple[int, int]]:
        """The weight and the tokens of each source of a mixture."""
        pairs = (source.split("*") for source in self.mixture.split())
        return [(int(weight), int(tokens)) for weight, tokens in pairs]


class BatchSpec(Spec, section="batch"):
    """How a step's samples are cut into microbatches."""

    microbatch_size: int = setting(integer(1, 65_536))
    """Samples in one microbatch."""
    microbatches_per_step: int = setting(integer(1, 8192))
    """M: microbatches whose gradients are averaged into one step."""
    microbatch_threads: int = setting(integer(1, 1024), 1, later=True)
    """CPU threads that share one microbatch. They split sums inside its operators and so decide
    the last bits: all peers have as many, and a peer's other cores compute other microbatches."""
    warmup_steps: int = setting(integer(0, 100_000), 0, later=True)
    """Batch warm-up: over so many steps, the first ones, the microbatches of a step grow evenly from
    `warmup_microbatches` to `microbatches_per_step`. 0 = none."""
    warmup_microbatches: int = setting(integer(0, 8191), 0, later=True)
    """Microbatches of the first step, where there is a batch warm-up; else 0."""

    def _together(self) -> Rules:
        most = self.microbatches_per_step - 1
        yield self.warmup_steps and not most, "warmup_steps", "0 when batch.microbatches_per_step is 1"
        least, most = (1, most) if self.warmup_steps else (0, 0)
        allowed = f"from 1 to {most}, less than microbatches_per_step," if most else "0"
        has = f"{allowed} when batch.warmup_steps is {self.warmup_steps}"
        yield not least <= self.warmup_microbatches <= most, "warmup_microbatches", has

    def microbatches(self, t: int) -> int:
        """How many step `t` has."""
        if t >= self.warmup_steps:
            return self.microbatches_per_step
        first = self.warmup_microbatches
        return first + (self.microbatches_per_step - first) * t // self.warmup_steps

    def microbatches_before(self, t: int) -> int:
        """How many the steps before `t` have together."""
        warm = min(t, self.warmup_steps)
        return _grown(self)[warm] + (t - warm) * self.microbatches_per_step


@lru_cache(maxsize=16)
def _grown(batch: BatchSpec) -> tuple[int, ...]:
    """`microbatches_before` the steps of the warm-up, and the one behind it."""
    return tuple(accumulate(map(batch.microbatches, range(batch.warmup_steps)), initial=0))


class OptimizerTerms(NamedTuple):
    """How a weight is stepped."""

    lr: float
    """Times the learning rate of the step."""
    decay: float
    is_muon: bool


_NUMBER = number(0.0, 1e6)


def _read_group(text: str) -> tuple[str, dict[str, float]]:
    """The names of a group, and what it says of them; raises ValueError if it is none."""
    pattern, *words = text.split(" ")
    terms = {key: _NUMBER.check(float(value)) for key, _, value in (word.partition("=") for word in words)}
    known = terms.keys() <= {"lr", "weight_decay"} and len(terms) == len(words)
    if not terms or not known or not rules.is_name(pattern):
        raise ValueError
    return pattern, terms


def _canonical_groups(groups: Any) -> tuple[str, ...]:
    read = [_read_group(group) for group in groups]
    return tuple(
        " ".join([pattern, *(f"{key}={terms[key]}" for key in ("lr", "weight_decay") if key in terms)])
        for pattern, terms in read
    )


_GROUPS = rules.Rule(
    'a list of at most 64 of the form "NAMES lr=MULTIPLE weight_decay=NUMBER", of which one may be left out, '
    'such as "embed.* lr=0.1"',
    rules.list_of(lambda one: type(one) is str, 64),
    _canonical_groups,
)


class OptimizerSpec(Spec, section="optimizer"):
    """How the mean gradient becomes new weights."""

    name: Literal["adamw", "sgd", "muon"] = setting(choice("adamw", "sgd", "muon"), "adamw")
    """`muon` is AdamW but for weights that the key `muon` names."""
    lr: float = setting(number(0.0, 1000.0, above=True))
    """Highest learning rate, after the warm-up."""
    beta1: float = setting(number(0.0, 1.0, below=True), 0.9)
    """Decay of the first moment (AdamW)."""
    beta2: float = setting(number(0.0, 1.0, below=True), 0.95)
    """Decay of the second moment (AdamW)."""
    eps: float = setting(number(1e-37, 1.0), 1e-8)
    """Added to the root of the second moment (AdamW); less is 0 in float32, and 0 / 0 where a gradient is."""
    weight_decay: float = setting(number(0.0, 10.0), 0.1)
    """Decoupled decay, times the learning rate, of weights with two or more dimensions."""
    momentum: float = setting(number(0.0, 1.0, below=True), 0.0)
    """Of SGD; must be 0 otherwise."""
    warmup_steps: int = setting(integer(0, 1_000_000_000), 0)
    """Steps over which the learning rate grows linearly; fewer than `steps`."""
    schedule: Literal["constant", "cosine", "linear", "inverse_sqrt", "wsd"] = setting(
        choice("constant", "cosine", "linear", "inverse_sqrt", "wsd"), "constant"
    )
    """The learning rate after the warm-up: as it is; half a cosine or a line down to `min_lr_ratio * lr`; the
    inverse square root of the step; or as it is until `decay_steps` are left, then a line (`wsd`)."""
    min_lr_ratio: float = setting(number(0.0, 1.0), 0.1)
    """Learning rate of the last step ÷ `lr`, for the cosine and the lines."""
    clip_norm: float = setting(number(0.0, 1e9), 1.0)
    """The mean gradient of the whole model is scaled down to this norm if it is longer; 0 = never."""
    decay_steps: int = setting(integer(0, 1_000_000_000), 0, later=True)
    """For `wsd`: over so many steps, the last ones, the learning rate falls; else 0."""
    groups: tuple[str, ...] = setting(_GROUPS, (), later=True)
    """Weights by name with a learning rate that is a multiple of the others', or a decay of their own; the
    first that matches a weight counts."""
    muon: tuple[str, ...] = setting(rules.NAMES, (), later=True)
    """For `muon`: weights of two dimensions, in which * and ? stand for other characters, such as layers.*"""
    moments: Literal["float32", "bfloat16"] = setting(choice("float32", "bfloat16"), "float32", later=True)
    """What the means of gradients and of their squares are kept in: 8 bytes a weight, or 4. bfloat16 is
    rounded at random, drawn from run, step, weight and place, so that on average nothing is lost."""

    def _together(self) -> Rules:
        muon, falls = self.name == "muon", self.schedule == "wsd"
        named = f'when optimizer.name is "{self.name}"'
        yield self.name != "sgd" and self.momentum, "momentum", f"0 {named}"
        yield muon != bool(self.muon), "muon", f"{'names of weights' if muon else 'empty'} {named}"
        steps = f'{"at least 1" if falls else "0"} when optimizer.schedule is "{self.schedule}"'
        yield falls != bool(self.decay_steps), "decay_steps", steps

    def lr_at(self, t: int, total_steps: int) -> float:
        """The rate of step `t` (0 … total_steps - 1): the warm-up ends at `lr`, what falls at its floor."""
        if t < self.warmup_steps:
            return self.lr * (t + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "inverse_sqrt":
            first = max(1, self.warmup_steps)
            return float(f"{self.lr * math.sqrt(first / max(first, t + 1)):.12g}")
        # Step `begin` is the first at progress 0, the last step is at 1.
        begin = total_steps - 1 - self.decay_steps if self.schedule == "wsd" else self.warmup_steps
        progress = max(0.0, min(1.0, (t - begin) / max(1, total_steps - 1 - begin)))
        left = 0.5 * (1.0 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1.0 - progress
        ratio = self.min_lr_ratio + (1.0 - self.min_lr_ratio) * left
        # C libraries disagree in the last bit of a cosine, and every peer must have the same rate.
        return float(f"{self.lr * ratio:.12g}")

    def terms_of(self, name: str, dims: int) -> OptimizerTerms:
        """How a weight is stepped, by its full name and the number of its dimensions."""
        lr, decay = 1.0, self.weight_decay if dims >= 2 else 0.0
        for group in self.groups:
            pattern, terms = _read_group(group)
            if fnmatchcase(name, pattern):
                lr, decay = terms.get("lr", lr), terms.get("weight_decay", decay)
                break
        return OptimizerTerms(
            lr, decay, dims == 2 and any(fnmatchcase(name, pattern) for pattern in self.muon)
        )

    @property
    def patterns(self) -> dict[str, tuple[str, ...]]:
        """The names of weights that it has, by key: each is meant to match some."""
        return {"groups": tuple(_read_group(group)[0] for group in self.groups), "muon": self.muon}


_VALUES = "one of " + ", ".join(VALUES)


class CodecSpec(Spec, section="codec"):
    """How tensors look on the wire, per direction. The names are those of `swarm.codecs`."""

    forward: str | tuple[str, ...] = setting(rules.CODECS, "blockwise8")
    """Activations between stages: one codec, or a list with one for each boundary."""
    backward: str | tuple[str, ...] = setting(rules.CODECS, "blockwise8")
    """Gradients of what was sent, likewise; after a top-k, the values of its positions. Not a top-k
    itself."""
    reduce: str = setting(choice("none", *ROUNDED), "none")
    """Weight gradients between the replicas of a stage. `rounded16` and `rounded8` round those of each
    microbatch at random, by names: half and a quarter of the bytes, and the result is still a function of the
    manifest."""

    def _together(self) -> Rules:
        forward = [self.forward] if isinstance(self.forward, str) else self.forward
        backward = [self.backward] if isinstance(self.backward, str) else self.backward
        alike = len(forward) == len(backward) or 1 in (len(forward), len(backward))
        yield not alike, "backward", f"one codec, or as many as codec.forward has ({len(forward)})"
        if len(forward) != len(backward):
            forward, backward = forward * len(backward), backward * len(forward)
        for sent, answer in zip(forward, backward, strict=False):
            if _sparse(sent) and _sparse(answer):
                allowed = (
                    f"{_VALUES}: {sent} keeps a part of what is sent, and its gradient has the same places"
                )
                raise wrong("codec.backward", answer, allowed)

    @classmethod
    def symmetric(cls, codec: str) -> CodecSpec:
        """`codec` at all boundaries, and for the gradients that come back; with a top-k these have its codec
        of values.
        """
        known = parse_codec(codec)
        return cls(forward=codec, backward=codec if known is None else known.values)

    def forward_at(self, boundary: int) -> str:
        """The codec of what stage `boundary` sends to the next."""
        return self.forward if isinstance(self.forward, str) else self.forward[boundary]

    def backward_at(self, boundary: int, sent: str) -> str:
        """The codec of the gradient that answers what was sent over `boundary` with the codec `sent`.

        The gradient of a top-k has the same places: that of a number that was not sent is 0.
        """
        values = self.backward if isinstance(self.backward, str) else self.backward[boundary]
        codec = parse_codec(sent)
        assert codec is not None
        return codec._replace(values=values).name if _sparse(sent) else values


def _sparse(name: str) -> bool:
    codec = parse_codec(name)
    return codec is not None and codec.keep_ppm < PPM


class AdmissionSpec(Spec, section="admission"):
    """Which peers may do what."""

    owner: str = setting(
        text(rf"({PEER_ID.pattern})?", "a peer id (12D3KooW…, 52 characters), or empty: no owner"), ""
    )
    """Peer id whose signature the published manifest carries; empty = the hash is enough."""
    trainers: tuple[str, ...] = setting(rules.peers(MAX_TRAINERS), ())
    """Peer ids that may send microbatches, and that vouch for the peers which answer them; empty =
    any peer may send, and none vouches."""
    founders: tuple[str, ...] = setting(rules.peers(MAX_FOUNDERS), (), later=True)
    """Peer ids whose word counts from the start, as much as 20 steps of work; until trainers have vouched for
    others, theirs alone."""

    @property
    def named(self) -> bool:
        """Whether it names peers by which others have voice."""
        return bool(self.trainers or self.founders)

    def may_audit(self, peer: str) -> bool:
        """Whether a peer that serves no stage is shown what replicas keep and signed: `swarm audit`."""
        return peer in self.trainers or peer == self.owner != ""


SUMMED_FROM = 6
"""Of so many islands each adds up a part for all: with an 8-bit codec 1 byte a weight, and 4 of the sums.
Each of fewer gets all that the others have changed, 1 byte of each.
"""


def parts_summed(islands: int) -> int:
    """Into how many parts so many islands divide the work of adding up; 1: each adds up all."""
    return islands if islands >= SUMMED_FROM else 1


class IslandsSpec(Spec, section="islands"):
    """Virtual workers that train by themselves, and meet every few steps (DiLoCo, arXiv 2311.08105).

    A meeting leaves all of them with the same state of each stage: the optimizer of their steps begins anew.
    So an island that has lost a stage gets it from any other, and goes on from the last meeting.
    """

    count: int = setting(integer(1, 4096), 1, later=True)
    """How many; each takes an equal share of the microbatches of a step. 1 = none: replicas add up their
    gradients in each step."""
    local_steps: int = setting(integer(1, 1_000_000), 32, later=True)
    """Steps between two meetings. A meeting is a step, too, of no microbatch."""
    outer_lr: float = setting(number(0.0, 10.0, above=True), 0.7, later=True)
    """How far the weights go, at a meeting, towards where the islands are on average."""
    outer_momentum: float = setting(number(0.0, 1.0, below=True), 0.9, later=True)
    """Nesterov's, of the meetings."""
    codec: str = setting(
        rules.Rule(
            f"{_VALUES}: what a top-k leaves out would never arrive", lambda v: type(v) is str and v in VALUES
        ),
        "none",
        later=True,
    )
    """How what an island has changed travels."""

    warmup_steps: int = setting(integer(0, 1_000_000), 0, later=True)
    """Steps after a meeting, and after the start, in which the learning rate rises to what it would be: an
    optimizer that begins anew goes too far at first."""

    def trained(self, t: int) -> int:
        """Steps before `t` that are no meetings."""
        return t - t // (self.local_steps + 1) if self.count > 1 else t

    def moments_age(self, t: int) -> int:
        """Steps since the optimizer began whose state step `t` finds."""
        return t % (self.local_steps + 1) if self.count > 1 else t

    def _together(self) -> Rules:
        lone = self.count == 1 and values_of(self)
        yield lone, "count", "at least 2 when there are other values in [islands]"


_HUB_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,95}"


class StartSpec(Spec, section="start"):
    """Trained weights that a run starts from, instead of those that its seed draws."""

    weights: str = setting(
        text(
            rf"(folder|hf:{_HUB_NAME}(/{_HUB_NAME})?@{_HUB_NAME})?",
            '"folder" (which --start names), "hf:OWNER/NAME@REVISION", or empty: drawn from the seed',
        ),
        "",
        later=True,
    )
    """Safetensors in a folder that the owner has, or in a repository of Hugging Face; peers that cannot read
    them ask others."""
    digests: tuple[str, ...] = setting(rules.DIGESTS, (), later=True)
    """SHA-256 of the tensors that each stage reads. Filled in when the run is published."""

    def _together(self) -> Rules:
        yield self.digests and not self.weights, "digests", "empty when start.weights is"


class LoraSpec(Spec, section="lora"):
    """Thin matrices that are trained beside layers of a custom model, of which all else is frozen (LoRA)."""

    rank: int = setting(integer(0, 65_536), 0, later=True)
    """Rows of the first matrix of each pair; 0 = the model itself is trained."""
    alpha: float = setting(number(0.0, 1e6, above=True), 16.0, later=True)
    """What they add to a layer counts alpha / rank times."""
    targets: tuple[str, ...] = setting(
        rules.set_of(
            rules.matches(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*"),
            64,
            "names of linear layers, or ends of names, such as q_proj",
        ),
        (),
        later=True,
    )
    """The layers."""

    def _together(self) -> Rules:
        layers = "names of linear layers when lora.rank is not 0, such as q_proj"
        yield self.rank and not self.targets, "targets", layers
        yield self.targets and not self.rank, "rank", "at least 1 when there are lora.targets"


class EvalSpec(Spec, section="eval"):
    """Samples that are never trained on, and how often their loss is computed on the way."""

    every: int = setting(integer(0, 1_000_000_000), 0, later=True)
    """Before each step that this divides, and at the end, the loss is computed; 0 = never."""
    samples: int = setting(integer(0, 2**31), 0, later=True)
    """How many, spread evenly over the data; a multiple of `batch.microbatch_size`."""
    data: str = setting(
        text(rf"files|{_FUNCTION}", '"files" (given with --eval-data), or package.module:function'),
        "files",
        later=True,
    )
    """Text; or a function, where code makes the samples of the training too."""
    sha256: str = setting(rules.DIGEST, "", later=True)
    """Of these data, as `data.sha256`. Filled in when the run is published."""
    tokens: int = setting(integer(0, 2**48), 0, later=True)
    """How many they are, as `data.tokens`. Filled in when the run is published."""

    def _together(self) -> Rules:
        yield self.every and not self.samples, "samples", "at least 1 when eval.every is"
        yield self.samples and not self.every, "every", "at least 1 when eval.samples is"
        apart = bool(self.sha256) != bool(self.tokens) or (self.sha256 and not self.every)
        yield apart, "sha256", "given together with eval.tokens and eval.every"


TABLES: dict[str, type[Spec]] = {
    spec.section: spec
    for spec in (
        *(ModelSpec, DataSpec, BatchSpec, OptimizerSpec, CodecSpec, AdmissionSpec, StartSpec),
        *(LoraSpec, EvalSpec, IslandsSpec),
    )
}
