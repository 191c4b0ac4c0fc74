"""A user's model as a run has it: built as the manifest says, traced, cut, and compared with what it pins.

What is pinned, and why: docs/design.md, *Any model*. What is built has forms only; the numbers of a stage are
made where it is served (`swarm.model.graph.lazy_tensors`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from swarm.data import token_dtype
from swarm.errors import SetupError
from swarm.ids import Stage
from swarm.installed import import_module, source_digest
from swarm.manifest import BatchSpec, CustomModelSpec, OptimizerSpec, Run, read_cut, write_cut
from swarm.model.gpt import weights_dtype
from swarm.model.graph.capture import WithLoss
from swarm.model.graph.cost import reckoned_s
from swarm.model.graph.ir import Call, Operator, Ref, Value, refs
from swarm.model.graph.lazy_tensors import LazyTensors, seeded
from swarm.model.graph.lora import adapt, freeze
from swarm.model.graph.model_source import CustomModel, from_code, from_hf, transformers
from swarm.model.graph.partition import StagePlan, find_cut, plan_stages, shared_parameters
from swarm.model.graph.stage_module import StageModule
from swarm.model.graph.trace import CONSTANT, Traced
from swarm.model.layout import finite, stage_layout, start_digest, start_shapes, start_tensors
from swarm.model.reductions import add_tensor
from swarm.model.same_bits import use_threads_of
from swarm.model.stage_io import StageInput
from swarm.wire.tensor_meta import ITEM_BYTES, MAX_DIMS

LABELS = ("target", "targets", "target_0", "labels")
"""Inputs of a function's model that get the token after: what is to be foretold. Those of transformers shift
their labels themselves."""

_PARTS = frozenset({"slice", "select", "narrow"})
_PADS = frozenset({"pad", "constant_pad_nd"})
_KEPT = frozenset(
    {"view", "reshape", "flatten", "unflatten", "transpose", "permute", "t", "to", "squeeze", "unsqueeze"}
    | {"expand", "contiguous", "clone", "alias", "detach"}
)
"""Those that leave none out and add none."""
_SAME_NUMBERS = _KEPT | _PARTS | _PADS
"""Operators that hand on the numbers of their first argument."""


class Bounds(NamedTuple):
    """What whole numbers may be: `least` to `below` - 1."""

    least: int
    below: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """A custom model, ready to be computed stage by stage."""

    traced: Traced
    """For the microbatches of the run. Its tensors have forms; `value` gives their numbers."""
    lazy: LazyTensors
    assignment: tuple[int, ...]
    """The stage of each operator."""
    plans: tuple[StagePlan, ...]
    inputs: tuple[StageInput, ...]
    """In the graph's order; all enter at stage 0."""
    bounds: Mapping[str, Bounds]
    """Of the whole numbers that stages make of others, where it is known."""

    def value(self, name: str) -> torch.Tensor:
        """A parameter or buffer of version 0, by its full name. Raises SetupError: a parameter has numbers
        that are not finite; a buffer may be a mask.
        """
        if name in self.traced.parameters:
            return finite(name, self.lazy.value(self.traced.parameters[name]))
        return self.lazy.value(self.traced.buffers[name])


def custom_model(run: Run) -> Model:
    """The model of a run. The first call builds and traces it: seconds. Not from several threads at once.

    What is not pinned is not compared; a run without a cut is cut for devices that are all alike.

    Raises:
        SetupError: it cannot be built, traced or cut here; it is not what the manifest pins; something that
            has to cross a boundary cannot travel. Says what to do.
    """
    return _custom_model(run.whole)


@lru_cache(maxsize=4)
def _custom_model(run: Run) -> Model:
    spec = _spec(run)
    version = _version(spec)
    if spec.version not in ("", version):
        raise SetupError(
            f"model.version: the run's model is of {_called(spec.version)}, here is {_called(version)}: "
            "install the run's"
        )
    built = _built(_open(run))
    _compare("graph", spec.graph, built.graph, "the model is made of other operators", "")
    assignment = _assignment(run, spec, built.traced)
    plans = plan_stages(built.traced.graph, assignment)
    inputs = _inputs(run, built.traced)
    _check_cut(run, built.traced, plans)
    bounds = _bounds(built.traced, inputs)
    return Model(
        traced=built.traced, lazy=built.lazy, assignment=assignment, plans=plans, inputs=inputs,
        bounds=bounds,
    )  # fmt: skip


