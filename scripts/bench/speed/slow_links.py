"""What compression is worth on slow lines: tokens/s and utilisation of real swarms, by line and codec.

    python scripts/bench/speed/slow_links.py --rounds 1   # as root; the published table; 15 minutes
    python scripts/bench/speed/slow_links.py --lines 8 50 100 200 500 mixed --rtt 0 50 100 200  # 45 minutes
    python scripts/bench/speed/slow_links.py --lines mixed --rtt 50 --codec none adatopk --rounds 1
    python scripts/bench/speed/slow_links.py --simulated --lines 8 50 100 200 500 mixed --rtt 0 50 100 200

Real processes (bootstrap, peers, a trainer), each on a host of its own (`netlab.py`) whose line has the
stated Mbit/s up and down; the round trip is between any two hosts. `mixed`: hosts with 1 Gbit/s each, but 8
Mbit/s between the peers of stage 0 and those of stage 1.

Devices are slow ones, so that two cores can play several: a forward, a backward, and the two together in
the last stage, take `--job` seconds each, encoding and decoding included; what is really computed takes a
part of that. So speeds are those of routing, queues, lines and codecs' bytes, not of this machine's
arithmetic. With the sizes below a boundary of float32 has 0.5 MB a microbatch, and a stage in the middle
sends twice that: lines of up to 105 Mbit/s cannot carry what the devices compute.

`adatopk` is what `swarm plan --keep` plans for those lines and a manifest without codecs: each boundary has
its own, `none` where the computation hides the transfer. Where it plans what another column has anyway, the
manifest is the same one, and is measured once.

A swarm goes through all lines, which change under it, and on each through the windows of `--window`; each
time a step passes that is not counted, then `--steps` steps are. What counts is the best window: few
microbatches in flight where a line is the limit, since they share it and all come late, many where round
trips are. Rounds go through the codecs in turn, every other one backwards. `to_none` and `to_bf16` are
medians over rounds of the ratio of tokens/s within a round. `busy` is the share of the time in which the
devices of the busiest stage work. `wire` is what all boundaries carried, frames and heartbeats included, ÷
what codec and tokens take by formula.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from peers.programs.descriptions import job_of
from peers.programs.plan import plan_codecs
from peers.sim.throughput.engine import simulate
from peers.sim.throughput.world import Settings
from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import Segment, Swarm, bench_run, machine, report, role_names
from scripts.bench.common.netlab import Lab, Link, why_not
from scripts.bench.common.step_time import mean_step_s
from scripts.bench.loss.codecs_loss import codec_spec
from swarm.errors import SetupError
from swarm.manifest import CodecSpec, Run
from swarm.model.stage_io import body_bytes, boundary_bytes, gradient_metas, input_metas
from swarm.plan.network import Device, Network, StepWork

COLUMNS = (
    "lines", "rtt_ms", "codec", "planned", "tokens_per_s", "busy", "to_none", "to_bf16", "wire",
)  # fmt: skip
CODECS = ("none", "bf16", "blockwise8", "topk:0.05+blockwise8", "adatopk")
ADAPTED = "adatopk"
MIXED = "mixed"
FAST_MBIT, SLOW_MBIT = 1000.0, 8.0
START_S = 8.0
"""Of a swarm, until its first step is taken; only for what is said beforehand."""
QUEUE_S = 0.5
"""What waits longer for a line is dropped, as a home router would."""


@dataclass(frozen=True)
class Lines:
    """What lies between the hosts."""

    mbit: float | None
    """Of each host, up and down; None: `MIXED`."""
    rtt_s: float

    @property
    def name(self) -> str:
        return MIXED if self.mbit is None else f"{self.mbit:g}"

    @property
    def host_bps(self) -> float:
        return 1e6 * (FAST_MBIT if self.mbit is None else self.mbit)

    def link_bps(self, stage: int, other: int) -> float:
        """Between a peer of one stage and one of another; 0: what the hosts have."""
        return 1e6 * SLOW_MBIT if self.mbit is None and {stage, other} == {0, 1} else 0.0


@dataclass(frozen=True)
class Sizes:
    """The swarm, alike in all measurements."""

    stages: int
    replicas: int
    job_s: float
    windows: tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """One measurement."""

    tokens_per_s: float
    busy: float
    wire: float
    window: int


# --- lines ---


def shape(lab: Lab, lines: Lines | None) -> None:
    """Lay these lines between the hosts, who are named as `role_names`; None: as fast as they will."""
    for host in lab.hosts:
        lab.set_bandwidth(host, 0.0 if lines is None else lines.host_bps)
    for a, b in combinations(lab.hosts, 2):
        link = Link() if lines is None else Link(delay_s=lines.rtt_s / 2)
        ends = [stage_of_host(a), stage_of_host(b)]
        if lines is not None and None not in ends:
            link = replace(link, bandwidth_bps=lines.link_bps(*(end for end in ends if end is not None)))
        lab.set_link(a, b, link)


def stage_of_host(host: str) -> int | None:
    """None: not a peer's."""
    kind, _, number = host.partition(" ")
    return int(number.partition(".")[0]) if kind == "stage" else None


