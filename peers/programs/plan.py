"""`swarm plan`: which machine should serve which stage, and how long a step will take.

For machines that are only described, or for the peers of a run as they are, with what they have measured.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from peers.islands import planning as plan_islands
from peers.islands.planning import IslandsAnswer, islands_of
from peers.programs.descriptions import as_now, heading, job_of, load_devices, read_text, shown_names
from peers.programs.manifest_pinning import check_code
from peers.programs.status import observe
from peers.programs.tool_options import PlanOptions
from peers.progress import spending
from swarm.codecs import PACKED, packed_part
from swarm.errors import SetupError, count
from swarm.ids import Stage
from swarm.manifest import CodecSpec, IslandsSpec, Run, load_run, run_of, tomllib
from swarm.model.stage_io import boundary_bytes
from swarm.monitoring.health import Observation
from swarm.plan.islands import check_cells
from swarm.plan.measured_network import Machine, Pair, estimate
from swarm.plan.network import BACKWARD_FORWARDS, Network, StepWork
from swarm.plan.overlapped import IDLE, Overlap
from swarm.plan.search import Placement, search_overlapped
from swarm.plan.topk_ratios import boundary_bandwidths, boundary_codecs

STAGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of them that are tried where a manifest leaves that open."""
HIDDEN = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.125, 0.09, 0.06, 0.0)
"""How much of the slowest stage's time for a microbatch its transfer may take: AdaTopK tries these."""
MAX_MACHINES_SHOWN = 16
SEARCHES = 3
"""At most, where codecs are chosen too: the best layout for what they leave to send is another one."""
SERVE = ("joining", "serving")
WORTH = 0.02
"""A codec that compresses more must win more than this part of a step."""


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    run: Run
    network: Network
    job: StepWork
    plan: Placement
    in_flight: np.ndarray
    """[N] microbatches that each device has at once; see `Overlap.in_flight`."""
    now_s: float | None = None
    """As the peers of a run are now; None for machines that are only described."""
    measured: str = ""
    """How much of the network was measured, in words."""
    codecs: CodecSpec | None = None
    """What each boundary should send, if that was asked for: see `swarm.plan.topk_ratios`."""
    codecs_step_s: float | None = None
    """What a step takes then."""
    without_s: tuple[str, float] | None = None
    """The region whose loss makes a step longest, and how long; None: a stage would have no device."""
    islands: str = ""
    """What islands would gain, in words; empty: little."""


async def run_plan(options: PlanOptions) -> None:
    """Search, and print what was found.

    Raises:
        SetupError: a file that cannot be read or says what cannot be; fewer devices than stages; a stage that
            fits no device; a run that no peer knows, or whose peers have not measured their speed.
    """
    if options.run:
        if options.manifest or options.devices:
            raise SetupError("--run plans for the peers of a run: it goes without --manifest and --devices")
        if not options.join:
            raise SetupError("--run needs --join: the address of a bootstrap or of any peer of that run")
        run, seen = await observe(options.run, options.join)
        check_code(run, options.allow_code)  # it is built, to reckon its work
    else:
        if options.manifest is None or options.devices is None:
            raise SetupError(
                "give --manifest and --devices, to plan for machines that are described; or --run and "
                "--join, or @FILE that has both, for the peers of a run as they are"
            )
        seen = load_devices(options.devices)
        run = load_run_with_stages(options.manifest, seen, options)
    if run.islands.count > 1:
        if options.keep is not None or options.survive_region:
            raise SetupError(
                "--keep and --survive-region plan for runs without islands: an island gets a stage that it "
                "has lost from the others"
            )
        found = islands_view(run, seen, options)
        print(json.dumps(plan_islands.as_json(found)) if options.json else plan_islands.render(found))
        return
    answer = plan_view(run, seen, options)
    if options.keep is not None:
        answer = with_codecs(answer, options.keep, options)
    else:
        islands = plan_islands.proposal(answer.network, run, answer.plan.step.total_s, seed=options.seed)
        answer = replace(answer, islands=islands)
    answer = replace(answer, without_s=worst_loss(answer))
    print(json.dumps(as_json(answer)) if options.json else render(answer))