def pin_model(run: Run) -> Run:
    """`run` with what is open in its model filled in, as it is here. Its id is another than before.

    Raises:
        SetupError: as `custom_model`; or the code draws its weights by something else than torch's generator.
    """
    spec, model = _spec(run), custom_model(run)
    for plan in model.plans:
        StageModule(model.traced, plan, seed=run.seed)  # it has room for parts of such names
    digests, (made, lazy) = _digests(run, model.value), _made(run)
    again = WithLoss(made.module, made.loss)
    tensors = {**again.weights(), **again.tensors()}
    if digests != _digests(run, lambda name: lazy.value(tensors[name])):
        raise SetupError(
            "the model begins with other weights each time that it is built: its code has to draw them by "
            "torch's own generator, which the run seeds"
        )
    pinned = replace(
        spec, version=_version(spec), graph=_built(_open(run)).graph, digests=digests,
        cut=write_cut(model.assignment),
    )  # fmt: skip
    return replace(run, model=pinned)


def drawn(run: Run, stage: Stage) -> Iterator[tuple[str, torch.Tensor]]:
    """What a stage begins with and does not read elsewhere, by full name: one after the other, so that no
    more than one has to be held. Raises SetupError: after the last one: they are not what the manifest
    pins."""
    model, pinned, digest = custom_model(run), _spec(run).digests, hashlib.sha256()
    for name in _drawn_names(run, stage):
        value = model.value(name)
        if pinned:
            add_tensor(digest, name, value)
        yield name, value
    if pinned:
        what = f"stage {stage} of the model begins with other weights"
        _compare("digests", pinned[stage], digest.hexdigest(), what, _ROUNDS)


def _digests(run: Run, value: Callable[[str], torch.Tensor]) -> tuple[str, ...]:
    """Of what `drawn` gives for each stage."""
    return tuple(start_digest(_drawn_names(run, stage), value) for stage in range(run.S))


def _drawn_names(run: Run, stage: Stage) -> list[str]:
    plan = custom_model(run).plans[stage]
    held = {name for name in plan.buffers if not name.startswith(CONSTANT)}
    there = start_shapes(run, stage).keys() if run.start.weights else set[str]()
    return sorted((stage_layout(run, stage).terms.keys() | held) - there)


def model_inputs(run: Run, rows: np.ndarray | Sequence[np.ndarray]) -> list[torch.Tensor]:
    """What enters stage 0 for a microbatch, in the graph's order and the dtypes of the wire, contiguous.

    `rows`: tokens [B, T+1], or of a run whose samples code makes an array for each input.

    Raises:
        SetupError: the samples do not fit the model; names the input.
    """
    inputs = custom_model(run).inputs
    if isinstance(rows, np.ndarray):
        tokens = torch.from_numpy(rows.astype(np.int64))
        shifted = LABELS if _spec(run).kind == "code" else ()
        filled = [tokens[:, 1:] if taken.name in shifted else tokens[:, :-1] for taken in inputs]
    else:
        if len(rows) != len(inputs):
            names = ", ".join(taken.name for taken in inputs)
            raise SetupError(
                f"the samples of {run.data.code} have {len(rows)} arrays each, but the model takes "
                f"{len(inputs)}: {names}"
            )
        filled = [_fitting(run, taken, array) for taken, array in zip(inputs, rows, strict=True)]
    return [
        tensor.to(getattr(torch, taken.dtype)).contiguous()
        for taken, tensor in zip(inputs, filled, strict=True)
    ]


def wire_dtype(run: Run, value: Value, *, entering: bool = False) -> str:
    """The dtype of a value on the wire. `entering`: it is an input of the model (also where it is carried
    on).

    Integers that enter are as narrow as the vocabulary, booleans 0 or 1; numbers with a gradient, and those
    that enter, have the run's own dtype; the others are as they are.

    Raises:
        SetupError: no wire dtype fits.
    """
    floating = value.dtype.startswith(("float", "bfloat"))
    if value.dtype == "bool":
        return "uint8"
    if floating and (entering or value.differentiable):
        return run.dtype
    if entering and _whole(value.dtype):
        return token_dtype(run.model.vocab_size)
    if value.dtype not in ITEM_BYTES:
        raise SetupError(f"numbers of {value.dtype} cannot travel between stages")
    return value.dtype