def described(base: Run, lines: Lines, sizes: Sizes) -> tuple[Network, StepWork, list[int]]:
    """These lines and devices of this speed, as the planner and the simulation have them, and the layout."""
    # A device of the last stage does one job for a microbatch, the others two; a backward is two forwards.
    flops = [sizes.job_s * (1 if stage == base.S - 1 else 2) / 3 for stage in range(base.S)]
    job = replace(job_of(base), forward_flops=tuple(flops))
    layout = [stage for stage in range(base.S) for _ in range(sizes.replicas)]
    bps = lines.host_bps
    devices = tuple(Device(f"d{i}", s, 1.0, upload_bps=bps, download_bps=bps) for i, s in enumerate(layout))
    between = [[lines.link_bps(a, b) or math.inf for b in range(base.S)] for a in range(base.S)]
    latency = np.full((base.S, base.S), lines.rtt_s / 2)
    return (
        Network(devices, tuple(f"stage {s}" for s in range(base.S)), latency, np.array(between)),
        job,
        layout,
    )


def adapted(base: Run, lines: Lines, sizes: Sizes, least: float) -> CodecSpec:
    """What `swarm plan --keep LEAST` plans for a manifest without codecs."""
    network, job, layout = described(base, lines, sizes)
    return plan_codecs(base, network, job, layout, least)[0]


def simulated(run: Run, lines: Lines, sizes: Sizes) -> float:
    """Tokens/s of a run with the best of the windows, by the simulation with the live policies."""
    network, job, layout = described(run, lines, sizes)
    of_each = [Settings(window=window, rebalance_every_s=0.0) for window in sizes.windows]
    steps_s = (
        mean_step_s(simulate(network, job, layout, end_s=1e9, steps=6, settings=settings))
        for settings in of_each
    )
    return run.tokens_per_step / min(steps_s)


# --- manifests ---


def base_run(options: argparse.Namespace) -> Run:
    """Without a codec."""
    base = bench_run(
        stages=options.stages, hidden=options.hidden, layers=options.stages, codec="none",
        microbatches=options.microbatches, microbatch_size=4, sequence_length=256,
    )  # fmt: skip
    return replace(base, name="slow links", rebalance_every_s=0)


def manifests(
    base: Run, lines: Sequence[Lines], codecs: Sequence[str], sizes: Sizes, least: float
) -> dict[str, dict[Lines, Run]]:
    """By column, the run on each of the lines. Equal runs are one swarm."""
    return {
        codec: {
            each: replace(
                base, codec=adapted(base, each, sizes, least) if codec == ADAPTED else codec_spec(codec)
            )
            for each in lines
        }
        for codec in codecs
    }