def load_run_with_stages(path: Path, network: Network, options: PlanOptions) -> Run:
    """The run of a manifest; with the number of stages of the shortest step, where that is left out. Of each
    number only layouts made by rule are looked at.

    Raises:
        SetupError: it is no manifest, or no number will do.
    """
    values = dict[str, Any]()
    with contextlib.suppress(ValueError, RecursionError):  # `load_run` says what is wrong
        values = tomllib.loads(read_text(path))
    model = values.get("model")
    if type(model) is not dict or "stages" in model:
        return load_run(path)
    found, wrong = list[tuple[float, int, Run]](), list[SetupError]()
    for stages in [number for number in STAGES if number <= len(network)]:
        try:
            run = run_of({**values, "model": {**model, "stages": stages}})
            check_cells(network, job := job_of(run.island(0)), islands_of(run))
            best = search_overlapped(network, job, seed=options.seed, survive=options.survive_region)
            found.append((best.step.total_s, stages, run))
        except SetupError as error:
            wrong.append(error)
    if not found:
        raise SetupError(f"{path}: {wrong[0].text}")
    tried = ", ".join(f"{stages}: {step_s:.3g} s" for step_s, stages, _ in found)
    print(f"model.stages is left out; a step, by the number of stages: {tried}", file=sys.stderr)
    return min(found)[2]


def plan_view(run: Run, seen: Observation | Network, options: PlanOptions) -> Planned:
    """A plan for the peers that serve a run, from what they have measured of themselves and their lines; or
    for machines that are only described."""
    job = job_of(run)
    network, now, words = measured(run, seen, job)
    answer, now_s = plan(run, network, job, options), None
    if now:
        whole = set(now) == set(range(run.S))
        now_s = Overlap(network, job).predict(now).total_s if whole else math.inf
    return replace(answer, now_s=now_s, measured=words)


def islands_view(run: Run, seen: Observation | Network, options: PlanOptions) -> IslandsAnswer:
    """A plan for a run of islands: for the peers that serve it, or machines that are only described."""
    job = job_of(replace(run, islands=IslandsSpec()))
    network, now, words = measured(run, seen, job)
    answer = plan_islands.plan(network, run, job, seed=options.seed, budget_s=options.budget, now=now)
    return replace(answer, measured=words)


def measured(run: Run, seen: Observation | Network, job: StepWork) -> tuple[Network, list[Stage], str]:
    """The network of the peers that serve a run, the stage of each (of islands the cell), and in words how
    much is measured. Machines that are only described serve none.
    """
    if isinstance(seen, Network):
        return seen, [], ""
    there = {r.peer: r for r in seen.records if r.state in SERVE and 0 <= r.stage < run.cells}
    if seen.voice:  # a stranger announces thousands, for which one would search for hours
        known = seen.voice.keys() | {status.peer for status in seen.statuses}
        there = {peer: record for peer, record in there.items() if peer in known}
    serving = [record for peer, record in there.items() if peer not in seen.silent]
    if not serving:
        raise SetupError("no peer serves the run now, so there is nothing to plan for")
    # A microbatch is a forward and a backward of its stage.
    flops = [(1 + BACKWARD_FORWARDS) * forward for forward in job.forward_flops]
    machines = [
        Machine(name=r.peer, flops_per_s=r.speed * flops[r.stage % run.S], upload_bps=r.bandwidth_bps)
        for r in serving
    ]
    pairs = [
        Pair(at=status.peer, to=link.peer, rtt_s=link.rtt_s, bandwidth_bps=link.bandwidth_bps)
        for status in seen.statuses
        for link in status.links
    ]
    found = estimate(machines, pairs)
    return found.network, [record.stage for record in serving], found.words


def plan(run: Run, network: Network, job: StepWork, options: PlanOptions) -> Planned:
    """The search's plan; the budget is of this process's CPU time."""
    budget_s = options.budget / (1 if options.keep is None else SEARCHES)
    with spending("searching", budget_s) as spent_s:
        found = search_overlapped(
            network, job, seed=options.seed, budget_s=budget_s, spent_s=spent_s,
            survive=options.survive_region,
        )  # fmt: skip
    return Planned(run, network, job, found, Overlap(network, job).in_flight(found.stage_of))


def with_codecs(answer: Planned, least: float, options: PlanOptions) -> Planned:
    """Codecs for a layout and a layout for these codecs: first for as little as may be sent, as far devices
    are of use only then; then for what was chosen.

    `answer`: the layout for what the manifest sends. Taken is the shortest step.
    """
    run, network, job = answer.run, answer.network, answer.job
    codecs, step_s = plan_codecs(run, network, job, answer.plan.stage_of, least)
    sends = CodecSpec.symmetric(f"topk:{least:g}+blockwise8")
    for _ in range(SEARCHES - 1):
        sending = job_of(replace(run, codec=sends))
        again = plan(run, network, sending, options)
        found, found_s = plan_codecs(run, network, job, again.plan.stage_of, least)
        if found_s < step_s:
            codecs, step_s = found, found_s
            as_it_is = replace(again.plan, step=Overlap(network, job).predict(again.plan.stage_of))
            answer = replace(answer, plan=as_it_is, in_flight=again.in_flight)
        sends = codecs
    return replace(answer, codecs=codecs, codecs_step_s=step_s)


