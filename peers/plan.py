"""`swarm plan`: which machine should serve which stage, and how long a step will take. Needs none of them."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peers.simulate import job_of
from swarm.errors import SetupError
from swarm.plan.network import Job, Network, read_devices
from swarm.plan.overlap import IDLE, Overlap
from swarm.plan.search import Plan, baselines, repaired, search_overlapped
from swarm.run import Run, load_run

RANDOM_LAYOUTS = 10
"""Of which the mean is what a random layout takes."""
NAMES_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """For whom to plan, and how long to search."""

    manifest: Path
    """The terms of the run."""
    devices: Path
    """The machines and what lies between them: `swarm.plan.network.EXAMPLE` shows one."""
    seed: int = 0
    budget: float = 5.0
    """CPU seconds of the search."""
    json: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A plan, and what it is compared with."""

    plan: Plan
    random_s: float
    """Mean of `RANDOM_LAYOUTS`."""
    megatron_s: float
    """Devices in the order of the file, so many to each stage."""
    cpu_s: float


def run_plan(options: PlanOptions) -> None:
    """Search, and print what was found.

    Raises:
        SetupError: a file that cannot be read or says what cannot be; fewer devices than stages; a stage that
            fits no device.
    """
    run = load_run(options.manifest)
    try:
        text = options.devices.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"cannot read {options.devices}: {error}") from None
    try:
        network = read_devices(text)
    except SetupError as error:
        raise SetupError(f"{options.devices}: {error.text}") from None
    if run.model.kind != "gpt":
        raise SetupError(f'model.kind = "{run.model.kind}" computes nothing to plan for: it must be "gpt"')
    job = job_of(run)
    answer = plan(network, job, seed=options.seed, budget_s=options.budget)
    if options.json:
        print(json.dumps(as_json(answer, run, network)))
    else:
        print(render(answer, run, network, job))


def plan(network: Network, job: Job, *, seed: int, budget_s: float) -> Answer:
    """The search's plan and the baselines; seconds are those of this process's CPU time."""
    began_s = time.process_time()
    found = search_overlapped(
        network, job, seed=seed, budget_s=budget_s, spent_s=lambda: time.process_time() - began_s
    )
    cpu_s = time.process_time() - began_s
    overlap, rng = Overlap(network, job), np.random.default_rng(seed)
    chance_s = [
        overlap.predict(repaired(overlap, dict(baselines(network, job, rng))["random"])).total_s
        for _ in range(RANDOM_LAYOUTS)
    ]
    return Answer(found, float(np.mean(chance_s)), found.starts["megatron"], cpu_s)


def as_json(answer: Answer, run: Run, network: Network) -> dict[str, Any]:
    """One object for programs; times in seconds."""
    step = answer.plan.step
    names = [device.name for device in network.devices]
    return {
        "run": run.id,
        "stages": [[names[i] for i in members] for members in _members(answer.plan, run.S)],
        "idle": [names[i] for i in np.flatnonzero(answer.plan.stage_of == IDLE)],
        "step_s": step.total_s,
        "way_s": step.way_s,
        "busy_s": step.busy_s,
        "tail_s": step.tail_s,
        "tokens_per_s": run.tokens_per_step / step.total_s,
        "limit": step.limit,
        "random_s": answer.random_s,
        "megatron_s": answer.megatron_s,
        "starts_s": answer.plan.starts,
        "cpu_s": answer.cpu_s,
    }


def render(answer: Answer, run: Run, network: Network, job: Job) -> str:
    """The same for people."""
    step, stage_of = answer.plan.step, answer.plan.stage_of
    lines = [
        f"{run.name}: {run.S} stages, {run.M} microbatches a step, {_count(len(network), 'device')} in "
        f"{_count(len(network.regions), 'region')}"
    ]
    for stage, members in enumerate(_members(answer.plan, run.S)):
        need_gb = (job.state_bytes[stage] + job.activation_bytes[stage]) / 1e9
        lines.append(
            f"stage {stage}: {_count(len(members), 'device')}, {need_gb:.3g} GB on each: "
            f"{_names(network, members)}"
        )
    idle = np.flatnonzero(stage_of == IDLE)
    if len(idle):
        lines.append(f"idle, since with them a step takes no less: {_names(network, idle)}")
    lines += [
        f"a step takes about {step.total_s:.3g} s ({run.tokens_per_step / step.total_s:,.0f} tokens/s): "
        f"{step.way_s:.3g} s until the first microbatch is back, {step.busy_s:.3g} s for the others, "
        f"{step.tail_s:.3g} s to exchange gradients",
        f"what limits it: {step.limit}",
        f"a random layout: {answer.random_s:.3g} s ({answer.random_s / step.total_s:.2f} times as long); "
        f"devices in the file's order, as Megatron has it: {answer.megatron_s:.3g} s "
        f"({answer.megatron_s / step.total_s:.2f} times)",
        "a device joins its stage with: swarm peer --stage N ...",
    ]
    return "\n".join(lines)


def _members(found: Plan, stages: int) -> list[np.ndarray]:
    return [np.flatnonzero(found.stage_of == stage) for stage in range(stages)]


def _names(network: Network, members: np.ndarray) -> str:
    shown = [network.devices[i].name for i in members[:NAMES_SHOWN]]
    more = len(members) - len(shown)
    return ", ".join(shown) + (f" and {more} more (--json names all)" if more else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