def payload_bytes(run: Run) -> float:
    """Of one microbatch over all boundaries, both ways, tokens included: what codecs say by formula."""
    total = 0.0
    for boundary in range(run.S - 1):
        taken = input_metas(run, boundary + 1)
        total += body_bytes(taken) + body_bytes(gradient_metas(run, boundary))
    return total


def words(codec: CodecSpec, boundaries: int) -> str:
    """What is sent forward over each boundary, once if it is the same."""
    forward = [codec.forward_at(boundary) for boundary in range(boundaries)]
    return forward[0] if len(set(forward)) == 1 else ", ".join(forward)


def least_step_s(run: Run, lines: Lines, sizes: Sizes) -> float:
    """No step takes less: the devices and the lines of the stages, whichever has more to do."""
    sent = [boundary_bytes(run, boundary, run.codec.forward_at(boundary)) for boundary in range(run.S - 1)]
    worst = 2 * sizes.job_s
    for stage in range(run.S):
        own = (sent[stage][0] if stage < run.S - 1 else 0.0) + (sent[stage - 1][1] if stage else 0.0)
        worst = max(worst, 8 * own / lines.host_bps)
    for boundary, ways in enumerate(sent):
        if link_bps := lines.link_bps(boundary, boundary + 1):
            worst = max(worst, 8 * max(ways) / link_bps)
    return worst * run.M / sizes.replicas


# --- measuring ---


def found_in(segment: Segment, run: Run, window: int) -> Found:
    """Of the steps after the first: the whole time between the ends of steps counts."""
    ends = [event.at for event in segment.events]
    step_s = (ends[-1] - ends[0]) / (len(ends) - 1)
    stages: dict[int | None, list[float]] = {}
    for name, seconds in segment.busy_s.items():
        stages.setdefault(stage_of_host(name), []).append(seconds / len(ends))
    busy_s = max(statistics.fmean(of) for of in stages.values())
    peers_of = {segment.after[name].peer: stage_of_host(name) for name in segment.after}
    carried = 0
    for name, status in segment.after.items():
        for now, sign in ((status, 1), (segment.before[name], -1)):
            for link in now.links:
                if peers_of.get(link.peer) == (stage_of_host(name) or 0) + 1:
                    carried += sign * (link.bytes_in + link.bytes_out)
    return Found(
        tokens_per_s=run.tokens_per_step / step_s,
        busy=busy_s / step_s,
        wire=carried / (len(ends) * run.M * payload_bytes(run)),
        window=window,
    )


async def measure(lab: Lab, run: Run, lines: Sequence[Lines], sizes: Sizes, steps: int) -> dict[Lines, Found]:
    """One swarm on each of the lines, with the window that is best there."""
    shape(lab, None)
    found: dict[Lines, Found] = {}
    room = ["--max-inflight", str(max(sizes.windows))]
    async with Swarm(
        run, replicas=sizes.replicas, peer_arguments=room,
        environment={"SWARM_JOB_S": str(sizes.job_s)}, lab=lab,
    ) as swarm:  # fmt: skip
        await swarm.train(1)  # connects, and allocates
        for each in lines:
            shape(lab, each)
            tried = [
                found_in(await swarm.train(1 + steps, window=window), run, window) for window in sizes.windows
            ]
            found[each] = max(tried, key=lambda one: one.tokens_per_s)
        shape(lab, None)  # they leave at once
    return found


Measured = Mapping[tuple[str, Lines], Sequence[Found]]
"""By column and lines, one of each round."""