def plan_codecs(
    run: Run, network: Network, job: StepWork, stage_of: Sequence[Stage] | np.ndarray, least: float
) -> tuple[CodecSpec, float]:
    """AdaTopK for a layout: as little is compressed as costs nearly nothing of a step.

    By which rule: docs/design.md, *Top-k on slow lines*. `stage_of`: of each device, or `IDLE`.

    Returns:
        `[codec]` of the manifest, with a list for each direction; a step's seconds with it, as predicted.

    Raises:
        SetupError: a part that cannot be kept, or lists that are too long for a manifest.
    """
    speeds = [sum(network.devices[i].flops_per_s for i in members) for members in _members(stage_of, run.S)]
    compute_s = [
        (1 + BACKWARD_FORWARDS) * flops / speed
        for flops, speed in zip(job.forward_flops, speeds, strict=True)
    ]
    base = [run.codec.forward_at(boundary) for boundary in range(run.S - 1)]

    def bytes_of(boundary: int, codec: str) -> tuple[float, float]:
        same = codec == base[boundary]
        return boundary_bytes(
            run if same else replace(run, codec=CodecSpec.symmetric(codec)), boundary, codec
        )

    bandwidths_bps = {part: boundary_bandwidths(network, stage_of, run.S, part) for part in PACKED.values()}

    def carries_bps(boundary: int, codec: str) -> tuple[float, float]:
        return bandwidths_bps[packed_part(codec)][boundary]

    def spec_of(forward: tuple[str, ...]) -> CodecSpec:
        backward = tuple(
            run.codec.backward_at(boundary, "none")
            if codec == base[boundary]
            else CodecSpec.symmetric(codec).backward
            for boundary, codec in enumerate(forward)
        )
        return replace(run.codec, forward=forward, backward=backward)  # type: ignore

    def step_s(forward: tuple[str, ...]) -> float:
        sent = [bytes_of(boundary, codec) for boundary, codec in enumerate(forward)]
        there, back = tuple(each[0] for each in sent), tuple(each[1] for each in sent)
        sending = replace(job, forward_bytes=there, backward_bytes=back)
        return Overlap(network, sending.packing(spec_of(forward))).predict(stage_of).total_s

    tried = dict.fromkeys(
        boundary_codecs(carries_bps, bytes_of, base, least=least, enough_s=part * max(compute_s))
        for part in HIDDEN
    )
    takes_s = {forward: step_s(forward) for forward in tried}
    enough_s = (1.0 + WORTH) * min(takes_s.values())
    forward, found_s = next(found for found in takes_s.items() if found[1] <= enough_s)
    codecs = spec_of(forward)
    if forward:
        replace(run, codec=codecs)  # it must be a manifest that can be
    return codecs, found_s


def worst_loss(answer: Planned) -> tuple[str, float] | None:
    """The region without which a step takes longest, and how long; None: without some, a stage is empty."""
    overlap, stage_of = Overlap(answer.network, answer.job), answer.plan.stage_of
    found: list[tuple[float, str]] = []
    for region in np.unique(overlap.network.place_of[stage_of != IDLE]):
        left = np.where(overlap.network.place_of == region, IDLE, stage_of)
        if len(np.unique(left[left != IDLE])) < answer.run.S:
            return None
        found.append((overlap.predict(left).total_s, answer.network.regions[region]))
    total_s, name = max(found)
    return name, total_s


def as_json(answer: Planned) -> dict[str, Any]:
    """One object for programs; times in seconds."""
    run, network, step = answer.run, answer.network, answer.plan.step
    names = [device.name for device in network.devices]
    return {
        "run": run.id,
        "stages": [[names[i] for i in members] for members in _members(answer.plan.stage_of, run.S)],
        "idle": [names[i] for i in np.flatnonzero(answer.plan.stage_of == IDLE)],
        "step_s": step.total_s,
        "way_s": step.first_s,
        "busy_s": step.busy_s,
        "tail_s": step.tail_s,
        "tokens_per_s": run.tokens_per_step / step.total_s,
        "limit": step.limit,
        "in_flight": {names[i]: int(answer.in_flight[i]) for i in np.flatnonzero(answer.in_flight)},
        "now_s": None if answer.now_s == math.inf else answer.now_s,
        "measured": answer.measured,
        "machines": machines(network, answer.plan.stage_of),
        "worst_lost_region": answer.without_s and answer.without_s[0],
        "step_without_it_s": answer.without_s and answer.without_s[1],
        "starts_s": answer.plan.starts,
        "codec_forward": answer.codecs and answer.codecs.forward,
        "codec_backward": answer.codecs and answer.codecs.backward,
        "codec_step_s": answer.codecs_step_s,
        "islands": answer.islands,
    }


