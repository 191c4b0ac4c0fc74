"""`swarm plan` for runs of islands: which device serves which cell, what that takes; or how many to have."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from peers.programs.descriptions import as_now, heading, job_of, shown_bytes, shown_names
from peers.progress import spending
from swarm.codecs import packed_part
from swarm.errors import SetupError, count
from swarm.manifest import IslandsSpec, Run
from swarm.plan.islands import (
    IslandLayout,
    IslandsPlan,
    check_cells,
    meeting_bytes,
    predict_islands,
    propose,
    search_islands,
)
from swarm.plan.network import Network, StepWork
from swarm.plan.overlapped import IDLE
from swarm.plan.search import search_overlapped

PRICE = "another run, with another loss (docs/benchmarks/slow-lines.md)"
WORTH = 1.5
"""Islands are proposed where a step is that many times as fast with them: they cost loss."""
CODEC = "blockwise8"
"""Proposed for what islands have changed: its loss cannot be told from that of float32."""


@dataclass(frozen=True, slots=True, eq=False)
class IslandsAnswer:
    run: Run
    network: Network
    plan: IslandsPlan
    without_s: float
    """A step with the same devices and no islands."""
    meeting_bytes: float
    now_s: float | None = None
    """As the peers of a run are now; None for machines that are only described."""
    measured: str = ""
    """How much of the network was measured, in words."""


def islands_of(run: Run) -> IslandLayout:
    from swarm.model.layout import stage_layout
    from swarm.model.meeting import difference_bytes

    layouts = [stage_layout(run, stage) for stage in range(run.S)]
    return IslandLayout(
        count=run.islands.count,
        local_steps=run.islands.local_steps,
        difference_bytes=tuple(float(difference_bytes(run, layout)) for layout in layouts),
        sum_bytes=tuple(float(difference_bytes(run, layout, is_sum=True)) for layout in layouts),
        packed_part=packed_part(run.islands.codec),
    )


def plan(
    network: Network, run: Run, job: StepWork, *, seed: int, budget_s: float, now: Sequence[int] = ()
) -> IslandsAnswer:
    """The search's plan; seconds are those of this process's CPU time.

    `job`: of the run without islands; `now`: the cell of each device, if they serve the run already.

    Raises:
        SetupError: fewer devices than cells; an island whose stages fit no devices.
    """
    islands, one = islands_of(run), job_of(run.island(0))
    check_cells(network, one, islands)
    with spending("searching", budget_s) as spent_s:
        without = search_overlapped(network, job, seed=seed, budget_s=budget_s / 2, spent_s=spent_s)
        found = search_islands(network, one, islands, seed=seed, budget_s=budget_s, spent_s=spent_s)
    now_s = None
    if now:
        whole = set(now) == set(range(run.cells))
        now_s = predict_islands(network, one, islands, now).step_s if whole else math.inf
    moved_bytes = meeting_bytes(one, islands, found.cell_of)
    return IslandsAnswer(run, network, found, without.step.total_s, moved_bytes, now_s)


def proposal(network: Network, run: Run, step_s: float, *, seed: int) -> str:
    """What a run without islands would gain by some, in a line; empty: little. `step_s`: as it is planned."""
    counts = [n for n in range(2, run.M + 1) if run.M % n == 0 and n * run.S <= len(network)]
    if not counts:
        return ""
    try:
        some = with_islands(run, counts[0], 1)
    except SetupError as error:
        return f"islands, which seldom reduce, may be faster, but this run cannot have them: {error.text}"
    islands, one = islands_of(some), job_of(some.island(0))
    found = propose(network, lambda n: replace(one, microbatches=run.M // n), islands, counts, seed=seed)
    if found is None or step_s < WORTH * found[1].step_s:
        return ""
    best, planned = found
    return (
        f"islands seldom reduce: with [islands] count = {best.count}, local_steps = {best.local_steps}, "
        f"codec = {json.dumps(CODEC)} a step takes about {planned.step_s:.3g} s, "
        f"{step_s / planned.step_s:.1f} times as fast; that is {PRICE}; steps, "
        f"checkpoint_every and eval.every are then multiples of {best.local_steps + 1}"
    )


def with_islands(run: Run, islands: int, local_steps: int) -> Run:
    """The run with so many islands, and as many steps as that needs.

    Raises:
        SetupError: it cannot have islands; the text says why.
    """
    window = local_steps + 1

    def whole(steps: int) -> int:
        return -(-steps // window) * window

    return replace(
        run,
        islands=IslandsSpec(count=islands, local_steps=local_steps, codec=CODEC),
        steps=whole(run.steps),
        checkpoint_every=whole(run.checkpoint_every),
        eval=replace(run.eval, every=whole(run.eval.every)),
    )


def as_json(answer: IslandsAnswer) -> dict[str, Any]:
    """One object for programs; times in seconds. `stages` are cells: those of the first island come first."""
    names, run, plan = [device.name for device in answer.network.devices], answer.run, answer.plan
    return {
        "run": run.id,
        "islands": run.islands.count,
        "stages": [[names[i] for i in _members(plan, cell)] for cell in range(run.cells)],
        "idle": [names[i] for i in np.flatnonzero(plan.cell_of == IDLE)],
        "step_s": plan.step_s,
        "inner_step_s": plan.inner.total_s,
        "slowest_island": plan.slowest,
        "meeting_s": plan.meeting_s,
        "meeting_bytes": answer.meeting_bytes,
        "tokens_per_s": run.tokens_per_step / plan.step_s,
        "limit": plan.inner.limit,
        "without_islands_s": answer.without_s,
        "now_s": None if answer.now_s == math.inf else answer.now_s,
        "measured": answer.measured,
    }


def render(answer: IslandsAnswer) -> str:
    run, network, plan, spec = answer.run, answer.network, answer.plan, answer.run.islands
    lines = [heading(run, network)]
    for cell in range(run.cells):
        members = _members(plan, cell)
        lines.append(
            f"cell {cell} (island {cell // run.S}, stage {cell % run.S}): {count(len(members), 'device')}: "
            f"{shown_names(network, members)}"
        )
    idle = np.flatnonzero(plan.cell_of == IDLE)
    if len(idle):
        lines.append(f"idle, since with them a step takes no less: {shown_names(network, idle)}")
    lines += [
        f"a step takes about {plan.step_s:.3g} s ({run.tokens_per_step / plan.step_s:,.0f} tokens/s): "
        f"{plan.inner.total_s:.3g} s on island {plan.slowest}, the slowest, and {plan.meeting_s:.3g} s of "
        f"meeting every {spec.local_steps} steps, in which {shown_bytes(answer.meeting_bytes)} are sent",
        f"what limits it: {plan.inner.limit}",
        f"without islands: {answer.without_s:.3g} s ({answer.without_s / plan.step_s:.2f} times as long); "
        f"that is {PRICE}",
    ]
    lines += as_now(answer.now_s, plan.step_s, answer.measured, "a cell has none: no meeting is held")
    lines.append("a device joins its cell with: swarm peer --stage CELL ...")
    return "\n".join(lines)


def _members(plan: IslandsPlan, cell: int) -> np.ndarray:
    return np.flatnonzero(plan.cell_of == cell)