def rows_of(measured: Measured, runs: Mapping[str, Mapping[Lines, Run]]) -> list[dict[str, Any]]:
    """A row for each codec on each of the lines."""

    def ratio(found: Sequence[Found], lines: Lines, codec: str) -> float | None:
        against = measured.get((codec, lines))
        if against is None:
            return None
        pairs = zip(found, against, strict=True)
        return round(statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs), 3)

    rows: list[dict[str, Any]] = []
    for (codec, lines), found in measured.items():
        run = runs[codec][lines]
        rows.append(
            {
                "lines": lines.name,
                "rtt_ms": round(1e3 * lines.rtt_s, 3),
                "codec": codec,
                "planned": words(run.codec, run.S - 1) if codec == ADAPTED else "",
                "tokens_per_s": round(statistics.median(each.tokens_per_s for each in found), 1),
                "busy": round(statistics.median(each.busy for each in found), 3),
                "to_none": ratio(found, lines, "none"),
                "to_bf16": ratio(found, lines, "bf16"),
                "wire": round(statistics.median(each.wire for each in found), 4),
                "windows": [each.window for each in found],
                "all_tokens_per_s": [round(each.tokens_per_s, 1) for each in found],
            }
        )
    return rows


def markdown(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """As Markdown: a line for each of the lines, tokens/s (busy) by codec, and what AdaTopK is worth."""
    codecs = list(dict.fromkeys(row["codec"] for row in rows))
    heads = [*codecs, f"{codecs[-1]} ÷ none", "÷ bf16"]
    yield f"| Mbit/s | round trip, ms | {' | '.join(heads)} |"
    yield "|---" * (2 + len(heads)) + "|"
    for lines, rtt_ms in dict.fromkeys((row["lines"], row["rtt_ms"]) for row in rows):
        of = {row["codec"]: row for row in rows if (row["lines"], row["rtt_ms"]) == (lines, rtt_ms)}
        cells = [f"{row['tokens_per_s']:,.0f} ({100 * row['busy']:.0f} %)" for row in of.values()]
        last = of[codecs[-1]]
        ratios = ["" if last[key] is None else f"{last[key]:.2f}" for key in ("to_none", "to_bf16")]
        if last["planned"]:
            cells[-1] += f" {last['planned']}"
        yield f"| {lines} | {rtt_ms:g} | {' | '.join([*cells, *ratios])} |"


# --- the program ---


def bench(options: argparse.Namespace) -> list[dict[str, Any]]:
    import uvloop

    sizes = Sizes(options.stages, options.replicas, options.job, tuple(options.window))
    base = base_run(options)
    lines = [
        Lines(None if name == MIXED else float(name), rtt / 1e3)
        for name in options.lines
        for rtt in options.rtt
    ]
    runs = manifests(base, lines, options.codec, sizes, options.keep)
    swarms: dict[Run, list[Lines]] = {}
    for of in runs.values():
        for each, run in of.items():
            if each not in swarms.setdefault(run, []):
                swarms[run].append(each)
    steps_s = sum(least_step_s(run, each, sizes) for run, of in swarms.items() for each in of)
    least_s = options.rounds * ((options.steps + 1) * len(sizes.windows) * steps_s + START_S * len(swarms))
    say(f"{len(swarms)} manifests in {options.rounds} rounds: at least {least_s / 60:.0f} minutes")
    measured: dict[tuple[str, Lines], list[Found]] = {
        (codec, each): [] for each in lines for codec in options.codec
    }
    with Lab(role_names(options.stages, options.replicas), queue_s=QUEUE_S) as lab:
        for number in range(options.rounds):
            order = list(swarms) if number % 2 == 0 else list(reversed(swarms))
            found: dict[Run, dict[Lines, Found]] = {}
            for run in order:
                began = time.monotonic()
                found[run] = uvloop.run(measure(lab, run, swarms[run], sizes, options.steps))
                speeds = [f"{each.tokens_per_s:,.0f}" for each in found[run].values()]
                took_s = time.monotonic() - began
                say(f"round {number}, {words(run.codec, run.S - 1)}: {' '.join(speeds)}; {took_s:.0f} s")
            for (codec, each), so_far in measured.items():
                so_far.append(found[runs[codec][each]][each])
    return rows_of(measured, runs)


def bench_simulated(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each of the lines: what AdaTopK's codecs come to, against the best of the others."""
    sizes = Sizes(options.stages, options.replicas, options.job, tuple(options.window))
    base, rows = base_run(options), list[dict[str, Any]]()
    others = [codec_spec(codec) for codec in options.codec if codec != ADAPTED]
    for name in options.lines:
        for rtt in options.rtt:
            lines = Lines(None if name == MIXED else float(name), rtt / 1e3)
            spec = adapted(base, lines, sizes, options.keep)
            chosen = simulated(replace(base, codec=spec), lines, sizes)
            best = max(simulated(replace(base, codec=other), lines, sizes) for other in others)
            rows.append(
                {
                    "lines": lines.name, "rtt_ms": rtt, "planned": words(spec, base.S - 1),
                    "tokens_per_s": round(chosen), "best": round(best), "to_best": round(chosen / best, 3),
                }
            )  # fmt: skip
    return rows


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _lines(text: str) -> str:
    if text != MIXED and not 0 < float(text) < math.inf:
        raise ValueError
    return text


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--lines", nargs="+", type=_lines, default=["8", "50", "200", MIXED], metavar="MBIT",
        help=f"Mbit/s of each host, or {MIXED} (default: 8 50 200 {MIXED})",
    )  # fmt: skip
    parser.add_argument(
        "--rtt", nargs="+", type=float, default=[0.0, 50.0, 200.0], metavar="MS", help="(default: 0 50 200)"
    )
    parser.add_argument(
        "--codec", nargs="+", default=list(CODECS), metavar="CODEC",
        help=f"one for all boundaries, one for each with commas between, or {ADAPTED} "
        f"(default: {' '.join(CODECS)})",
    )  # fmt: skip
    parser.add_argument(
        "--keep",
        type=float,
        default=0.05,
        metavar="R",
        help=f"the least that {ADAPTED} keeps (default: 0.05)",
    )
    parser.add_argument("--stages", type=int, default=3, help="(default: 3)")
    parser.add_argument("--replicas", type=int, default=1, help="of each stage (default: 1)")
    parser.add_argument("--job", type=_positive, default=0.04, metavar="S", help="seconds (default: 0.04)")
    parser.add_argument("--hidden", type=int, default=128, help="(default: 128)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default: 8)")
    parser.add_argument(
        "--window",
        nargs="+",
        type=int,
        default=[4, 8],
        help="microbatches in flight, the best of (default: 4 8)",
    )
    parser.add_argument("--steps", type=int, default=2, help="of a measurement (default: 2)")
    parser.add_argument("--rounds", type=int, default=2, help="(default: 2)")
    parser.add_argument("--simulated", action="store_true", help="no processes: AdaTopK against the others")
    options = parser.parse_args(arguments)
    if options.stages < 2 or min(options.replicas, options.steps, options.rounds, *options.window) < 1:
        parser.error(
            "there must be two stages, a replica of each, a step, a round and a window of 1 at least"
        )
    try:
        for codec in options.codec:
            if codec != ADAPTED:
                replace(base_run(options), codec=codec_spec(codec))
        adapted(base_run(options), Lines(1.0, 0.0), Sizes(options.stages, 1, options.job, (1,)), options.keep)
    except SetupError as error:
        parser.error(error.text)
    return options


def main() -> int:
    options = parse()
    if options.simulated:
        rows = bench_simulated(options)
        report(rows, tuple(rows[0]), f"{machine()}; {time.strftime('%Y-%m-%d')}; simulated")
        return 0
    if why_not():
        print(f"no lines to shape: a network lab {why_not()}", file=sys.stderr)
        return 1
    rows = bench(options)
    print("\n".join(markdown(rows)))
    title = f"{machine()}; {time.strftime('%Y-%m-%d')}; slow_links.py {' '.join(sys.argv[1:])}"
    report(rows, COLUMNS, title)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # everything is ended by then
        sys.exit("stopped")
