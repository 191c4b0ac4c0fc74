"""`swarm graph`: a model as the operators that it is made of, and how it would be cut into stages."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from peers.events import unlogged
from peers.owner.memory_limit import weight_bytes
from peers.programs.descriptions import read_text, shown_bytes
from peers.programs.tool_options import GraphOptions
from swarm.errors import MALFORMED, SetupError
from swarm.manifest import OptimizerSpec, Run, load_run
from swarm.model.gpt import GptStage, replace_parameters, weights_dtype
from swarm.model.graph.cost import made_up_calls, reckoned_s
from swarm.model.graph.custom_model import custom_model
from swarm.model.graph.ir import Operator, OpGraph, Value
from swarm.model.graph.lazy_tensors import LazyTensors, seeded
from swarm.model.graph.model_source import CustomModel, from_code, from_hf
from swarm.model.graph.partition import StagePlan, find_cut, plan_stages
from swarm.model.graph.trace import Traced
from swarm.model.same_bits import threads_as_before

COLOURS = ("#a6cee3", "#fdbf6f", "#b2df8a", "#cab2d6", "#fb9a99", "#ffff99", "#1f78b4", "#33a02c")
"""ColorBrewer's Paired, the light ones first: dark text is read on them. A ninth stage begins again."""
CHEAP_COLOUR = "#eeeeee"
ROUNDS = 5
"""Of timing an operator: the first chooses kernels and touches memory."""


def run_graph(options: GraphOptions) -> None:
    """Trace, cut, and print. Raises SetupError: the model cannot be had, traced or cut."""
    with unlogged():
        traced, own_cut, optimizer = _traced(options)
    graph = traced.graph
    costs = timed_s(traced) if options.calibrate else reckoned_s(traced)
    assignment = own_cut or find_cut(graph, costs, options.stages)
    plans = plan_stages(graph, assignment)
    if options.dot:
        print(as_dot(graph, assignment, costs))
    elif options.json:
        print(json.dumps(as_json(traced, assignment, costs, plans)))
    else:
        print(render(traced, assignment, costs, plans))
        print(_state(traced, plans, optimizer))


def _traced(options: GraphOptions) -> tuple[Traced, Sequence[int] | None, OptimizerSpec]:
    """The model that the command line names; the cut of a manifest that has one, unless another number of
    stages is asked for; and its optimizer.
    """
    usual = OptimizerSpec(lr=1.0)
    if options.model.endswith(".toml"):
        run = load_run(Path(options.model))
        if not run.brings_model:
            return _without_numbers(lambda: built_in(run)).trace(), None, run.optimizer
        own = custom_model(run)
        return own.traced, own.assignment if options.stages in (1, run.S) else None, run.optimizer
    if not options.model.startswith("hf:"):
        return _without_numbers(lambda: from_code(options.model)).trace(), None, usual
    path = Path(options.model.removeprefix("hf:"))
    try:
        config = dict(json.loads(read_text(path)))
    except (TypeError, *MALFORMED) as error:
        raise SetupError(f"{path} is no config.json of transformers: {error}") from None
    rows, length = options.rows, options.length
    return _without_numbers(lambda: from_hf(config, rows=rows, length=length)).trace(), None, usual


def _without_numbers(make: Callable[[], CustomModel]) -> CustomModel:
    """A model whose weights take no memory: what is shown here needs their forms only."""
    with seeded(0), LazyTensors(0).noted():
        return make()


def built_in(run: Run) -> CustomModel:
    """The decoder of a manifest, as one module."""
    if run.model.kind == "counting":
        raise SetupError("the audit model has no operators worth a look; take a manifest of a decoder")
    module = GptStage(run, range(run.built_in.layers))
    # Not `module.to`: the table of rotary positions is complex.
    replace_parameters(module, lambda _, old: old.detach().to(weights_dtype(run)))
    tokens = torch.zeros((run.batch.microbatch_size, run.data.sequence_length), dtype=torch.int64)
    return CustomModel(module=module, args=(tokens, tokens.clone()))


def timed_s(traced: Traced) -> list[float]:
    """Seconds of each operator for a microbatch on one core of this machine, forward and backward: medians.

    They are CPU seconds: the turns that other programs have on the core do not count.
    """
    with threads_as_before():
        torch.set_num_threads(1)
        return [
            statistics.median(_took_s(compute) for _ in range(ROUNDS)) for compute in made_up_calls(traced)
        ]


def _took_s(compute: Callable[[], None]) -> float:
    began_s = time.thread_time()
    compute()
    return time.thread_time() - began_s


# --- what is shown ------------------------------------------------------------------------------------------


