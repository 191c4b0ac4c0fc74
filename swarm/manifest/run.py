"""A run: all that its manifest says, its id, and what follows from it for islands and steps."""

from __future__ import annotations

import hashlib
from copy import copy
from dataclasses import field, replace
from operator import attrgetter
from typing import Literal

from swarm.codecs import ROUNDED
from swarm.errors import SetupError
from swarm.ids import RUN_NAME, Microbatch, Stage
from swarm.manifest import tables
from swarm.manifest.rules import FLAG, Rules, Spec, choice, integer, setting, text, toml, values_of
from swarm.manifest.tables import CustomModelSpec, ModelSpec

MAX_MANIFEST_BYTES = 16_000
"""200 trainers, the most that `admission` takes, are 11 kB, 40 founders 2 kB; the rest is under 2 kB."""

MAX_TOLD = 256 * 8192
"""Stages times microbatches of a step, of which the run coordinator says what is lacking: 256 kB of bits."""

MAX_ROTATIONS = 1 << 28
"""Tokens of a sample times channels of a head, of which each peer has a table, of 1 GB: before it can know
whether its stage fits."""

MAX_CELLS = 1 << 16
"""Stages of all islands together: a record names no more, and its reader asks for each."""

NO_ISLAND = -1
"""The number of a run that is no island of another."""

ID_HEX = 32
"""Hex digits of a run id: 128 bits, too many to make two manifests that share one on purpose."""


def id_of(text: str) -> str:
    """The id of the run whose canonical text this is, if it is one."""
    return hashlib.sha256(text.encode()).hexdigest()[:ID_HEX]


