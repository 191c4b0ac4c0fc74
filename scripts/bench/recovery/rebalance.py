"""Throughput under rules of rebalancing, ÷ that of the best assignment at every instant, on spot traces.

    python scripts/bench/recovery/rebalance.py          # all traces in ../shared/data/traces; 2 minutes
    python scripts/bench/recovery/rebalance.py --download-s 30 --seeds 5 my-trace.json
    python scripts/bench/recovery/rebalance.py --made --seeds 20  # other traces, three hard kinds; 2 minutes

The table of SWARM (Ryabinin et al. 2023, section 4.4), whose own simulation has 82.7 % without rebalancing,
95.8 % with T = 300 s and 97.6 % with T = 60 s, on a trace of its own with more instances. Here as there:
4 stages, peers that are alike, a run as fast as its slowest stage, moves that take no time (`--download-s`
gives them one). `ours` is `swarm/policy/rebalance.py`, `paper` its Algorithm 2, moving only where the gap is
at least two peers; `paper, as written` moves whenever two stages differ.

Joiners go to the stage of greatest need under all rules. `in turn`: of several that come at once each sees
those before it. `blind`: none does, so that they spread by chance, which rebalancing has to mend.

Left out are instants with fewer peers than stages: the best assignment does nothing then either. `first hour`
and `last hour` are of the rest. `downloads`: states of one stage fetched by who moved; joiners' are not in
it, they are the same for all rules, nor is their time in what is possible. Means over seeds (victims, chance
of joiners, phase of the periods); `worst` is the worst seed. A trace of less than two days has ten times as
many seeds: it has few deaths.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from peers.sim.dice import Dice
from peers.sim.throughput.members import Trace, read_trace
from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import machine, report
from scripts.bench.recovery.stage_speeds import Outcome, Rule, ours, papers, run_trace
from swarm.errors import SetupError

SMALL, SLOW, HALF = "4 to 8 up", "downloads of 120 s", "60 % die at once"
"""Kinds of traces that are made: T4 instances come and go as fast, a few or with large states; a data centre
that takes most of its spot instances back in one instant."""
GAPS_S = (25.0, 4 * 3600.0)
"""From one change to the next, by chance on a logarithmic scale: as T4 instances of a day had it."""
TRACES = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"
RULES: tuple[tuple[str, Rule | None, float], ...] = (
    ("none", None, 60.0),
    ("paper", papers(eager=False), 300.0),
    ("ours", ours, 300.0),
    ("paper, as written", papers(eager=True), 60.0),
    ("paper", papers(eager=False), 60.0),
    ("ours", ours, 60.0),
)
SHORT_S = 2 * 86_400.0
COLUMNS = (
    "trace", "joiners", "rule", "period_s", "overall", "first_hour", "last_hour", "worst", "downloads",
    "standstill_s",
)  # fmt: skip


def row(name: str, joiners: str, rule: str, period_s: float, found: list[Outcome]) -> dict[str, Any]:
    def mean(values: list[float]) -> float:
        return round(sum(values) / len(values), 4)

    return {
        "trace": name,
        "joiners": joiners,
        "rule": rule,
        "period_s": None if rule == "none" else round(period_s),
        "overall": mean([one.overall.share for one in found]),
        "first_hour": mean([one.first_hour.share for one in found]),
        "last_hour": mean([one.last_hour.share for one in found]),
        "worst": round(min(one.overall.share for one in found), 4),
        "downloads": round(sum(one.moves for one in found) / len(found), 1),
        "rescues": round(sum(one.rescues for one in found) / len(found), 1),
        "standstill_s": round(sum(one.standstill_s for one in found) / len(found)),
        "hours": round(found[0].served_s / 3600, 1),
        "seeds": len(found),
    }


def made(kind: str, seed: int) -> Trace:
    """A trace of that kind, by the seed."""
    dice = Dice(seed)
    if kind == HALF:
        many = dice.between(40.0, 240.0)
        return Trace((0.0, 3600.0), (int(many), int(0.4 * many)), 7200.0)
    up = range(4, 9 if kind == SMALL else 13)
    times_s, counts = [0.0], [dice.pick(up)]
    while times_s[-1] < 43_200.0:
        gap_s = math.exp(dice.between(*map(math.log, GAPS_S)))
        times_s.append(times_s[-1] + gap_s)
        counts.append(dice.pick([count for count in up if count != counts[-1]]))
    return Trace(tuple(times_s), tuple(counts), times_s[-1] + 60.0)


def bench_made(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rules on traces that are made, a new one for each seed."""
    rows: list[dict[str, Any]] = []
    for kind, blind, load_s in ((SMALL, True, 0.0), (SLOW, False, 120.0), (HALF, False, 0.0)):
        for rule_name, rule, period_s in RULES:
            found = [
                run_trace(
                    made(kind, seed), rule, stages=options.stages, period_s=period_s, seed=seed,
                    load_s=load_s, blind=blind,
                )
                for seed in range(options.seeds)
            ]  # fmt: skip
            rows.append(row(kind, "blind" if blind else "in turn", rule_name, period_s, found))
    return rows


def bench(options: argparse.Namespace, traces: dict[str, Trace]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, trace in traces.items():
        for joiners in ("in turn", "blind"):
            for rule_name, rule, period_s in RULES:
                found = [
                    run_trace(
                        trace, rule, stages=options.stages, period_s=period_s, seed=seed,
                        load_s=options.download_s, blind=joiners == "blind",
                    )
                    for seed in range(options.seeds * (10 if trace.end_s < SHORT_S else 1))
                ]  # fmt: skip
                rows.append(row(name, joiners, rule_name, period_s, found))
    return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("traces", nargs="*", type=Path, help=f"files (default: those in {TRACES.name})")
    parser.add_argument("--stages", type=int, default=4, help="(default: 4)")
    parser.add_argument("--seeds", type=int, default=10, help="(default: 10)")
    parser.add_argument("--download-s", type=float, default=0.0, help="of a stage's state (default: 0)")
    parser.add_argument("--made", action="store_true", help="traces of three kinds that are made by seeds")
    parser.add_argument("--quick", action="store_true", help="one seed")
    options = parser.parse_args(arguments)
    options.traces = options.traces or sorted([*TRACES.glob("*.json"), *TRACES.glob("*.csv")])
    if options.quick:
        options.seeds = 1
    if options.stages < 1 or options.seeds < 1 or options.download_s < 0:
        parser.error("--stages and --seeds are at least 1, --download-s at least 0")
    if not options.traces and not options.made:
        parser.error("no traces: name files, or put them into ../shared/data/traces")
    return options


def main() -> None:
    options = parse()
    try:
        traces = {path.stem: read_trace(path.read_text(), path.name) for path in options.traces}
    except (SetupError, OSError) as error:
        sys.exit(f"error: {error}")
    rows = bench_made(options) if options.made else bench(options, traces)
    print(f"{machine()}; {time.strftime('%Y-%m-%d')}; rebalance.py {' '.join(sys.argv[1:])}")
    report(rows, COLUMNS, "throughput ÷ that of the best assignment at every instant")


if __name__ == "__main__":
    main()