def stage_inputs(run: Run, stage: Stage) -> tuple[StageInput, ...]:
    """What enters a stage: the model's inputs, or what the cut has between it and those before."""
    model = custom_model(run)
    entering = {taken.name for taken in model.inputs}

    def described(value: Value) -> StageInput:
        flags = Bounds(0, 2 if value.dtype == "bool" else 0)
        least, below = model.bounds.get(value.name, flags)
        dtype = wire_dtype(run, value, entering=value.name in entering)
        return StageInput(value.name, value.shape, dtype, value.differentiable, below, least)

    return tuple(map(described, model.plans[stage].inputs))


def stage_module(run: Run, stage: Stage) -> StageModule:
    """The module of a stage, a new one each time. Its parameters have shapes; their numbers do not count.
    Raises SetupError: the run starts from weights that are not here, and some of them are frozen."""
    model = custom_model(run)
    traced, plan = model.traced, model.plans[stage]
    for name in plan.buffers:
        model.lazy.fill(traced.buffers[name])
    if run.start.weights and traced.parameters.keys() & set(plan.buffers):
        traced = replace(traced, buffers={**traced.buffers, **frozen_weights(run, stage)})
    return StageModule(traced, plan, seed=run.seed)


@lru_cache(maxsize=4)
def frozen_weights(run: Run, stage: Stage) -> dict[str, torch.Tensor]:
    """The weights of a stage that stay as the run started with them, by full name. Raises SetupError: as
    `start_tensors`."""
    buffers = set(custom_model(run).plans[stage].buffers)
    return {name: tensor for name, tensor in start_tensors(run, stage).items() if name in buffers}


# --- building -----------------------------------------------------------------------------------------------


class _Built(NamedTuple):
    traced: Traced
    lazy: LazyTensors
    graph: str
    """Digest."""


@lru_cache(maxsize=2)
def _built(run: Run) -> _Built:
    """`run`: as `_open` leaves it, so that pinning or cutting it anew builds nothing anew."""
    sample, lazy = _made(run)
    traced = sample.trace()
    for name, tensor in traced.buffers.items():
        if name.startswith(CONSTANT):
            lazy.fill(tensor)
    return _Built(traced, lazy, _graph_digest(traced))


def _spec(run: Run) -> CustomModelSpec:
    assert isinstance(run.model, CustomModelSpec), "callers ask `run.brings_model`"
    return run.model


def _open(run: Run) -> Run:
    """A run with what makes its weights and operators, and nothing else."""
    return Run(
        name="open", seed=run.seed, steps=1,
        dtype="float64" if weights_dtype(run) == torch.float64 else "float32",
        model=replace(_spec(run), version="", graph="", digests=(), cut="", stages=1), data=run.data,
        batch=BatchSpec(microbatch_size=run.batch.microbatch_size, microbatches_per_step=1),
        optimizer=OptimizerSpec(lr=1.0), lora=run.lora,
    )  # fmt: skip


_ROUNDS = " or a kind of processor that rounds differently;"


def _compare(key: str, pinned: str, found: str, what: str, more: str) -> None:
    if pinned not in ("", found):
        raise SetupError(
            f"model.{key}: {what} here ({found[:12]}…) than in the run ({pinned[:12]}…): another "
            f"version of torch (this is {torch.__version__}) or of what the code imports;{more} use what the "
            "run's owner has"
        )


def build(run: Run) -> CustomModel:
    """The model of version 0 with all of its weights, a new one each time, with a sample microbatch of the
    run's size.

    Not compared with what the manifest pins: see `custom_model`.

    Raises:
        SetupError: it cannot be built here.
    """
    made, lazy = _made(run)
    losses = made.loss.modules() if isinstance(made.loss, nn.Module) else ()
    lazy.fill_all((*made.module.modules(), *losses), made.args, made.kwargs, made.targets)
    return made


