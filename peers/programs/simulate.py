"""`swarm simulate`: how fast a run would be on machines that are only described. Needs none of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from peers.islands.planning import islands_of
from peers.programs.descriptions import heading, job_of, load_devices, read_text, shown_bytes
from peers.programs.tool_options import SimulateOptions
from peers.progress import Bar
from peers.sim.throughput.engine import STEPS, IslandsReport, simulate, simulate_islands
from peers.sim.throughput.members import Trace, read_trace
from peers.sim.throughput.world import Settings, ThroughputReport
from swarm.errors import MALFORMED, SetupError, count, did_you_mean
from swarm.ids import Stage
from swarm.manifest import Run, load_run
from swarm.plan.islands import check_cells, search_islands
from swarm.plan.network import Network, check_fit
from swarm.plan.overlapped import Overlap
from swarm.plan.search import MAX_REPLICAS, balanced, repaired
from swarm.records import NO_STAGE

BINS = 20
"""Lines of the chart of throughput over time, at most."""
WIDTH = 40
MOVES_SHOWN = 5
MIN_BIN_S = 1.0
COUNTED = (
    *("utilisation", "joins", "deaths", "replayed", "recomputed", "empty_s", "events"),
    *("boundary_bytes", "reduce_bytes", "download_bytes"),
)
"""What programs are told of a report as it is."""


class _Planned(msgspec.Struct):
    """What is read of `swarm plan --json`."""

    stages: list[list[str]]


def run_simulate(options: SimulateOptions) -> None:
    """Simulate, and print what came of it. Raises SetupError: a file says what cannot be."""
    run = load_run(options.manifest)
    network = load_devices(options.devices)
    trace = read_trace(read_text(options.trace), options.trace.name) if options.trace is not None else None
    if trace is not None and not trace.end_s:
        raise SetupError(f"{options.trace} lasts for 0 s: its last line says when it ends")
    layout = None
    if options.layout is not None:
        layout = read_layout(read_text(options.layout), options.layout.name, network, run)
    simulated, told, drawn = simulate_run, as_json, render
    if run.islands.count > 1:
        simulated, told, drawn = simulate_cells, islands_json, render_islands
    report: Any = simulated(
        run, network, trace, end_s=3600.0 * options.hours, seed=options.seed, layout=layout
    )
    print(json.dumps(told(report, run)) if options.json else drawn(report, run, network))


def read_layout(text: str, name: str, network: Network, run: Run) -> list[Stage]:
    """The stage of each device (of islands: the cell), or `NO_STAGE`, from what `swarm plan --json` printed.

    Raises:
        SetupError: it is something else, or a plan for other devices or stages.
    """
    try:
        planned = msgspec.json.decode(text, type=_Planned)
    except MALFORMED as error:
        raise SetupError(f"{name} is not what swarm plan --json prints: {error}") from None
    if len(planned.stages) != run.cells:
        of = "cells" if run.cells > run.S else "stages"
        raise SetupError(f"{name} has a plan of {len(planned.stages)} {of}; the run has {run.cells}")
    index = {device.name: number for number, device in enumerate(network.devices)}
    layout = [NO_STAGE] * len(network)
    for stage, names in enumerate(planned.stages):
        for one in names:
            if one not in index:
                raise SetupError(f"{name}: no device is called {one!r}{did_you_mean(one, list(index))}")
            if layout[index[one]] != NO_STAGE:
                raise SetupError(f"{name}: device {one!r} is in stages {layout[index[one]]} and {stage}")
            layout[index[one]] = stage
    return layout


def simulate_run(
    run: Run, network: Network, trace: Trace | None, *, end_s: float, seed: int,
    layout: Sequence[Stage] | None = None,
) -> ThroughputReport:  # fmt: skip
    """The run on the network. Without a layout, or a trace, stages are about equally fast; with a trace every
    device that comes later goes where it is needed."""
    job = job_of(run)
    check_fit(network, job)
    if trace is not None:
        end_s = min(end_s, trace.end_s)
    if layout is None and trace is not None:
        layout = [NO_STAGE] * len(network)
    elif layout is None:
        overlap = Overlap(network, job)
        layout = [int(stage) for stage in repaired(overlap, balanced(overlap))]
    settings = Settings(
        delayed_updates=run.delayed_updates,
        rebalance_every_s=run.rebalance_every_s,
        checkpoint_every=run.checkpoint_every or 1_000_000,
        bin_s=max(MIN_BIN_S, end_s / BINS),
    )
    with Bar("simulating", int(end_s), unit="virtual seconds") as bar:
        report = simulate(
            network, job, layout, end_s=end_s, settings=settings, trace=trace, seed=seed, progress=bar.reach
        )
    if trace is None and len(network) <= MAX_REPLICAS * run.S:
        report.predicted = Overlap(network, job).predict(layout)
    return report


def simulate_cells(
    run: Run, network: Network, trace: Trace | None = None, *, end_s: float, seed: int,
    layout: Sequence[Stage] | None = None,
) -> IslandsReport:  # fmt: skip
    """A run of islands; without a layout near devices are on one island, as `swarm plan` begins its search.

    Raises:
        SetupError: fewer devices than cells, a layout that the devices cannot hold, or a trace of regions.
    """
    job, islands = job_of(run.island(0)), islands_of(run)
    check_cells(network, job, islands)
    cells = layout
    if cells is None:
        cells = search_islands(network, job, islands, seed=seed).cell_of
    settings = Settings(rebalance_every_s=run.rebalance_every_s if trace is not None else 0.0)
    end_s = end_s if trace is None else min(end_s, trace.end_s)
    return simulate_islands(
        network, job, islands, cells, end_s=end_s, settings=settings, trace=trace, seed=seed
    )


# --- what came of it ----------------------------------------------------------------------------------------


def over_time(report: ThroughputReport) -> list[tuple[float, float]]:
    """(end of the bin in s, microbatches answered a second in it)."""
    starts_s = [number * report.bin_s for number in range(math.ceil(report.end_s / report.bin_s))]
    ends_s, answered = [*starts_s[1:], report.end_s], dict(enumerate(report.answered))
    bins = enumerate(zip(starts_s, ends_s, strict=False))
    return [(end_s, answered.get(number, 0) / (end_s - start_s)) for number, (start_s, end_s) in bins]


def as_json(report: ThroughputReport, run: Run) -> dict[str, Any]:
    """One object for programs; times in seconds."""
    return {
        "run": run.id,
        "stages": report.stages,
        "seconds": report.end_s,
        "steps": report.version,
        "microbatches_per_s": report.per_s,
        "tokens_per_s": _tokens_per_s(report, run),
        "over_time": [[round(end_s, 3), rate] for end_s, rate in over_time(report)],
        "moves": [
            {"at_s": at_s, "peer": m.peer, "from": m.from_stage, "to": m.to_stage, "why": m.why}
            for at_s, m in report.moves
        ],
        "went_back": report.generations,
        "stood_still_s": report.waited_s,
        "limit": report.predicted and report.predicted.limit,
        **{name: getattr(report, name) for name in COUNTED},
    }


def render(report: ThroughputReport, run: Run, network: Network) -> str:
    lines = [
        heading(run, network),
        f"{report.version} steps in {_clock(report.end_s)}: {report.per_s:.3g} microbatches/s, "
        f"{_tokens_per_s(report, run):,.0f} tokens/s",
        "",
        "microbatches answered a second, over time",
    ]
    rates = over_time(report)
    most = max((rate for _, rate in rates), default=0.0) or 1.0
    for at_s, rate in rates:
        lines.append(f"  {_clock(at_s):>9}  {'█' * round(WIDTH * rate / most):<{WIDTH}}  {rate:.3g}")
    lines += [*limits(report), "", "devices compute, of their time"]
    lines += [f"  stage {stage:<3} {share:6.1%}" for stage, share in enumerate(report.utilisation)]
    lines += [
        "",
        f"{report.joins} joined, {report.deaths} vanished; the run went back {report.generations} times and "
        f"stood still for {_clock(report.waited_s)}",
        f"{report.replayed} microbatches replayed; computed for nothing: "
        f"{report.recomputed / max(1, report.computed):.2%}",
        f"sent: {shown_bytes(report.boundary_bytes)} between stages, "
        f"{shown_bytes(report.reduce_bytes)} in reduces, {shown_bytes(report.download_bytes)} of state",
        f"{len(report.moves)} moves" + (":" if report.moves else ""),
    ]
    lines += [
        f"  {_clock(at_s):>9}  {m.peer}: stage {m.from_stage} → {m.to_stage}; {m.why}"
        for at_s, m in report.moves[:MOVES_SHOWN]
    ]
    if len(report.moves) > MOVES_SHOWN:
        lines.append(f"  … and {len(report.moves) - MOVES_SHOWN} more (--json has all)")
    return "\n".join(lines)


def islands_json(report: IslandsReport, run: Run) -> dict[str, Any]:
    """One object for programs; times in seconds, bytes in a step, with its part of a meeting."""
    inner_s = report.inner_s
    taken = max(inner_s) < math.inf
    return {
        "run": run.id,
        "islands": run.islands.count,
        "stages": run.S,
        "step_s": report.step_s if taken else None,
        "inner_step_s": [each if each < math.inf else None for each in inner_s],
        "meeting_s": report.meeting_s,
        "tokens_per_s": run.tokens_per_step / report.step_s,
        "utilisation": report.utilisation,
        "boundary_bytes": report.sent_bytes("boundary_bytes"),
        "reduce_bytes": report.sent_bytes("reduce_bytes"),
        "meeting_bytes": report.meeting_bytes / report.local_steps,
        "joins": sum(each.joins for each in report.islands),
        "deaths": sum(each.deaths for each in report.islands),
        "went_back": sum(each.generations for each in report.islands),
    }


def render_islands(report: IslandsReport, run: Run, network: Network) -> str:
    inner_s, spec = report.inner_s, run.islands
    slowest, fastest = inner_s.index(max(inner_s)), inner_s.index(min(inner_s))
    lines = [heading(run, network)]
    if max(inner_s) == math.inf:
        all_s = _clock(report.islands[slowest].end_s)
        return "\n".join([*lines, f"island {slowest} took no step in {all_s}: --hours simulates for longer"])
    lines += [
        f"a step takes {report.step_s:.3g} s: {run.tokens_per_step / report.step_s:,.0f} tokens/s",
        f"island {slowest}, the slowest, takes {inner_s[slowest]:.3g} s for a step, island {fastest}, the "
        f"fastest, {inner_s[fastest]:.3g} s; a meeting every {spec.local_steps} steps takes "
        f"{report.meeting_s:.3g} s",
        "",
        "devices compute, of their time",
        *(f"  stage {stage:<3} {share:6.1%}" for stage, share in enumerate(report.utilisation)),
        "",
        f"sent in a step: {shown_bytes(report.sent_bytes('boundary_bytes'))} between stages, "
        f"{shown_bytes(report.sent_bytes('reduce_bytes'))} in reduces, "
        f"{shown_bytes(report.meeting_bytes / spec.local_steps)} for its part of a meeting",
    ]
    deaths = sum(each.deaths for each in report.islands)
    simulated = f"simulated: {STEPS} steps of each island by itself"
    if deaths:
        again = count(sum(each.generations for each in report.islands), "time")
        lines.append(f"{count(deaths, 'device')} vanished; an island went back to its last meeting {again}")
        simulated = "simulated: each island by itself, with its share of the devices that are up"
    lines.append(f"{simulated}; the meeting as what its transfers take")
    return "\n".join(lines)


def limits(report: ThroughputReport) -> list[str]:
    """What made the run as slow as it was, or had it stand still."""
    lines = list[str]()
    for stage, empty_s in enumerate(report.empty_s):
        if empty_s > 0.0:
            lines.append(f"stage {stage} had no peer for {_clock(empty_s)}: the run stood still")
    if report.idle:
        lines.append(f"{report.idle} times a device came that no stage fits into")
    if report.predicted is not None:
        took = "" if report.version else ", longer than all of this"
        total_s, limit = report.predicted.total_s, report.predicted.limit
        lines.append(f"a step is predicted to take {total_s:.3g} s{took}; what limits it: {limit}")
    return lines and ["", *lines]


def _tokens_per_s(report: ThroughputReport, run: Run) -> float:
    return report.per_s * run.tokens_per_step / run.M


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