def render(
    traced: Traced, assignment: Sequence[int], costs: Sequence[float], plans: Sequence[StagePlan]
) -> str:
    """A table of stages, and what is to be known of the whole."""
    graph, total = traced.graph, sum(costs) or 1.0
    cheap = sum(op.cheap for op in graph.operators)
    weights = sum(graph.values[name].nbytes for name in graph.parameters)
    lines = [
        f"{len(graph.operators)} operators ({cheap} computed where they are needed); "
        f"{len(graph.parameters)} parameters, {shown_bytes(weights)}",
        "inputs: " + ", ".join(_form(graph.values[name]) for name in graph.inputs),
    ]
    lines += ["one tensor: " + ", ".join(names) for names in graph.tied]
    lines.append(
        f"\n{'stage':>5}  {'operators':>9}  {'cost':>5}  {'weights':>9}  {'sends':>9}  what it sends"
    )
    for plan in plans:
        share = sum(cost for cost, s in zip(costs, assignment, strict=True) if s == plan.stage) / total
        held = sum(graph.values[name].nbytes for name in plan.parameters)
        sends = ", ".join(_form(value) for value in plan.outputs[:4])
        more = f" and {len(plan.outputs) - 4} more" if len(plan.outputs) > 4 else ""
        lines.append(
            f"{plan.stage:>5}  {len(plan.operators):>9}  {share:>5.0%}  {shown_bytes(held):>9}  "
            f"{shown_bytes(plan.bytes_out):>9}  {sends}{more}"
        )
    return "\n".join(lines)


def _state(traced: Traced, plans: Sequence[StagePlan], optimizer: OptimizerSpec) -> str:
    """What the peers of a stage have to hold, besides microbatches."""
    values, each = traced.graph.values, weight_bytes(optimizer)
    sizes = [sum(math.prod(values[name].shape) for name in plan.parameters) for plan in plans]
    words = f"\na peer holds {each} bytes a weight ({optimizer.name}), {each - 8} on a GPU with --host-sums"
    if optimizer.moments == "float32":
        narrow = weight_bytes(replace(optimizer, moments="bfloat16"))
        words += f"; with moments in bfloat16 {narrow}, {narrow - 8}"
    return f"{words}: of the largest stage {shown_bytes(each * max(sizes))}"


def as_json(
    traced: Traced, assignment: Sequence[int], costs: Sequence[float], plans: Sequence[StagePlan]
) -> dict[str, Any]:
    graph = traced.graph
    return {
        "inputs": list(graph.inputs),
        "loss": graph.loss,
        "tied": [list(names) for names in graph.tied],
        "values": [asdict(value) | {"bytes": value.nbytes} for value in graph.values.values()],
        "operators": [
            asdict(op) | {"stage": stage, "cost": cost}
            for op, stage, cost in zip(graph.operators, assignment, costs, strict=True)
        ],
        "stages": [
            {name: getattr(plan, name) for name in ("stage", "operators", "parameters", "bytes_out")}
            | {name: [value.name for value in getattr(plan, name)] for name in ("inputs", "outputs")}
            for plan in plans
        ],
    }


def as_dot(graph: OpGraph, assignment: Sequence[int], costs: Sequence[float]) -> str:
    """The graph in Graphviz's language, a colour a stage."""
    total = sum(costs) or 1.0
    lines = ["digraph model {", '  node [shape=box, style=filled, fontname="sans-serif"];']
    forms = {name: _quoted(_form(graph.values[name])) for name in graph.inputs}
    lines += [f"  {_quoted(n)} [shape=ellipse, fillcolor=white, label={form}];" for n, form in forms.items()]
    for op in graph.operators:
        label = f"{_short(op)}\\n{op.module or '.'}\\n{costs[op.index] / total:.1%}"
        colour = CHEAP_COLOUR if op.cheap else COLOURS[assignment[op.index] % len(COLOURS)]
        lines.append(f"  {_quoted(op.name)} [fillcolor={_quoted(colour)}, label={_quoted(label)}];")
    makers = {output: op.name for op in graph.operators for output in op.outputs}
    for op in graph.operators:
        for name in op.inputs:
            edge, sizes = (makers.get(name, name), op.name), "×".join(map(str, graph.values[name].shape))
            lines.append(f"  {' -> '.join(map(_quoted, edge))} [label={_quoted(sizes or '1')}];")
    return "\n".join([*lines, "}"])


def _short(op: Operator) -> str:
    parts = op.target.split(".")
    if parts[-1] == "default" or parts[0] == "aten":  # namespace, name, overload; else a class of the model's
        return parts[1]
    return parts[-1]


def _form(value: Value) -> str:
    return f"{value.name} {value.dtype}{list(value.shape)}"


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'