def _made(run: Run) -> tuple[CustomModel, LazyTensors]:
    """The model without numbers, and how they are had."""
    lazy = LazyTensors(run.seed)
    with seeded(run.seed), lazy.noted():
        return _sized(run), lazy


def _sized(run: Run) -> CustomModel:
    """What the code makes, in the dtype and for the microbatches of the run."""
    spec = _spec(run)
    use_threads_of(run)  # an orthogonal initialisation has sums in it
    rows, length = run.batch.microbatch_size, run.data.sequence_length
    if spec.kind == "hf":
        made = from_hf(json.loads(spec.config), rows=rows, length=length, inputs=spec.inputs)
    else:
        made = from_code(spec.source)
    dtype = weights_dtype(run)
    freeze(made.module, spec.frozen)
    if run.lora.rank:
        adapt(made.module, run.lora, run.seed)
    module = made.module.to("cpu")
    module = module.double() if dtype == torch.float64 else module.float()

    def sized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not leaf.dim():
            raise SetupError(
                "an input of the model is a single number: each needs the batch's dimension first"
            )
        wanted = [rows, *leaf.shape[1:]]
        if run.data.source != "code" and leaf.dim() > 1 and not leaf.is_floating_point():
            wanted[1] = length
        for dim, size in enumerate(wanted):
            if leaf.shape[dim] != size:
                if not leaf.shape[dim]:
                    raise SetupError("the model's sample input is empty: give at least one row")
                leaf = leaf.index_select(dim, torch.arange(size) % leaf.shape[dim])
        return leaf.to(dtype) if leaf.is_floating_point() else leaf

    given = tuple(made.args), dict(made.kwargs), tuple(made.targets)
    args, kwargs, targets = pytree.tree_map(sized, given)
    return replace(made, module=module, args=args, kwargs=kwargs, targets=targets)


# --- what is pinned -----------------------------------------------------------------------------------------


def _version(spec: CustomModelSpec) -> str:
    """The version of the code: the number of transformers, or the digest of a user's source."""
    if spec.kind == "hf":
        return f"transformers {transformers().__version__}"
    return source_digest(import_module(spec.source, "model"))


def _called(version: str) -> str:
    return f"a source file with {version}" if version.startswith("sha256 ") else version


def _graph_digest(traced: Traced) -> str:
    graph, digest = traced.graph, hashlib.sha256()
    lines = [f"inputs {graph.inputs} loss {graph.loss} tied {graph.tied}"]
    lines += [f"{v.name} {v.shape} {v.dtype} {v.differentiable}" for v in graph.values.values()]
    for op, call in zip(graph.operators, traced.calls, strict=True):
        lines.append(f"{op.target} {op.parameters} {op.buffers} {call.outputs} {call.plain} {op.cheap}")
        lines.append(f"{_word(call.function)} {_word(call.args)} {_word(call.kwargs)}")
        lines.append(f"{traced.statistics.get(op.index, ())}")
    digest.update("\n".join(lines).encode())
    for name, tensor in traced.buffers.items():
        if name.startswith(CONSTANT):
            add_tensor(digest, name, tensor)
    return digest.hexdigest()


def _word(part: Any) -> str:
    """An argument of a call, the same in every process."""
    if isinstance(part, Ref):
        return f"%{part.name}"
    if isinstance(part, Mapping):
        return "{" + " ".join(f"{key}={_word(part[key])}" for key in sorted(part)) + "}"
    if isinstance(part, (list, tuple)):
        return "[" + " ".join(map(_word, part)) + "]"
    if callable(part) and hasattr(part, "__qualname__"):
        return str(part) if isinstance(part, torch._ops.OpOverload) else part.__qualname__
    return str(part) if isinstance(part, torch._ops.OpOverload) else repr(part)


# --- the cut ------------------------------------------------------------------------------------------------


def _assignment(run: Run, spec: CustomModelSpec, traced: Traced) -> tuple[int, ...]:
    count = len(traced.calls)
    if not spec.cut:
        return _cut(traced, run.S)
    assignment = read_cut(spec.cut, count)
    if assignment is None:
        raise SetupError(
            f"model.cut is not of the {count} operators of this model: leave it out, and one is found"
        )
    if max(assignment) + 1 != run.S:
        raise SetupError(
            f"model.cut has stages up to {max(assignment)}, but model.stages is {run.S}: leave model.cut "
            "out, and one is found"
        )
    return assignment