def render(answer: Planned) -> str:
    run, network, step, stage_of = answer.run, answer.network, answer.plan.step, answer.plan.stage_of
    lines = [heading(run, network)]
    for stage, members in enumerate(_members(stage_of, run.S)):
        least_gb = answer.job.least_bytes(stage) / 1e9
        there = f"{count(len(members), 'device')}, {least_gb:.3g} GB on each"
        lines.append(f"stage {stage}: {there}: {shown_names(network, members)}")
    idle = np.flatnonzero(stage_of == IDLE)
    if len(idle):
        lines.append(f"idle, since with them a step takes no less: {shown_names(network, idle)}")
    lines += [
        f"a step takes about {step.total_s:.3g} s ({run.tokens_per_step / step.total_s:,.0f} tokens/s): "
        f"{step.first_s:.3g} s until the first microbatch is back, {step.busy_s:.3g} s for the others, "
        f"{step.tail_s:.3g} s to exchange gradients",
        f"what limits it: {step.limit}",
        *_in_memory(network, stage_of),
        *_in_flight(answer),
        *_losses(answer),
    ]
    lines += as_now(answer.now_s, step.total_s, answer.measured, "a stage has none: no step is taken")
    if answer.codecs and answer.codecs.forward:
        lines.append(
            f"with these codecs a step takes about {answer.codecs_step_s:.3g} s; the manifest then says, in "
            "[codec]:"
        )
        for direction in ("forward", "backward"):
            lines.append(f"  {direction} = {json.dumps(getattr(answer.codecs, direction))}")
    if answer.islands:
        lines.append(answer.islands)
    lines.append("a device joins its stage with: swarm peer --stage N ...")
    return "\n".join(lines)


def machines(network: Network, stage_of: np.ndarray) -> dict[str, list[Stage]]:
    """Machine with several cards -> the stage of each, or `IDLE`."""
    found: dict[str, list[Stage]] = {}
    for device, stage in enumerate(stage_of):
        if name := network.machine_of(device):
            found.setdefault(name, []).append(int(stage))
    return found


def _in_memory(network: Network, stage_of: np.ndarray) -> list[str]:
    """Which stages are handed over inside a machine, and how its peers are started."""
    lines: list[str] = []
    for name, stages in list(machines(network, stage_of).items())[:MAX_MACHINES_SHOWN]:
        there = sorted({stage for stage in stages if stage != IDLE})
        if not there:
            continue
        ends = [stage for stage in there if stage + 1 not in there]
        begins = [stage for stage in there if stage - 1 not in there]
        rows = [f"{a} to {b}" for a, b in zip(begins, ends, strict=True) if a < b]
        inside = f"stages {', '.join(rows)} in memory" if rows else "nothing in memory"
        words = ",".join("-" if stage == IDLE else str(stage) for stage in stages)
        lines.append(f"{name} hands over {inside}: swarm peer --device all --stages={words}")
    return lines


def _losses(answer: Planned) -> list[str]:
    """What the loss of a whole region would do."""
    if len(set(answer.network.places)) < 2:
        return []
    if answer.without_s is None:
        return ["the loss of one region can leave a stage without a device (--survive-region plans for it)"]
    region, total_s = answer.without_s
    return [f"any one region may be lost: without {region}, the worst, a step takes about {total_s:.3g} s"]


def _in_flight(answer: Planned) -> list[str]:
    """What a layout needs at once on its devices, and which of them cannot hold that."""
    most, devices = int(answer.in_flight.argmax()), answer.network.devices
    needs = count(int(answer.in_flight[most]), "microbatch")
    lines = [f"this layout needs {needs} in flight on {devices[most].name}, on others no more"]
    for i in np.flatnonzero(answer.in_flight):
        device, needed = devices[i], int(answer.in_flight[i])
        room = answer.job.room(int(answer.plan.stage_of[i]), device)
        if room < needed:
            lines.append(
                f"the memory of {device.name} holds {room:.0f} of the {needed} microbatches that it needs in "
                "flight: a step takes longer, unless it joins with --recompute"
            )
    return lines


def _members(stage_of: Sequence[Stage] | np.ndarray, stages: int) -> list[np.ndarray]:
    return [np.flatnonzero(np.asarray(stage_of) == stage) for stage in range(stages)]
