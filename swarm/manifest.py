"""The manifest: the public terms of a run. Text -> Run -> canonical text, whose hash is the run's id.

It holds everything that changes a weight, and nothing else: any two peers with the same manifest compute the
same run. A manifest comes from a stranger, so it is small (`MAX_MANIFEST_BYTES`), every key is known, every
value has a type and a range, and an error names the key, the value and what would be allowed.

The canonical text has every key, in the order of the dataclasses below, defaults included and presets
expanded into numbers: that is what is published and hashed, so a default that changes later cannot change an
old run. Keys that were added later (`_rule(later=True)`) are left out at their default, which therefore may
never change: manifests that are older than the key keep their hash.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, cast

from swarm.codecs import KNOWN, PPM, ROUNDED, VALUES, parse_codec
from swarm.errors import SetupError, did_you_mean
from swarm.ids import Microbatch, Stage

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

MAX_MANIFEST_BYTES = 16_000
"""200 trainers, the most that `admission` takes, are 11 kB, 40 founders 2 kB; the rest is under 2 kB."""

MAX_TOLD = 256 * 8192
"""Stages times microbatches of a step, of which the run coordinator says what is lacking: 256 kB of bits."""
MAX_TRAINERS = 200
MAX_FOUNDERS = 40

MAX_ADAPTIVE = 16
"""Codecs that links may choose from: the header of a call is checked against each."""

MAX_CODE_WIDTH = 64
"""Of the table of tokens that each stage behind a bottleneck has: as wide as `hidden` it would be the largest
part of a stage. Part of what a manifest means."""

NO_ISLAND = -1
"""The number of a run that is no island of another."""

ID_HEX = 32
"""Hex digits of a run id: 128 bits, too many to make two manifests that share one on purpose."""


# --- rules for one value ------------------------------------------------------------------------------------


class _Rule(NamedTuple):
    """The values that a key may have."""

    allowed: str
    """In words, for errors."""
    accepts: Callable[[Any], Any]
    canonical: Callable[[Any], Any] = lambda value: value

    def check(self, value: Any) -> Any:
        """The value in its canonical type and form; raises ValueError if the key cannot have it."""
        if not self.accepts(value):
            raise ValueError
        return self.canonical(value)


def _integer(low: int, high: int) -> _Rule:
    # type() and not isinstance(): `true` is an int to Python and a typo to us.
    return _Rule(f"an integer from {low} to {high}", lambda v: type(v) is int and low <= v <= high)


def _number(low: float, high: float, *, above: bool = False, below: bool = False) -> _Rule:
    def accepts(v: Any) -> bool:
        if type(v) not in (int, float) or not low <= v <= high:  # NaN fails here as well
            return False
        return not ((above and v == low) or (below and v == high))

    low_text = f"above {low:g}" if above else f"at least {low:g}"
    allowed = f"a number {low_text} and {'below' if below else 'at most'} {high:g}"
    return _Rule(allowed, accepts, lambda v: float(v) + 0.0)  # one zero of -0.0 and 0.0


_FLAG = _Rule("true or false", lambda v: type(v) is bool)


def _choice(*choices: Any, told: Sequence[Any] = ()) -> _Rule:
    """`told`: what an error offers; more than the choices, if others make it another table."""
    return _Rule(_one_of(told or choices), lambda v: any(type(v) is type(c) and v == c for c in choices))


def _matches(pattern: str) -> Callable[[Any], bool]:
    """Whether a value is a text of that form."""
    known = re.compile(pattern)
    return lambda v: type(v) is str and known.fullmatch(v) is not None


def _text(pattern: str, allowed: str) -> _Rule:
    """No character that needs an escape in TOML may match `pattern`, so that `to_toml` is trivial."""
    return _Rule(allowed, _matches(pattern))


def _canonical_json(value: str) -> str:
    """Sorted keys, no spaces, ASCII only, and no single quote: a literal string of TOML."""
    if not value:
        return value
    try:
        found = json.loads(value)
        text = json.dumps(found, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise ValueError from None
    if type(found) is not dict:
        raise ValueError
    return text.replace("'", "\\u0027")


_JSON = _Rule(
    'a JSON object as text, such as \'{"model_type":"gpt2"}\', without NaN or infinite numbers',
    lambda v: type(v) is str,
    _canonical_json,
)


def _is_cut(value: Any) -> bool:
    if type(value) is not str:
        return False
    runs = [re.fullmatch(r"(0|[1-9][0-9]{0,3})\*([1-9][0-9]{0,6})", run) for run in value.split(" ") if value]
    return all(runs) and all(a[1] != b[1] for a, b in itertools.pairwise(runs) if a and b)


_CUT = _Rule(
    "the stage of each operator, runs of one stage as stage*count, such as 0*120 1*44; or empty", _is_cut
)


MAX_SOURCES = 64
_SOURCE = r"[1-9][0-9]{0,5}\*[1-9][0-9]{0,14}"
_MIXTURE = _text(
    rf"({_SOURCE}( {_SOURCE}){{0,{MAX_SOURCES - 1}}})?",
    f"weight*tokens of each source, at most {MAX_SOURCES}, such as 7*1200000 3*50000; or empty",
)


def _list_of(accepts: Callable[[Any], bool], most: float) -> Callable[[Any], bool]:
    """Whether a value is a list of at most so many, each of which is accepted."""
    return lambda v: type(v) in (list, tuple) and len(v) <= most and all(map(accepts, v))


def _set_of(accepts: Callable[[Any], bool], most: int, allowed: str) -> _Rule:
    """A list without duplicates. A set has no order: the same elements are the same text."""
    are = _list_of(accepts, most)
    allowed = f"a list of at most {most} different {allowed}"
    return _Rule(allowed, lambda v: are(v) and len(set(v)) == len(v), lambda v: tuple(sorted(v)))


_is_name = _matches(r"[A-Za-z0-9_.*?]{1,200}")
_NAMES = _set_of(
    _is_name, 64, "names of weights, in which * and ? stand for other characters, such as embed.*"
)


_SIZES = r"[1-9][0-9]{0,6}(x[1-9][0-9]{0,6}){0,6}"
_are_inputs = _list_of(_matches(rf"[A-Za-z_][A-Za-z0-9_]{{0,99}} (true|(int|float|bool)( {_SIZES})?)"), 16)
_INPUTS = _Rule(
    'a list of at most 16 of the form "NAME int SIZES", with int, float or bool and the sizes of one sample, '
    'such as "pixel_values float 3x224x224" or "labels int"; or "NAME true"',
    lambda v: _are_inputs(v) and len({one.partition(" ")[0] for one in v}) == len(v),
    tuple,
)


# An Ed25519 key inside a libp2p identity multihash: 38 bytes that start with 00 24 08 01 12 20, in base58.
_PEER_ID = r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}"


def _is_codec(value: Any) -> bool:
    return type(value) is str and parse_codec(value) is not None


_CODEC = _Rule(f"one of {KNOWN}, where R, the part kept, is between 0 and 1, such as 0.05", _is_codec)
_CODECS = _Rule(
    f"{_CODEC.allowed}; or a list of them, one for each of the boundaries between stages, in order",
    lambda v: all(_is_codec(one) for one in (v if type(v) in (list, tuple) else (v,))),
    lambda v: v if type(v) is str else tuple(v),
)
"""A codec, or one for each boundary; the number of boundaries is not known here."""
_REDUCE = _Rule(f"{', '.join(ROUNDED)}, or {_CODEC.allowed}", lambda v: v in [*ROUNDED] or _is_codec(v))
_ADAPTIVE = _set_of(_is_codec, MAX_ADAPTIVE, f"codecs, each {_CODEC.allowed}")


def _peers(most: int) -> _Rule:
    """A rule for a set of peer ids."""
    return _set_of(_matches(_PEER_ID), most, "peer ids (12D3KooW…, 52 characters each)")


_DIGEST = _text(r"([0-9a-f]{64})?", "64 lower-case hex digits, or empty: not pinned yet")
_DIGESTS = _Rule(
    "a list of 64 lower-case hex digits each, one for each stage; or empty: not pinned yet",
    _list_of(_matches("[0-9a-f]{64}"), math.inf),
    tuple,
)


def _rule(rule: _Rule, default: Any = MISSING, *, later: bool = False) -> Any:
    """A field with its rule. `later`: the key is younger than published manifests; at its default it is left
    out of the text.
    """
    return field(default=default, metadata={"rule": rule, "later": later})


def _shown(value: Any) -> str:
    """`value` for an error message: short and printable, although a stranger wrote it."""
    if isinstance(value, (bool, str, int)) and not (type(value) is int and value.bit_length() > 200):
        text = _toml(value)
    else:
        try:
            text = " ".join(repr(value).split())
        except ValueError:  # Python refuses to print an integer of more than 4300 digits
            text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


def _toml(value: Any) -> str:
    """`value` as TOML; strings must need no escape for the result to be canonical (see `_Text`)."""
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is str:
        if not value.isprintable():
            return repr(value)
        return f"'{value}'" if '"' in value or "\\" in value else f'"{value}"'
    if type(value) in (tuple, list):
        return "[" + "".join(f"\n  {_toml(item)}," for item in value) + ("\n]" if value else "]")
    return repr(value)


def _one_of(choices: Sequence[Any]) -> str:
    return "one of " + ", ".join(_toml(choice) for choice in choices)


def wrong(key: str, value: Any, allowed: str) -> SetupError:
    """The error for a key with an impossible value."""
    return SetupError(f"{key} = {_shown(value)} in the run's manifest: it must be {allowed}")


class _Spec:
    """Base of the tables below: checks and normalises every field by its rule, then runs `_cross_check`."""

    __slots__ = ()
    section: ClassVar[str] = ""

    def __init_subclass__(cls, section: str = "") -> None:
        cls.section = section or cls.section  # none is given when dataclasses make a class anew, for slots

    def __post_init__(self) -> None:
        for item in fields(cast(Any, self)):
            rule = item.metadata.get("rule")
            if rule is None:
                continue
            value = getattr(self, item.name)
            try:
                object.__setattr__(self, item.name, rule.check(value))
            except ValueError:
                raise wrong(self._key(item.name), value, rule.allowed) from None
        self._cross_check()

    def _cross_check(self) -> None:
        """Raise an error for values that are possible each but not together."""

    def wrong(self, name: str, allowed: str) -> SetupError:
        """The error for the present value of a key."""
        return wrong(self._key(name), getattr(self, name), allowed)

    @classmethod
    def _key(cls, name: str) -> str:
        return f"{cls.section}.{name}" if cls.section else name


MODEL_KINDS = ("gpt", "counting", "code", "hf")
"""The first two are built in (`ModelSpec`), the others are custom models (`CustomModelSpec`)."""


# --- the tables of a manifest -------------------------------------------------------------------------------


_DECIMAL = r"[0-9]{1,9}(\.[0-9]{1,9})?"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(_Spec, section="model"):
    """A built-in model, and the number of stages that it is cut into."""

    kind: Literal["gpt", "counting"] = _rule(_choice("gpt", "counting", told=MODEL_KINDS), "gpt")
    """A decoder without biases; or the audit model whose weights count microbatches (its sizes below mean
    nothing)."""
    layers: int = _rule(_integer(1, 1024))
    """Transformer blocks in all stages together; at least one per stage."""
    hidden: int = _rule(_integer(1, 65_536))
    """Width of the residual stream, which is what crosses a stage boundary per token."""
    heads: int = _rule(_integer(1, 1024))
    """Attention heads; divides `hidden`."""
    ffn_hidden: int = _rule(_integer(1, 524_288))
    """Width inside the feed-forward part of a block."""
    vocab_size: int = _rule(_integer(2, 1_048_576))
    """Tokens the model knows; at least as many as the tokenizer makes (256 for bytes)."""
    norm: Literal["rmsnorm", "layernorm"] = _rule(_choice("rmsnorm", "layernorm"), "rmsnorm")
    """Normalisation before attention, before the feed-forward part and before the head."""
    positions: Literal["rotary", "learned"] = _rule(_choice("rotary", "learned"), "rotary")
    """How a token knows its place. Rotary needs an even number of channels per head."""
    dropout: float = _rule(_number(0.0, 1.0, below=True), 0.0)
    """Probability of dropping a channel; the random numbers are a function of the microbatch."""
    stages: int = _rule(_integer(1, 1024))
    """S: the number of stages that the model is cut into."""
    z_loss: float = _rule(_number(0.0, 1.0), 0.0, later=True)
    """So many times the square of the log of the softmax's denominator is added to the loss in training, so
    that logits stay small; 1e-4 is usual."""
    kv_heads: int = _rule(_integer(0, 1024), 0, later=True)
    """Heads of keys and values, each of which several attention heads share; divides `heads`. 0: as many as
    `heads`."""
    mlp: Literal["gelu", "swiglu"] = _rule(_choice("gelu", "swiglu"), "gelu", later=True)
    """The feed-forward part: two matrices, or three with a gate. With `swiglu`, `rmsnorm` and `rotary` the
    decoder is Llama's, and `swarm export --hf` makes a folder that transformers reads."""
    head: Literal["free", "tied"] = _rule(_choice("free", "tied"), "free", later=True)
    """Whether the head has a matrix of its own or that of the embedding, which first and last stage share
    then."""
    qk_norm: bool = _rule(_FLAG, False, later=True)
    """Normalise queries and keys of each head before they are turned."""
    rotary_base: float = _rule(_number(1.0, 1e12), 10_000.0, later=True)
    """The slowest pair of channels turns once in about 2 pi times as many tokens."""
    rotary_scaling: str = _rule(
        _text(rf"(linear {_DECIMAL}|llama3( {_DECIMAL}){{3}} [0-9]{{1,9}})?", "empty, \"linear FACTOR\" or "
              '"llama3 FACTOR LOW HIGH TOKENS"'), "", later=True,
    )  # fmt: skip
    """How rotary positions are stretched for longer texts than before: all by a factor, or, as Llama 3.1,
    those that turn slowly: fewer than LOW times in TOKENS all, more than HIGH times none."""
    bottleneck: int = _rule(_integer(0, 65_536), 0, later=True)
    """Channels that cross a stage boundary per token, instead of `hidden`: what narrows and widens the
    residual stream there is trained with the model, which so depends on `stages`. 0: all."""

    def _cross_check(self) -> None:
        if self.kind == "counting":
            return
        if self.bottleneck >= self.hidden or (self.bottleneck and self.stages == 1):
            least = "0 when model.stages is 1" if self.stages == 1 else f"less than hidden ({self.hidden})"
            raise self.wrong("bottleneck", least)
        if self.hidden % self.heads:
            raise self.wrong("heads", f"a divisor of model.hidden ({self.hidden})")
        if self.heads % self.key_heads:
            raise self.wrong("kv_heads", f"a divisor of model.heads ({self.heads})")
        if self.rotary_scaling and not self._scales():
            raise self.wrong("rotary_scaling", "of factors of at least 1, LOW below HIGH, and TOKENS above 0")
        if self.positions == "rotary" and (self.hidden // self.heads) % 2:
            raise self.wrong(
                "heads",
                f"such that model.hidden ({self.hidden}) / heads is even, which rotary positions need",
            )
        if self.stages > self.layers:
            raise self.wrong("stages", f"at most model.layers ({self.layers}): one layer per stage")

    def _scales(self) -> bool:
        factor, *of_llama = self.scaling
        low, high, tokens = of_llama or (1.0, 2.0, 1.0)
        return factor >= 1.0 and 0.0 < low < high and tokens > 0

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomModelSpec(_Spec, section="model"):
    """A custom model, and how it is cut. `swarm.model.graph.custom_model` builds it, and fills in the last
    ones.
    """

    kind: Literal["code", "hf"] = _rule(_choice("code", "hf", told=MODEL_KINDS))
    """A function that is installed on every peer, or a config of Hugging Face's transformers."""
    source: str = _rule(
        _text(rf"({_FUNCTION})?", 'package.module:function, or empty when model.kind is "hf"'), ""
    )
    """The function, for `code`: it returns (module, inputs), or (module, inputs, loss, targets)."""
    config: str = _rule(_JSON, "")
    """The content of a `config.json`, as text, for `hf`."""
    inputs: tuple[str, ...] = _rule(_INPUTS, (), later=True)
    """For `hf`: what its `forward` is given, and the sizes of one sample of each; empty = tokens and labels,
    or images and labels."""
    stages: int = _rule(_integer(1, 1024))
    """S: the number of stages that the model is cut into."""
    vocab_size: int = _rule(_integer(2, 1_048_576), 256)
    """Integers that enter the model (tokens, labels) are 0 … vocab_size - 1."""
    frozen: tuple[str, ...] = _rule(_NAMES, (), later=True)
    """Weights that stay as they are at the start: they are not summed, sent or stored."""
    version: str = _rule(
        _text(
            r"([A-Za-z0-9][A-Za-z0-9._-]{0,100} [A-Za-z0-9][A-Za-z0-9.+!_-]{0,100})?",
            "transformers and its version, or sha256 and the digest of a file; or empty: not pinned yet",
        ),
        "",
    )
    """Of the code: `transformers 5.1.0`; `sha256 …` of the source file of a user's own."""
    graph: str = _rule(_DIGEST, "")
    """SHA-256 of the operators as traced."""
    weights: str = _rule(_text("", "empty: model.digests pins them, stage by stage"), "")
    """Always empty; a part of the text that is hashed."""
    digests: tuple[str, ...] = _rule(_DIGESTS, (), later=True)
    """SHA-256 of what each stage begins with: the code initialises it, and each of its draws has a seed of
    its own, so that nobody has to make the weights of other stages."""
    cut: str = _rule(_CUT, "")
    """The stage of each operator."""

    def _cross_check(self) -> None:
        given, other = ("source", "config") if self.kind == "code" else ("config", "source")
        if not getattr(self, given):
            what = "package.module:function" if given == "source" else _JSON.allowed
            raise self.wrong(given, f'{what} when model.kind is "{self.kind}"')
        if getattr(self, other):
            raise self.wrong(other, f'empty when model.kind is "{self.kind}"')
        if self.inputs and self.kind != "hf":
            raise self.wrong("inputs", 'empty when model.kind is "code": the function returns its inputs')
        if self.digests and len(self.digests) != self.stages:
            raise self.wrong("digests", f"a list of {self.stages}, one for each stage; or empty")

    @property
    def pinned(self) -> bool:
        """Whether the manifest says exactly which model it is, so that peers can compare."""
        return bool(self.version and self.graph and self.digests and self.cut)


AnyModel: TypeAlias = ModelSpec | CustomModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec(_Spec, section="data"):
    """The text, as tokens; or samples that code makes."""

    source: Literal["tales", "files", "code"] = _rule(_choice("tales", "files", "code"))
    """Little tales that every machine tells itself alike (2 MB), the user's text files, or samples that an
    installed function makes."""
    code: str = _rule(
        _text(rf"({_FUNCTION})?", 'package.module:function, or empty unless data.source is "code"'),
        "",
        later=True,
    )
    """The function: it returns a sequence of samples, each a tuple of arrays, one for each input of the model
    and without the batch's dimension."""
    sha256: str = _rule(_DIGEST, "")
    """Root of the Merkle tree over the tokens, of which an index has more; or SHA-256 of all samples.
    Filled in when the run is published."""
    root: str = _rule(_DIGEST, "", later=True)
    """The same root, if what trainers send is proven to be of it. Filled in when the run is published, if
    it names trainers and has a built-in model."""
    tokens: int = _rule(_integer(0, 2**48), 0)
    """Number of tokens, or of samples; 0 = not pinned yet. Filled in when the run is published."""
    mixture: str = _rule(_MIXTURE, "", later=True)
    """The sources that the tokens are of, one behind the other: of so many samples as all weights sum up
    to, exactly the weight is from each. Filled in from an index; empty = one source."""
    tokenizer: Literal["bytes", "file"] = _rule(_choice("bytes", "file"), "bytes")
    """One token per byte, or a JSON file of `tokenizers`, given with `--tokenizer`."""
    tokenizer_sha256: str = _rule(_DIGEST, "")
    """SHA-256 of that file. Filled in when the run is published."""
    sequence_length: int = _rule(_integer(1, 1_048_576))
    """T: tokens the model sees in one sample; a sample reads one more, for the last label. Of samples that
    code makes: tokens in each, for a model of transformers; else 1, which may be left out."""
    document_mask: bool = _rule(_FLAG, False, later=True)
    """Attention does not cross the end of a document (`eos`), and learned positions begin anew behind it.
    Of the built-in decoder."""
    eos: int = _rule(_integer(-1, 1_048_575), -1, later=True)
    """The token that ends each document, for `document_mask`. Filled in from an index when the run is
    published; -1 = not known yet."""

    def _cross_check(self) -> None:
        if self.eos >= 0 and not self.document_mask:
            raise self.wrong("eos", "left out when data.document_mask is false")
        if self.source == "code" and not self.code:
            raise self.wrong("code", 'package.module:function when data.source is "code"')
        if self.source == "code" and self.tokenizer != "bytes":
            raise self.wrong("tokenizer", '"bytes", or left out, when data.source is "code"')
        if self.source != "code" and self.code:
            raise self.wrong("code", f'empty when data.source is "{self.source}"')
        if self.sha256 and not self.tokens:
            raise self.wrong("tokens", "the number of tokens when data.sha256 is set")
        if self.root and not self.tokens:
            raise self.wrong("tokens", "the number of tokens when data.root is set")
        if self.source != "code" and self.tokens and self.tokens <= self.sequence_length:
            raise self.wrong(
                "tokens", f"more than data.sequence_length ({self.sequence_length}), or 0: not pinned"
            )
        if self.mixture and (self.source != "files" or self.tokens != sum(n for _, n in self.sources)):
            raise self.wrong("mixture", f"of all {self.tokens} tokens (data.tokens), or empty")
        for _, tokens in self.sources:
            if tokens <= self.sequence_length:
                raise self.wrong(
                    "mixture",
                    f"of sources with more than data.sequence_length ({self.sequence_length}) tokens",
                )
        if self.tokenizer == "bytes" and self.tokenizer_sha256:
            raise self.wrong("tokenizer_sha256", 'empty when data.tokenizer is "bytes"')

    @property
    def sources(self) -> list[tuple[int, int]]:
        """The weight and the tokens of each source of a mixture."""
        pairs = (source.split("*") for source in self.mixture.split())
        return [(int(weight), int(tokens)) for weight, tokens in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec(_Spec, section="batch"):
    """How a step's samples are cut into microbatches."""

    microbatch_size: int = _rule(_integer(1, 65_536))
    """Samples in one microbatch."""
    microbatches_per_step: int = _rule(_integer(1, 8192))
    """M: microbatches whose gradients are averaged into one step."""
    microbatch_threads: int = _rule(_integer(1, 1024), 1, later=True)
    """CPU threads that share one microbatch. They split sums inside its operators and so decide
    the last bits: all peers have as many, and a peer's other cores compute other microbatches."""
    warmup_steps: int = _rule(_integer(0, 100_000), 0, later=True)
    """Batch warm-up: over so many steps, the first ones, the microbatches of a step grow evenly from
    `warmup_microbatches` to `microbatches_per_step`. 0 = none."""
    warmup_microbatches: int = _rule(_integer(0, 8191), 0, later=True)
    """Microbatches of the first step, where there is a batch warm-up; else 0."""

    def _cross_check(self) -> None:
        most = self.microbatches_per_step - 1
        if self.warmup_steps and not most:
            raise self.wrong("warmup_steps", "0 when batch.microbatches_per_step is 1")
        least, most = (1, most) if self.warmup_steps else (0, 0)
        if not least <= self.warmup_microbatches <= most:
            allowed = f"from 1 to {most}, less than microbatches_per_step," if most else "0"
            has = f"{allowed} when batch.warmup_steps is {self.warmup_steps}"
            raise self.wrong("warmup_microbatches", has)

    def microbatches(self, t: int) -> int:
        """How many step `t` has."""
        if t >= self.warmup_steps:
            return self.microbatches_per_step
        first = self.warmup_microbatches
        return first + (self.microbatches_per_step - first) * t // self.warmup_steps

    def microbatches_before(self, t: int) -> int:
        """How many the steps before `t` have together."""
        grown = _grown(self)
        warm = min(t, self.warmup_steps)
        return grown[warm] + (t - warm) * self.microbatches_per_step


@lru_cache(maxsize=16)
def _grown(batch: BatchSpec) -> tuple[int, ...]:
    """`microbatches_before` the steps of the warm-up, and the one behind it."""
    return tuple(accumulate(map(batch.microbatches, range(batch.warmup_steps)), initial=0))


class Terms(NamedTuple):
    """How a weight is stepped."""

    lr: float
    """Times the learning rate of the step."""
    decay: float
    is_muon: bool


_NUMBER = _number(0.0, 1e6)


def _read_group(text: str) -> tuple[str, dict[str, float]]:
    """The names of a group, and what it says of them; raises ValueError if it is none."""
    pattern, *words = text.split(" ")
    terms = {key: _NUMBER.check(float(value)) for key, _, value in (word.partition("=") for word in words)}
    if (
        not terms
        or len(terms) != len(words)
        or terms.keys() - {"lr", "weight_decay"}
        or not _is_name(pattern)
    ):
        raise ValueError
    return pattern, terms


def _canonical_groups(groups: Any) -> tuple[str, ...]:
    read = [_read_group(group) for group in groups]
    return tuple(
        " ".join([pattern, *(f"{key}={terms[key]}" for key in ("lr", "weight_decay") if key in terms)])
        for pattern, terms in read
    )


_GROUPS = _Rule(
    'a list of at most 64 of the form "NAMES lr=MULTIPLE weight_decay=NUMBER", of which one may be left out, '
    'such as "embed.* lr=0.1"',
    _list_of(lambda one: type(one) is str, 64),
    _canonical_groups,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec(_Spec, section="optimizer"):
    """How the mean gradient becomes new weights."""

    name: Literal["adamw", "sgd", "adamw8bit", "muon"] = _rule(
        _choice("adamw", "sgd", "adamw8bit", "muon"), "adamw"
    )
    """`adamw8bit` keeps its moments in 8 bits and needs CUDA; `muon` is AdamW but for weights that the key
    `muon` names."""
    lr: float = _rule(_number(0.0, 1000.0, above=True))
    """Highest learning rate, after the warm-up."""
    beta1: float = _rule(_number(0.0, 1.0, below=True), 0.9)
    """Decay of the first moment (AdamW)."""
    beta2: float = _rule(_number(0.0, 1.0, below=True), 0.95)
    """Decay of the second moment (AdamW)."""
    eps: float = _rule(_number(0.0, 1.0, above=True), 1e-8)
    """Added to the root of the second moment (AdamW)."""
    weight_decay: float = _rule(_number(0.0, 10.0), 0.1)
    """Decoupled decay, times the learning rate, of weights with two or more dimensions."""
    momentum: float = _rule(_number(0.0, 1.0, below=True), 0.0)
    """Of SGD; must be 0 otherwise."""
    warmup_steps: int = _rule(_integer(0, 1_000_000_000), 0)
    """Steps over which the learning rate grows linearly; fewer than `steps`."""
    schedule: Literal["constant", "cosine", "linear", "inverse_sqrt", "wsd"] = _rule(
        _choice("constant", "cosine", "linear", "inverse_sqrt", "wsd"), "constant"
    )
    """The learning rate after the warm-up: as it is; half a cosine or a line down to `min_lr_ratio * lr`; the
    inverse square root of the step; or as it is until `decay_steps` are left, then a line (`wsd`)."""
    min_lr_ratio: float = _rule(_number(0.0, 1.0), 0.1)
    """Learning rate of the last step ÷ `lr`, for the cosine and the lines."""
    clip_norm: float = _rule(_number(0.0, 1e9), 1.0)
    """The mean gradient of the whole model is scaled down to this norm if it is longer; 0 = never."""
    decay_steps: int = _rule(_integer(0, 1_000_000_000), 0, later=True)
    """For `wsd`: over so many steps, the last ones, the learning rate falls; else 0."""
    groups: tuple[str, ...] = _rule(_GROUPS, (), later=True)
    """Weights by name with a learning rate that is a multiple of the others', or a decay of their own; the
    first that matches a weight counts."""
    muon: tuple[str, ...] = _rule(_NAMES, (), later=True)
    """For `muon`: weights of two dimensions, in which * and ? stand for other characters, such as layers.*"""
    moments: Literal["float32", "bfloat16"] = _rule(_choice("float32", "bfloat16"), "float32", later=True)
    """What the means of gradients and of their squares are kept in: 8 bytes a weight, or 4. bfloat16 is
    rounded at random, drawn from run, step, weight and place, so that on average nothing is lost."""

    def _cross_check(self) -> None:
        if self.name == "adamw8bit" and self.moments != "float32":
            raise self.wrong("moments", '"float32", or left out, when optimizer.name is "adamw8bit"')
        if self.name != "sgd" and self.momentum:
            raise self.wrong("momentum", f'0 when optimizer.name is "{self.name}"')
        if (self.name == "muon") != bool(self.muon):
            some = "names of weights" if self.name == "muon" else "empty"
            raise self.wrong("muon", f'{some} when optimizer.name is "{self.name}"')
        if (self.schedule == "wsd") != bool(self.decay_steps):
            some = "at least 1" if self.schedule == "wsd" else "0"
            raise self.wrong("decay_steps", f'{some} when optimizer.schedule is "{self.schedule}"')

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

    def terms_of(self, name: str, dims: int) -> Terms:
        """How a weight is stepped, by its full name and the number of its dimensions."""
        lr, decay = 1.0, self.weight_decay if dims >= 2 else 0.0
        for group in self.groups:
            pattern, terms = _read_group(group)
            if fnmatchcase(name, pattern):
                lr, decay = terms.get("lr", lr), terms.get("weight_decay", decay)
                break
        return Terms(lr, decay, dims == 2 and any(fnmatchcase(name, pattern) for pattern in self.muon))

    @property
    def patterns(self) -> dict[str, tuple[str, ...]]:
        """The names of weights that it has, by key: each is meant to match some."""
        return {"groups": tuple(_read_group(group)[0] for group in self.groups), "muon": self.muon}


_VALUES = "one of " + ", ".join(VALUES)
_WHY = "and its gradient has the same places"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec(_Spec, section="codec"):
    """How tensors look on the wire, per direction. The names are those of `swarm.codecs`."""

    forward: str | tuple[str, ...] = _rule(_CODECS, "blockwise8")
    """Activations between stages: one codec, or a list with one for each boundary."""
    backward: str | tuple[str, ...] = _rule(_CODECS, "blockwise8")
    """Gradients of what was sent, likewise; after a top-k, the values of its positions. Not a top-k
    itself."""
    reduce: str = _rule(_REDUCE, "none")
    """Weight gradients between the replicas of a stage. `rounded16` and `rounded8` round those of each
    microbatch at random, by names: half and a quarter of the bytes, and the result is still a function of the
    manifest. With a codec it depends on which peer computed what."""
    adaptive: tuple[str, ...] = _rule(_ADAPTIVE, (), later=True)
    """What a peer may send forward instead, as its line to the next peer needs; empty = nothing. If there
    is any, the result of a microbatch depends on its route: each still counts once, but no two runs are
    alike."""

    def _cross_check(self) -> None:
        forward = [self.forward] if isinstance(self.forward, str) else self.forward
        backward = [self.backward] if isinstance(self.backward, str) else self.backward
        if len(forward) != len(backward):
            if 1 not in (len(forward), len(backward)):
                allowed = f"one codec, or as many as codec.forward has ({len(forward)})"
                raise wrong("codec.backward", list(backward), allowed)
            forward, backward = forward * len(backward), backward * len(forward)
        for sent, answer in zip(forward, backward, strict=False):
            for codec in (sent, *self.adaptive):
                if _sparse(codec) and _sparse(answer):
                    allowed = f"{_VALUES}: {codec} keeps a part of what is sent, {_WHY}"
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

    def allowed_at(self, boundary: int) -> tuple[str, ...]:
        """All codecs that may be used there: the manifest's own first."""
        prescribed = self.forward_at(boundary)
        return (prescribed, *(codec for codec in self.adaptive if codec != prescribed))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSpec(_Spec, section="admission"):
    """Which peers may do what."""

    owner: str = _rule(
        _text(rf"({_PEER_ID})?", "a peer id (12D3KooW…, 52 characters), or empty: no owner"), ""
    )
    """Peer id whose signature the published manifest carries; empty = the hash is enough."""
    trainers: tuple[str, ...] = _rule(_peers(MAX_TRAINERS), ())
    """Peer ids that may send microbatches, and that vouch for the peers which answer them; empty =
    everybody sends, and nobody vouches."""
    founders: tuple[str, ...] = _rule(_peers(MAX_FOUNDERS), (), later=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandsSpec(_Spec, section="islands"):
    """Virtual workers that train by themselves, and meet every few steps (DiLoCo, arXiv 2311.08105).

    A meeting leaves all of them with the same state of each stage: the optimizer of their steps begins anew.
    So an island that has lost a stage gets it from any other, and goes on from the last meeting.
    """

    count: int = _rule(_integer(1, 4096), 1, later=True)
    """How many; each takes an equal share of the microbatches of a step. 1 = none: replicas add up their
    gradients in each step."""
    local_steps: int = _rule(_integer(1, 1_000_000), 32, later=True)
    """Steps between two meetings. A meeting is a step, too, of no microbatch."""
    outer_lr: float = _rule(_number(0.0, 10.0, above=True), 0.7, later=True)
    """How far the weights go, at a meeting, towards where the islands are on average."""
    outer_momentum: float = _rule(_number(0.0, 1.0, below=True), 0.9, later=True)
    """Nesterov's, of the meetings."""
    codec: str = _rule(
        _Rule(
            f"{_VALUES}: what a top-k leaves out would never arrive", lambda v: type(v) is str and v in VALUES
        ),
        "none",
        later=True,
    )
    """How what an island has changed travels."""

    warmup_steps: int = _rule(_integer(0, 1_000_000), 0, later=True)
    """Steps after a meeting, and after the start, in which the learning rate rises to what it would be: an
    optimizer that begins anew goes too far at first."""

    def trained(self, t: int) -> int:
        """Steps before `t` that are no meetings."""
        return t - t // (self.local_steps + 1) if self.count > 1 else t

    def moments_age(self, t: int) -> int:
        """Steps since the optimizer began whose state step `t` finds."""
        return t % (self.local_steps + 1) if self.count > 1 else t

    def _cross_check(self) -> None:
        if self.count == 1 and _values(self):
            raise self.wrong("count", "at least 2 when there are other values in [islands]")


_HUB_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,95}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSpec(_Spec, section="start"):
    """Trained weights that a run starts from, instead of those that its seed draws."""

    weights: str = _rule(
        _text(
            rf"(folder|hf:{_HUB_NAME}(/{_HUB_NAME})?@{_HUB_NAME})?",
            '"folder" (which --start names), "hf:OWNER/NAME@REVISION", or empty: drawn from the seed',
        ),
        "",
        later=True,
    )
    """Safetensors in a folder that the owner has, or in a repository of Hugging Face; peers that cannot read
    them ask others."""
    digests: tuple[str, ...] = _rule(_DIGESTS, (), later=True)
    """SHA-256 of the tensors that each stage reads. Filled in when the run is published."""

    def _cross_check(self) -> None:
        if self.digests and not self.weights:
            raise self.wrong("digests", "empty when start.weights is")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec(_Spec, section="lora"):
    """Thin matrices that are trained beside layers of a custom model, of which all else is frozen (LoRA)."""

    rank: int = _rule(_integer(0, 65_536), 0, later=True)
    """Rows of the first matrix of each pair; 0 = the model itself is trained."""
    alpha: float = _rule(_number(0.0, 1e6, above=True), 16.0, later=True)
    """What they add to a layer counts alpha / rank times."""
    targets: tuple[str, ...] = _rule(
        _set_of(
            _matches(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*"),
            64,
            "names of linear layers, or ends of names, such as q_proj",
        ),
        (),
        later=True,
    )
    """The layers."""

    def _cross_check(self) -> None:
        if self.rank and not self.targets:
            raise self.wrong("targets", "names of linear layers when lora.rank is not 0, such as q_proj")
        if self.targets and not self.rank:
            raise self.wrong("rank", "at least 1 when there are lora.targets")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSpec(_Spec, section="eval"):
    """Samples that are never trained on, and how often their loss is computed on the way."""

    every: int = _rule(_integer(0, 1_000_000_000), 0, later=True)
    """Before each step that this divides, and at the end, the loss is computed; 0 = never."""
    samples: int = _rule(_integer(0, 2**31), 0, later=True)
    """How many, spread evenly over the data; a multiple of `batch.microbatch_size`."""
    data: str = _rule(
        _text(rf"files|{_FUNCTION}", '"files" (given with --eval-data), or package.module:function'),
        "files",
        later=True,
    )
    """Text; or a function, where code makes the samples of the training too."""
    sha256: str = _rule(_DIGEST, "", later=True)
    """Of these data, as `data.sha256`. Filled in when the run is published."""
    tokens: int = _rule(_integer(0, 2**48), 0, later=True)
    """How many they are, as `data.tokens`. Filled in when the run is published."""

    def _cross_check(self) -> None:
        if bool(self.every) != bool(self.samples):
            name = "samples" if self.every else "every"
            raise self.wrong(name, f"at least 1 when eval.{'every' if self.every else 'samples'} is")
        if bool(self.sha256) != bool(self.tokens) or (self.sha256 and not self.every):
            raise self.wrong("sha256", "given together with eval.tokens and eval.every")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(_Spec):
    """The terms of a run. Equal runs have equal texts and ids, and the other way round."""

    format: int = _rule(_choice(2), 2)
    """Version of this file's meaning: it changes whenever the same keys would train another model. Leave
    it out. Since 2 an epoch has each window of the data once."""
    name: str = _rule(
        _text(
            r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,62}",
            "1 to 63 letters, digits, spaces or . _ + - and no space first",
        )
    )
    """For people. Two runs that differ in nothing else are two runs."""
    seed: int = _rule(_integer(0, 2**63 - 1))
    """Seed of weights, samples and dropout."""
    steps: int = _rule(_integer(1, 1_000_000_000))
    """T: optimizer steps in the run; they are 0 … steps - 1."""
    dtype: Literal["float32", "bfloat16", "float64"] = _rule(
        _choice("float32", "bfloat16", "float64"), "float32"
    )
    """The dtype of the arithmetic. bfloat16 is autocast over float32 weights; float64 is for proofs."""
    delayed_updates: bool = _rule(_FLAG, False)
    """Compute step t with the weights of t - 1, so that averaging overlaps the next step. It costs loss
    in short runs."""
    exact_sums: bool = _rule(_FLAG, True)
    """Add gradients as fixed-point numbers, so that the result does not depend on the order of additions, not
    by a bit; costs 2 to 4 % on a CPU. float64 runs, and a lossy codec.reduce, add floats in any case."""
    checkpoint_every: int = _rule(_integer(0, 1_000_000_000), 0)
    """Steps between checkpoints; 0 = never."""
    rebalance_every_s: int = _rule(_integer(0, 86_400), 60)
    """Seconds between decisions on which peers move to a slower stage; 0 = no peer ever moves."""
    model: AnyModel
    data: DataSpec
    batch: BatchSpec
    optimizer: OptimizerSpec
    codec: CodecSpec = field(default_factory=CodecSpec)
    admission: AdmissionSpec = field(default_factory=AdmissionSpec)
    start: StartSpec = field(default_factory=StartSpec)
    lora: LoraSpec = field(default_factory=LoraSpec)
    eval: EvalSpec = field(default_factory=EvalSpec)
    islands: IslandsSpec = field(default_factory=IslandsSpec)
    id: str = field(init=False, repr=False, compare=False)
    """The first 32 hex digits of the SHA-256 of the canonical text; stored, since every message carries
    it. That of an island has its number besides."""
    number: int = field(init=False, repr=False, default=NO_ISLAND)
    """Of this island, where the run has several: see `island`."""
    _whole: Run | None = field(init=False, repr=False, compare=False, default=None)

    def _cross_check(self) -> None:
        if self.optimizer.warmup_steps >= self.steps:
            raise self.optimizer.wrong("warmup_steps", f"less than steps ({self.steps})")
        if self.optimizer.warmup_steps + self.optimizer.decay_steps > self.steps:
            raise self.optimizer.wrong("decay_steps", f"at most steps - warmup_steps (of {self.steps} steps)")
        if self.optimizer.name == "adamw8bit" and self.dtype == "float64":
            raise self.optimizer.wrong("name", 'adamw or sgd when dtype is "float64"')
        if self.optimizer.moments == "bfloat16" and self.dtype == "float64":
            raise self.optimizer.wrong("moments", '"float32", or left out, when dtype is "float64"')
        if self.rounds_sums and (self.delayed_updates or not self.adds_exactly):
            # The step before is not over when the sum of a delayed one begins.
            allowed = 'exact_sums is false, delayed_updates is true, or dtype is "float64"'
            raise self.codec.wrong("reduce", f"another than {' and '.join(ROUNDED)} when {allowed}")
        if self.data.document_mask and self.model.kind != "gpt":
            allowed = f'false when model.kind is "{self.model.kind}": only the built-in decoder has that mask'
            raise self.data.wrong("document_mask", allowed)
        if self.data.eos >= self.model.vocab_size:
            raise self.data.wrong("eos", f"less than model.vocab_size ({self.model.vocab_size})")
        if self.data.source == "code":
            if isinstance(self.model, ModelSpec):
                raise self.data.wrong("source", f'"tales" or "files" when model.kind is "{self.model.kind}"')
        elif self.data.tokenizer == "bytes" and self.model.vocab_size < 256:
            raise self.model.wrong("vocab_size", 'at least 256 when data.tokenizer is "bytes"')
        if self.data.root and self.brings_model:
            raise self.data.wrong("root", f'empty when model.kind is "{self.model.kind}"')
        if self.S * self.M > MAX_TOLD:
            raise self.batch.wrong(
                "microbatches_per_step", f"at most {MAX_TOLD // self.S} with {self.S} stages: what they "
                "lack of a step has to fit into a message"
            )  # fmt: skip
        if self.start.weights and self.model.kind == "counting":
            raise self.start.wrong("weights", 'empty when model.kind is "counting"')
        if self.lora.rank and not self.brings_model:
            raise self.lora.wrong(
                "rank", f'0 when model.kind is "{self.model.kind}": it is for "hf" and "code"'
            )
        if self.eval.every:
            self._check_eval()
        if self.islands.count > 1:
            self._check_islands()
        if self.start.digests and len(self.start.digests) != self.S:
            raise self.start.wrong("digests", f"a list of {self.S}, one for each stage; or empty")
        object.__setattr__(self, "codec", self._codec_of_each_boundary())
        text = self.to_toml()
        if len(text) > MAX_MANIFEST_BYTES:
            raise SetupError(
                f"the run's manifest takes {len(text)} bytes; at most {MAX_MANIFEST_BYTES} are allowed: give "
                "codec.forward and codec.backward one codec for all boundaries, admit fewer trainers, or "
                "leave defaults out of model.config"
            )
        object.__setattr__(self, "id", hashlib.sha256(text.encode()).hexdigest()[:ID_HEX])

    def _check_eval(self) -> None:
        size, source = self.batch.microbatch_size, self.data.source
        if self.model.kind == "counting":
            raise self.eval.wrong("every", '0 when model.kind is "counting", which has no loss')
        if self.eval.samples % size:
            raise self.eval.wrong("samples", f"a multiple of batch.microbatch_size ({size})")
        if (source == "code") == (self.eval.data == "files"):
            some = "package.module:function" if source == "code" else '"files"'
            raise self.eval.wrong("data", f'{some} when data.source is "{source}"')

    def _check_islands(self) -> None:
        count, window = self.islands.count, self.islands.local_steps + 1
        if window > self.steps:
            raise self.islands.wrong("local_steps", f"below steps ({self.steps}), or islands never meet")
        if self.M % count:
            raise self.islands.wrong("count", f"a divisor of batch.microbatches_per_step ({self.M})")
        if self.delayed_updates:
            raise self.islands.wrong("count", "1 when delayed_updates is true: islands hardly wait")
        if self.batch.warmup_steps:
            raise self.islands.wrong("count", f"1 when batch.warmup_steps is {self.batch.warmup_steps}")
        if self.optimizer.name == "adamw8bit":
            raise self.islands.wrong("count", '1 when optimizer.name is "adamw8bit"')
        for name, steps in (
            ("steps", self.steps),
            ("checkpoint_every", self.checkpoint_every),
            ("eval.every", self.eval.every),
        ):
            if steps % window:
                raise wrong(
                    name, steps, f"a multiple of islands.local_steps + 1 ({window}): so many steps end with "
                    "a meeting"
                )  # fmt: skip

    def _codec_of_each_boundary(self) -> CodecSpec:
        """`codec` with lists that fit the model, and no list where all boundaries are alike."""
        changes: dict[str, str] = {}
        for direction in ("forward", "backward"):
            codecs = getattr(self.codec, direction)
            if isinstance(codecs, str):
                continue
            if not codecs or len(codecs) != self.S - 1:
                allowed = f"one codec, or a list of {self.S - 1}, one for each boundary of {self.S} stages"
                raise wrong(f"codec.{direction}", list(codecs), allowed if self.S > 1 else "one codec")
            if len(set(codecs)) == 1:
                changes[direction] = codecs[0]
        return replace(self.codec, **changes) if changes else self.codec

    @property
    def M(self) -> int:  # noqa: N802 - the letter that the design and the messages use
        """Microbatches per step."""
        return self.batch.microbatches_per_step

    @property
    def S(self) -> int:  # noqa: N802
        """Stages."""
        return self.model.stages

    @property
    def built_in(self) -> ModelSpec:
        """The table of the built-in model. Raises SetupError: the run has a custom model."""
        if isinstance(self.model, CustomModelSpec):
            raise SetupError(f'model.kind = "{self.model.kind}": this works for the built-in decoder only')
        return self.model

    @property
    def brings_model(self) -> bool:
        """Whether the run has a custom model; see `swarm.model.graph.custom_model`."""
        return isinstance(self.model, CustomModelSpec)

    @property
    def code(self) -> tuple[str, ...]:
        """The functions that the manifest names, each `package.module:function`."""
        model = self.model.source if isinstance(self.model, CustomModelSpec) else ""
        held_out = self.eval.data if self.eval.data != "files" else ""
        return tuple(dict.fromkeys(filter(None, (model, self.data.code, held_out))))

    @property
    def pinned(self) -> bool:
        """Whether the manifest says exactly what its data are, and its custom model and the weights that it
        starts from if there are any: it can be published.
        """
        return (
            bool(self.data.sha256)
            and (self.data.eos >= 0 or not self.data.document_mask)
            and (not isinstance(self.model, CustomModelSpec) or self.model.pinned)
            and bool(self.start.digests) == bool(self.start.weights)
            and bool(self.eval.sha256) == bool(self.eval.every)
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that get a label in one step; samples, where code makes them. After the batch warm-up."""
        return self.M * self.batch.microbatch_size * self.data.sequence_length

    @property
    def adds_exactly(self) -> bool:
        """Whether the sum of a step is the same to the last bit, whichever peers computed its parts."""
        return self.exact_sums and self.dtype != "float64" and self.codec.reduce in ("none", *ROUNDED)

    @property
    def rounds_sums(self) -> bool:
        """Whether gradients are rounded before they are added: `swarm.model.fixed_point`."""
        return self.codec.reduce in ROUNDED

    @property
    def kept_bits(self) -> int:
        """Of a block's largest sum in the step before; of a run that rounds gradients."""
        return ROUNDED[self.codec.reduce]

    @property
    def sum_codec(self) -> str:
        """The codec of sums between replicas; exact ones are packed as they are."""
        return "none" if self.adds_exactly else self.codec.reduce

    @property
    def depends_on_routes(self) -> bool:
        """Whether weights depend on the routes of microbatches, and are no function of the manifest."""
        return any(len(self.codec.allowed_at(boundary)) > 1 for boundary in range(self.S - 1))

    # -- islands --------------------------------------------------------------------------------------------

    @property
    def whole(self) -> Run:
        """The run that this island is one of; or the run itself."""
        return self._whole or self

    @property
    def cells(self) -> int:
        """Stages of all islands together: the cell of stage s and island k is number k * S + s."""
        return self.whole.islands.count * self.S

    def cell(self, stage: Stage) -> Stage:
        """The cell of a stage of this island; of a run without islands the stage itself."""
        return max(0, self.number) * self.S + stage

    def place(self, cell: Stage, *, short: bool = False) -> str:
        """The name of a cell: `stage 2`, of islands `stage 2 of island 1 (cell 5)`; or short, in tables: `2`,
        `1.2`.
        """
        if cell < 0:
            return "–" if short else "no stage"
        if self.cells == self.S:
            return str(cell) if short else f"stage {cell}"
        island, stage = divmod(cell, self.S)
        return f"{island}.{stage}" if short else f"stage {stage} of island {island} (cell {cell})"

    def island(self, number: int) -> Run:
        """The terms of one island, under an id of its own: its M are its share of the microbatches.

        Where there are none, the run itself.
        """
        count = self.whole.islands.count
        assert 0 <= number < count
        if count == 1:
            return self
        found = copy(self.whole)
        batch = replace(self.whole.batch, microbatches_per_step=self.whole.M // count)
        for name, value in (
            ("batch", batch), ("number", number), ("_whole", self.whole), ("id", f"{self.whole.id}.{number}")
        ):  # fmt: skip
            object.__setattr__(found, name, value)
        return found

    def lr_at(self, t: int) -> float:
        """The learning rate of step `t`, which is no meeting."""
        lr, age, warmup = (
            self.optimizer.lr_at(t, self.steps),
            self.islands.moments_age(t),
            self.islands.warmup_steps,
        )
        return lr if self.islands.count == 1 else lr * min(1.0, (age + 1) / (warmup + 1))

    def meets_at(self, t: int) -> bool:
        """Whether step `t` is a meeting of islands."""
        window = self.islands.local_steps + 1
        return self.islands.count > 1 and t >= 0 and t % window == window - 1

    def is_common(self, version: int) -> bool:
        """Whether all islands have the same state of that version: after a meeting."""
        return self.islands.count == 1 or version == 0 or self.meets_at(version - 1)

    def is_saved(self, version: int) -> bool:
        """Whether peers save that version: of several islands, what each meeting leaves."""
        every = self.checkpoint_every
        return (bool(every) and version % every == 0) or self.meets_at(version - 1)

    def microbatches(self, t: int) -> int:
        """How many step `t` has."""
        return 0 if self.meets_at(t) else self.batch.microbatches(t)

    def named(self, mb: Microbatch) -> Microbatch:
        """What data and chance call a microbatch of this island: its number among those of all."""
        return Microbatch(self.islands.trained(mb.t), max(0, self.number) * self.M + mb.m)

    def step_number(self, t: int) -> int:
        """What chance calls step `t` of this island: its number among those of all."""
        return self.islands.trained(t) * self.islands.count + max(0, self.number)

    def weight_version(self, t: int) -> int:
        """The version of the weights that step `t` is computed with."""
        return max(0, t - 1) if self.delayed_updates else t

    def to_toml(self) -> str:
        """The canonical text: every key, in order, one per line. `parse_run` of it gives an equal run."""
        lines = [f"{name} = {_toml(value)}" for name, value in _values(self) if not isinstance(value, _Spec)]
        for _, table in _values(self):
            if isinstance(table, _Spec) and (values := _values(table)):
                lines += ["", f"[{table.section}]"]
                lines += [f"{name} = {_toml(value)}" for name, value in values]
        return "\n".join(lines) + "\n"


_TABLES: dict[str, type[_Spec]] = {
    spec.section: spec
    for spec in (
        *(ModelSpec, DataSpec, BatchSpec, OptimizerSpec, CodecSpec, AdmissionSpec, StartSpec),
        *(LoraSpec, EvalSpec, IslandsSpec),
    )
}


def _values(spec: _Spec) -> list[tuple[str, Any]]:
    """The keys and values of the text: without derived fields, and without later keys at their defaults."""
    return [
        (item.name, value)
        for item in fields(cast(Any, spec))
        if item.init
        and ((value := getattr(spec, item.name)) != item.default or not item.metadata.get("later"))
    ]


# --- presets ------------------------------------------------------------------------------------------------


def _sizes(layers: int, hidden: int, heads: int, **others: Any) -> dict[str, Any]:
    found = {"layers": layers, "hidden": hidden, "heads": heads, "ffn_hidden": 4 * hidden}
    return {**found, "vocab_size": 256, "norm": "rmsnorm", "positions": "rotary", **others}


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    return _sizes(layers, hidden, heads, kv_heads=kv_heads, mlp="swiglu", **others)


_LLAMA3 = {"vocab_size": 128_256, "rotary_base": 500_000.0}
_GPT2 = {"vocab_size": 50_257, "norm": "layernorm", "positions": "learned"}

PRESETS: dict[str, dict[str, Any]] = {
    "1M": _sizes(5, 128, 4),
    "3M": _sizes(7, 192, 6),
    "10M": _sizes(8, 320, 5),
    "30M": _sizes(10, 512, 8),
    "100M": _sizes(14, 768, 12),
    "gpt2": _sizes(12, 768, 12, **_GPT2),
    "gpt2-medium": _sizes(24, 1024, 16, **_GPT2),
    "gpt2-large": _sizes(36, 1280, 20, **_GPT2),
    "gpt2-xl": _sizes(48, 1600, 25, **_GPT2),
    "1B": _sizes(18, 2048, 16, vocab_size=32_000),
    "3B": _sizes(24, 3072, 24, vocab_size=32_000),
    "gpt3-6.7b": _sizes(32, 4096, 32, **_GPT2),
    "7B": _sizes(32, 4096, 32, vocab_size=32_000),
    "llama-10M": _llama(8, 320, 5, 5, ffn_hidden=864, head="tied"),
    "llama-100M": _llama(12, 768, 12, 4, ffn_hidden=2304, vocab_size=32_000, head="tied"),
    "llama-7b": _llama(32, 4096, 32, 32, ffn_hidden=11_008, vocab_size=32_000),
    "llama3.2-1b": _llama(
        16, 2048, 32, 8, ffn_hidden=8192, head="tied", rotary_scaling="llama3 32 1 4 8192", **_LLAMA3
    ),
    "llama3-8b": _llama(32, 4096, 32, 8, ffn_hidden=14_336, **_LLAMA3),
}
"""Sizes by name, for `model.preset`. Keys that stand beside the preset in a manifest win over it."""


# --- text -> Run --------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)  # a manifest passes several hands on its way in
def parse_run(text: str) -> Run:
    """The run that a manifest describes.

    Raises:
        SetupError: too long, not TOML, or a key that is unknown, missing, of a wrong type or impossible.
    """
    if len(text) > MAX_MANIFEST_BYTES or len(text.encode("utf-8", "replace")) > MAX_MANIFEST_BYTES:
        raise SetupError(f"the run's manifest is longer than {MAX_MANIFEST_BYTES} bytes")
    try:
        # ValueError: not TOML, or an integer with more digits than Python reads. RecursionError: `[[[[…`.
        values: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SetupError(f"the run's manifest is not TOML: {str(error)[:200]}") from None
    return run_of(values)


def run_of(values: Mapping[str, Any]) -> Run:
    """The run of a manifest's keys and tables, as TOML gives them.

    Raises:
        SetupError: a key that is unknown, missing, of a wrong type or impossible.
    """
    values = dict(values)
    tables: dict[str, tuple[type[_Spec], dict[str, Any]]] = {}
    _refuse_unknown(Run, {name: value for name, value in values.items() if name not in _TABLES})
    for section, spec in _TABLES.items():
        table = values.pop(section, {})
        if type(table) is not dict:
            raise wrong(
                section, table, f"a table: [{section}] on a line of its own, then its keys; or a dict"
            )
        if spec is ModelSpec:
            spec, table = _model_of(table)
        if spec is DataSpec and table.get("source") == "code":
            table = {"sequence_length": 1, **table}
        _refuse_unknown(spec, table)
        tables[section] = spec, table
    _refuse_missing((Run, values), *tables.values())
    made: dict[str, Any] = {section: spec(**table) for section, (spec, table) in tables.items()}
    return Run(**values, **made)


def load_run(path: str | Path) -> Run:
    """`parse_run` of a file; the errors name the file."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
        text = raw.decode("utf-8-sig")  # editors of Windows begin files with a mark
    except OSError as error:
        raise SetupError(f"cannot read the manifest {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise SetupError(f"the manifest {path} is not UTF-8 text") from None
    try:
        return parse_run(text)
    except SetupError as error:
        raise SetupError(f"{path}: {error.text}") from None


def check_id(text: str, run_id: str) -> Run:
    """The run of a manifest that was fetched by id.

    Raises:
        SetupError: the manifest is not acceptable, or it is another run's.
    """
    run = parse_run(text)
    if run.id != run_id:
        raise SetupError(f"the manifest is of run {run.id}, not of run {run_id[:80]}: do not join it")
    return run


def _model_of(table: dict[str, Any]) -> tuple[type[_Spec], dict[str, Any]]:
    """The kind of the table, and its values, with those of its preset if it has one."""
    kind, preset = table.get("kind", "gpt"), table.get("preset")
    if kind not in MODEL_KINDS:
        raise wrong("model.kind", kind, _one_of(MODEL_KINDS))
    if kind in ("code", "hf"):
        return CustomModelSpec, table
    if preset is None:
        return ModelSpec, table
    if type(preset) is not str or preset not in PRESETS:
        raise wrong("model.preset", preset, "one of " + ", ".join(f'"{name}"' for name in PRESETS))
    return ModelSpec, {**PRESETS[preset], **{name: v for name, v in table.items() if name != "preset"}}


def _known(spec: type[_Spec]) -> dict[str, Field[Any]]:
    return {item.name: item for item in fields(cast(Any, spec)) if item.metadata.get("rule")}


def _refuse_unknown(spec: type[_Spec], values: dict[str, Any]) -> None:
    names = list(_known(spec)) + (["preset"] if spec is ModelSpec else [])
    tables = [f"[{table}]" for table in _TABLES]
    for name, value in values.items():
        if name in names:
            continue
        # A stranger's text: control characters are not printed.
        told = "".join(c if c.isprintable() else "?" for c in name[:80])
        if not spec.section and type(value) is dict:
            hint = did_you_mean(f"[{name}]", tables)
            raise SetupError(
                f"[{told}] in the run's manifest: unknown table{hint}; its tables are {', '.join(tables)}"
            )
        key = spec._key(told)  # pyright: ignore[reportPrivateUsage]
        where = f"[{spec.section}]" if spec.section else "a manifest, before its tables,"
        at = [f" (it stands in [{table}])" for table, one in _TABLES.items() if name in _known(one)]
        at += [" (it stands before all tables)"] * (name in _known(Run))
        hint = at[0] if at else did_you_mean(name, names if spec.section else [*names, *_TABLES])
        more = "" if spec.section else f"; its tables are {', '.join(tables)}"
        raise SetupError(
            f"{key[:80]} = {_shown(value)} in the run's manifest: unknown key{hint}; "
            f"{where} takes {', '.join(names)}{more}"
        )


def _refuse_missing(*tables: tuple[type[_Spec], dict[str, Any]]) -> None:
    lacking: dict[str, str] = {}
    more = ""
    for spec, values in tables:
        for name, item in _known(spec).items():
            if name not in values and item.default is MISSING:
                key = spec._key(name)  # pyright: ignore[reportPrivateUsage]
                lacking[key] = item.metadata["rule"].allowed
                more = more or (
                    ", or give model.preset" if spec is ModelSpec and name in PRESETS["1M"] else ""
                )
    if len(lacking) == 1:
        ((key, allowed),) = lacking.items()
        raise SetupError(f"{key} is missing in the run's manifest: it must be {allowed}{more}")
    if lacking:
        told = "; ".join(f"{key} must be {allowed}" for key, allowed in lacking.items())
        told = told if len(lacking) < 9 else "`swarm manifest` prints an example with all of them"
        raise SetupError(f"{', '.join(lacking)} are missing in the run's manifest: {told}{more}")


def pin(run: Run, sha256: str, tokens: int, **others: Any) -> Run:
    """`run` bound to its tokens, as they were found. `others`: keys of [data]; what is empty or None stays as
    it is. Its id changes.
    """
    given = {name: value for name, value in others.items() if value not in ("", None)}
    return replace(run, data=replace(run.data, sha256=sha256, tokens=tokens, **given))


def write_cut(assignment: Sequence[int]) -> str:
    """The stage of each operator as text: `0*120 1*44`."""
    return " ".join(f"{stage}*{len(list(run))}" for stage, run in itertools.groupby(assignment))


def read_cut(text: str, operators: int) -> tuple[int, ...] | None:
    """The stage of each of so many operators; None if the cut has another number of them."""
    runs = [(int(stage), int(count)) for stage, _, count in (run.partition("*") for run in text.split())]
    if sum(count for _, count in runs) != operators:
        return None
    return tuple(stage for stage, count in runs for _ in range(count))


# --- runs to start from -------------------------------------------------------------------------------------


def demo_run(*, stages: int = 3, steps: int = 300, codec: str = "blockwise8", seed: int = 1) -> Run:
    """The run of `swarm demo`: a byte-level model of little tales.

    Sizes and rate are what worked on a CPU: one process takes 0.55 s a step with one thread, and after 240
    steps the loss is 0.26, where most sentences are right. Twice as wide, with twice the microbatches and
    a rate of 0.002, it was 0.59 after 193 s.
    """
    return Run(
        name="demo",
        seed=seed,
        steps=steps,
        model=ModelSpec(
            layers=max(3, stages), hidden=128, heads=4, ffn_hidden=512, vocab_size=256, stages=stages
        ),
        data=DataSpec(source="tales", sequence_length=128),
        batch=BatchSpec(microbatch_size=4, microbatches_per_step=8),
        optimizer=OptimizerSpec(lr=5e-3, warmup_steps=min(10, steps - 1), schedule="cosine"),
        codec=CodecSpec.symmetric(codec),
    )


def audit_run(*, stages: int = 3, steps: int = 10, microbatches_per_step: int = 8, seed: int = 1) -> Run:
    """An audit run: after a step each weight is minus 1/M times how often its microbatch was counted."""
    return Run(
        name="counting",
        seed=seed,
        steps=steps,
        dtype="float64",
        model=ModelSpec(
            kind="counting", layers=stages, hidden=1, heads=1, ffn_hidden=1, vocab_size=256, stages=stages
        ),
        data=DataSpec(source="tales", tokens=4096, sequence_length=8),
        batch=BatchSpec(microbatch_size=1, microbatches_per_step=microbatches_per_step),
        optimizer=OptimizerSpec(name="sgd", lr=1.0, weight_decay=0.0, clip_norm=0.0),
        codec=CodecSpec(forward="none", backward="none"),
    )