@lru_cache(maxsize=4)
def _cut(traced: Traced, stages: int) -> tuple[int, ...]:
    """Where it is cut for devices that are all alike; to reckon that may take as long as to trace it."""
    return find_cut(traced.graph, reckoned_s(traced), stages)


def _check_cut(run: Run, traced: Traced, plans: Sequence[StagePlan]) -> None:
    graph = traced.graph
    makers = graph.makers
    for plan in plans:
        if not plan.parameters:
            raise SetupError(
                f"stage {plan.stage} of model.cut has no weights to train: cut the model into fewer stages"
            )
        for value in plan.outputs if plan.stage < run.S - 1 else ():
            try:
                wire_dtype(run, value, entering=value.name in graph.inputs)
                if len(value.shape) > MAX_DIMS:
                    raise SetupError(f"tensors of {len(value.shape)} dimensions cannot travel between stages")
            except SetupError as error:
                raise SetupError(
                    f"{_maker(makers.get(value.name), value)} goes from stage {plan.stage} to the next: "
                    f"{error.text}. Cut elsewhere (model.cut), or change the model there"
                ) from None
    for name, stages in shared_parameters(plans, traced.statistics).items():
        if not (run.adds_exactly or run.dtype == "float64"):
            raise SetupError(
                f"{name} is in stages {' and '.join(map(str, stages))}, where it has to stay the same: their "
                "sums of its gradient must be exact. Set exact_sums = true, or cut so that one stage has it"
            )


def _maker(op: Operator | None, value: Value) -> str:
    if op is None:
        return f"the model's input {value.name}"
    return f"{value.name}, which operator {op.target} of {op.module or 'the model'} makes,"


# --- inputs -------------------------------------------------------------------------------------------------


def _inputs(run: Run, traced: Traced) -> tuple[StageInput, ...]:
    graph, spec = traced.graph, _spec(run)
    tokens = run.data.source != "code"
    rows, length, vocab = run.batch.microbatch_size, run.data.sequence_length, spec.vocab_size
    limits = _limits(traced)
    found: list[StageInput] = []
    for name in graph.inputs:
        value = graph.values[name]
        if tokens and not (_whole(value.dtype) and value.shape == (rows, length)):
            raise SetupError(
                f"the model's input {name} is {value.dtype}{list(value.shape)}, and tokens are integers "
                f'[{rows}, {length}]: take data.source = "code"'
            )
        if not tokens and value.shape[0] != rows:
            raise SetupError(f"the model's input {name} has not the batch's dimension first")
        below = {"bool": 2}.get(value.dtype, vocab if _whole(value.dtype) else 0)
        least, why = limits.get(name, (below, ""))
        if tokens and least < below:
            raise SetupError(
                f"model.vocab_size = {vocab}, but {why} takes {name} below {least} only: set it to {least}, "
                "with a tokenizer that makes no other tokens; or take a model that knows more"
            )
        dtype = wire_dtype(run, value, entering=True)
        found.append(StageInput(name, value.shape, dtype, graded=False, below=min(below, least)))
    return tuple(found)


def _limits(traced: Traced) -> dict[str, tuple[int, str]]:
    """Input -> (what each of its numbers has to be less than, the operator that has so many rows)."""
    values = traced.graph.values
    origin = {name: name for name in traced.graph.inputs}
    found: dict[str, tuple[int, str]] = {}
    for op, call in zip(traced.graph.operators, traced.calls, strict=True):
        kind = op.target.split(".")[1] if op.target.startswith("aten.") else ""
        read = [ref.name for ref in refs(call.args)]
        if kind in _SAME_NUMBERS and read and read[0] in origin and _whole(values[op.outputs[0]].dtype):
            origin.update(dict.fromkeys(op.outputs, origin[read[0]]))
        for looked_up in _lookups(kind, call, values):
            name = origin.get(looked_up.name, "")
            if name and looked_up.rows < found.get(name, (math.inf, ""))[0]:
                found[name] = (looked_up.rows, f"operator {op.target} of {op.module or 'the model'}")
    return found