class Run(Spec):
    """The terms of a run. Equal runs have equal texts and ids, and the other way round."""

    format: int = setting(choice(2), 2)
    """Version of this file's meaning: it changes whenever the same keys would train another model. Leave
    it out. Since 2 an epoch has each window of the data once."""
    name: str = setting(
        text(
            RUN_NAME,
            "1 to 63 characters: A to Z, a to z, digits, spaces or . _ + -, and a letter or digit first",
        )
    )
    """For people. Two runs that differ in nothing else are two runs."""
    seed: int = setting(integer(0, 2**63 - 1))
    """Seed of weights, samples and dropout."""
    steps: int = setting(integer(1, 1_000_000_000))
    """T: optimizer steps in the run; they are 0 … steps - 1."""
    dtype: Literal["float32", "bfloat16", "float64"] = setting(
        choice("float32", "bfloat16", "float64"), "float32"
    )
    """The dtype of the arithmetic. bfloat16 is autocast over float32 weights; float64 is for proofs."""
    delayed_updates: bool = setting(FLAG, False)
    """Compute step t with the weights of t - 1, so that averaging overlaps the next step. It costs loss
    in short runs."""
    exact_sums: bool = setting(FLAG, True)
    """Add gradients as fixed-point numbers, so that the result does not depend on the order of additions, not
    by a bit; costs 2 to 4 % on a CPU. float64 runs add floats in any case."""
    checkpoint_every: int = setting(integer(0, 1_000_000_000), 0)
    """Steps between checkpoints; 0 = never."""
    rebalance_every_s: int = setting(integer(0, 86_400), 60)
    """Seconds between decisions on which peers move to a slower stage; 0 = no peer ever moves."""
    model: tables.AnyModel
    data: tables.DataSpec
    batch: tables.BatchSpec
    optimizer: tables.OptimizerSpec
    codec: tables.CodecSpec = field(default_factory=tables.CodecSpec)
    admission: tables.AdmissionSpec = field(default_factory=tables.AdmissionSpec)
    start: tables.StartSpec = field(default_factory=tables.StartSpec)
    lora: tables.LoraSpec = field(default_factory=tables.LoraSpec)
    eval: tables.EvalSpec = field(default_factory=tables.EvalSpec)
    islands: tables.IslandsSpec = field(default_factory=tables.IslandsSpec)
    id: str = field(init=False, repr=False, compare=False)
    """The first 32 hex digits of the SHA-256 of the canonical text; stored, since every message carries
    it. That of an island has its number besides."""
    number: int = field(init=False, repr=False, default=NO_ISLAND)
    """Of this island, where the run has several: see `island`."""
    _whole: Run | None = field(init=False, repr=False, compare=False, default=None)

    def _together(self) -> Rules:
        optimizer, model, data, kind = self.optimizer, self.model, self.data, self.model.kind
        late = optimizer.warmup_steps >= self.steps
        yield late, "optimizer.warmup_steps", f"less than steps ({self.steps})"
        late = optimizer.warmup_steps + optimizer.decay_steps > self.steps
        yield late, "optimizer.decay_steps", f"at most steps - warmup_steps (of {self.steps} steps)"
        narrow = optimizer.moments == "bfloat16" and self.dtype == "float64"
        yield narrow, "optimizer.moments", '"float32", or left out, when dtype is "float64"'
        # The step before is not over when the sum of a delayed one begins.
        mixed = self.rounds_sums and (self.delayed_updates or not self.adds_exactly)
        allowed = 'exact_sums is false, delayed_updates is true, or dtype is "float64"'
        yield mixed, "codec.reduce", f"another than {' and '.join(ROUNDED)} when {allowed}"
        allowed = f'false when model.kind is "{kind}": only the built-in decoder has that mask'
        yield data.document_mask and kind != "gpt", "data.document_mask", allowed
        if isinstance(model, ModelSpec):
            most = MAX_ROTATIONS * model.heads // model.hidden
            turned = (kind, model.positions) == ("gpt", "rotary") and data.sequence_length > most
            yield turned, "data.sequence_length", f"at most {most} with so wide heads (model.heads)"
            inexact = self.S > 1 and not self.exact_sums and self.dtype != "float64"
            allowed = 'true when model.head is "tied": its copies on two stages must stay the same'
            yield inexact and (kind, model.head) == ("gpt", "tied"), "exact_sums", allowed
        yield data.eos >= model.vocab_size, "data.eos", f"less than model.vocab_size ({model.vocab_size})"
        coded = data.source == "code"
        allowed = f'"tales" or "files" when model.kind is "{kind}"'
        yield coded and not self.brings_model, "data.source", allowed
        bytewise = not coded and data.tokenizer == "bytes" and model.vocab_size < 256
        yield bytewise, "model.vocab_size", 'at least 256 when data.tokenizer is "bytes"'
        yield data.root and self.brings_model, "data.root", f'empty when model.kind is "{kind}"'
        most = f"at most {MAX_TOLD // self.S} with {self.S} stages"
        allowed = f"{most}: what they lack of a step has to fit into a message"
        yield self.S * self.M > MAX_TOLD, "batch.microbatches_per_step", allowed
        counts = kind == "counting"
        yield self.start.weights and counts, "start.weights", 'empty when model.kind is "counting"'
        allowed = f'0 when model.kind is "{kind}": it is for "hf" and "code"'
        yield self.lora.rank and not self.brings_model, "lora.rank", allowed
        if self.eval.every:
            yield counts, "eval.every", '0 when model.kind is "counting", which has no loss'
            size = self.batch.microbatch_size
            yield self.eval.samples % size, "eval.samples", f"a multiple of batch.microbatch_size ({size})"
            some = "package.module:function" if coded else '"files"'
            other = coded == (self.eval.data == "files")
            yield other, "eval.data", f'{some} when data.source is "{data.source}"'
        if self.islands.count > 1:
            yield from self._of_islands()
        each = f"a list of {self.S}, one for each stage; or empty"
        yield len(self.start.digests) not in (0, self.S), "start.digests", each
        each = f"one codec, or a list of {self.S - 1}, one for each boundary of {self.S} stages"
        for side in ("forward", "backward"):
            codecs = getattr(self.codec, side)
            unfit = type(codecs) is tuple and (self.S == 1 or len(codecs) != self.S - 1)
            yield unfit, f"codec.{side}", each if self.S > 1 else "one codec"

    def _of_islands(self) -> Rules:
        count, window = self.islands.count, self.islands.local_steps + 1
        short = f"below steps ({self.steps}), or islands never meet"
        yield window > self.steps, "islands.local_steps", short
        cells = f"at most {MAX_CELLS // self.S} with {self.S} stages"
        yield self.S * count > MAX_CELLS, "islands.count", cells
        yield self.M % count, "islands.count", f"a divisor of batch.microbatches_per_step ({self.M})"
        yield self.delayed_updates, "islands.count", "1 when delayed_updates is true: islands hardly wait"
        warm = self.batch.warmup_steps
        yield warm, "islands.count", f"1 when batch.warmup_steps is {warm}"
        met = f"a multiple of islands.local_steps + 1 ({window}): so many steps end with a meeting"
        for name in ("steps", "checkpoint_every", "eval.every"):
            yield attrgetter(name)(self) % window, name, met

    def __post_init__(self) -> None:
        super().__post_init__()
        lists = {side: getattr(self.codec, side) for side in ("forward", "backward")}
        one = {side: found[0] for side, found in lists.items() if type(found) is tuple and len({*found}) == 1}
        object.__setattr__(self, "codec", replace(self.codec, **one))
        text = self.to_toml()
        if len(text) > MAX_MANIFEST_BYTES:
            raise SetupError(
                f"the run's manifest takes {len(text)} bytes; at most {MAX_MANIFEST_BYTES} are allowed: give "
                "codec.forward and codec.backward one codec for all boundaries, admit fewer trainers, or "
                "leave defaults out of model.config"
            )
        object.__setattr__(self, "id", id_of(text))

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
        return self.exact_sums and self.dtype != "float64"

    @property
    def rounds_sums(self) -> bool:
        """Whether gradients are rounded before they are added: `swarm.model.fixed_point`."""
        return self.codec.reduce in ROUNDED

    @property
    def kept_bits(self) -> int:
        """Of a block's largest sum in the step before; of a run that rounds gradients."""
        return ROUNDED[self.codec.reduce]

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
        """`stage 2`, of islands `stage 2 of island 1 (cell 5)`; or short, in tables: `2`, `1.2`."""
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
        vars(found).update(batch=batch, number=number, _whole=self.whole, id=f"{self.whole.id}.{number}")
        return found

    def lr_at(self, t: int) -> float:
        """The learning rate of step `t`, which is no meeting."""
        lr, islands = self.optimizer.lr_at(t, self.steps), self.islands
        if islands.count == 1:
            return lr
        return lr * min(1.0, (islands.moments_age(t) + 1) / (islands.warmup_steps + 1))

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
        lines = [f"{name} = {toml(value)}" for name, value in values_of(self) if not isinstance(value, Spec)]
        for _, table in values_of(self):
            if isinstance(table, Spec) and (values := values_of(table)):
                lines += ["", f"[{table.section}]"]
                lines += [f"{name} = {toml(value)}" for name, value in values]
        return "\n".join(lines) + "\n"