def _bounds(traced: Traced, inputs: Sequence[StageInput]) -> dict[str, Bounds]:
    """Of whole numbers: those of the input that they are, and of the tables that they are looked up in.

    Part of a value may be looked up where the rest would not fit, so bounds go back through whole views only.
    """
    values, found = traced.graph.values, {one.name: Bounds(0, one.below) for one in inputs if one.below}

    def bound(name: str, least: int, below: int) -> None:
        known = found.get(name, Bounds(least, below))
        found[name] = Bounds(max(least, known.least), min(below, known.below))

    steps: list[tuple[str, str, str, Call]] = []
    for op, call in zip(traced.graph.operators, traced.calls, strict=True):
        kind = op.target.split(".")[1] if op.target.startswith("aten.") else ""
        read, made = call.args[0] if call.args else None, op.outputs[0]
        name = read.name if isinstance(read, Ref) and read.name in values else ""
        if not name or values[name].dtype != values[made].dtype or not _whole(values[made].dtype):
            name = ""  # another dtype may make other numbers of them
        steps.append((kind, name, made, call))
    for kind, read, made, _ in steps:
        if kind in _KEPT | _PARTS and read in found:
            bound(made, *found[read])
    for kind, read, made, call in reversed(steps):
        for name, rows, least, ignored in _lookups(kind, call, values):
            if ignored < rows:
                bound(name, min(least, ignored), rows)
        if kind in _KEPT and read and made in found:
            bound(read, *found[made])
    return found


class _Lookup(NamedTuple):
    name: str
    """The value that holds the numbers of rows."""
    rows: int
    least: int
    ignored: int
    """A number that need not be a row's; 0 if there is none."""


def _lookups(kind: str, call: Call, values: Mapping[str, Value]) -> Iterator[_Lookup]:
    """What an operator looks up in tables of a known size."""
    args = [values.get(arg.name) if isinstance(arg, Ref) else arg for arg in call.args]

    def index(arg: Any, rows: int, least: int = 0, ignored: int = 0) -> Iterator[_Lookup]:
        if isinstance(arg, Value) and _whole(arg.dtype):
            yield _Lookup(arg.name, rows, least, ignored)

    if len(args) < 2 or not isinstance(args[0], Value):
        return
    shape = args[0].shape
    if kind == "embedding":
        yield from index(args[1], shape[0])
    elif kind.startswith(("cross_entropy_loss", "nll_loss")):
        ignored = call.kwargs.get("ignore_index", args[4] if len(args) > 4 else -100)
        yield from index(args[1], shape[min(1, len(shape) - 1)], 0, ignored)
    elif kind in ("index_select", "gather") and len(args) > 2 and shape:
        yield from index(args[2], shape[call.args[1]])
    elif kind == "one_hot" and isinstance(args[1], int) and args[1] > 0:
        yield from index(args[0], args[1])
    elif kind == "index":
        # A mask takes as many dimensions as it has.
        indices = [values.get(arg.name) if isinstance(arg, Ref) else None for arg in call.args[1]]
        if all(one is None or one.dtype in ("int32", "int64") for one in indices):
            for size, one in zip(shape, indices, strict=False):
                yield from index(one, size, -size)


def _whole(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


def _fitting(run: Run, taken: StageInput, array: np.ndarray) -> torch.Tensor:
    """The samples of one input, if they fit it."""
    where = f"the samples of {run.data.code}"
    if array.shape != taken.shape:
        raise SetupError(
            f"{where} give {list(array.shape[1:])} numbers for the model's input {taken.name}, which takes "
            f"{list(taken.shape[1:])}"
        )
    whole = array.dtype.kind in "iub"
    if whole != bool(taken.below):
        wanted = "integers or booleans" if taken.below else "floating point numbers"
        raise SetupError(f"{where} give {array.dtype} for the model's input {taken.name}: it takes {wanted}")
    if whole and array.size and not 0 <= array.min() <= array.max() < taken.below:
        raise SetupError(
            f"{where} give {array.min()} to {array.max()} for the model's input {taken.name}: it takes 0 to "
            f"{taken.below - 1} (model.vocab_size, or what the model looks up in)"
        )
    return torch.from_numpy(np.ascontiguousarray(array))
