"""Throughput under rules of rebalancing, ÷ that of the best assignment at every instant, on spot traces.

    python scripts/bench/rebalance.py                       # all traces in ../shared/data/traces; two minutes
    python scripts/bench/rebalance.py --download-s 30 --seeds 5 my-trace.json

The table of SWARM (Ryabinin et al. 2023, section 4.4), whose own simulation has 82.7 % without rebalancing,
95.8 % with T = 300 s and 97.6 % with T = 60 s, on a trace of its own with more instances. Here as there:
4 stages, peers that are alike, a run as fast as its slowest stage, moves that take no time (`--download-s`
gives them one). `ours` is `swarm/policy/rebalance.py`, `paper` its Algorithm 2, moving only where the gap is
at least two peers; `paper, as written` moves whenever two stages differ.

Joiners go to the stage of greatest need under all rules. `in turn`: of several that come at once each sees
those before it. `blind`: none does, so that they spread by chance, which rebalancing has to mend.

Left out are instants with fewer peers than stages: the best assignment does nothing then either. `first hour`
and `last hour` are of the rest. `downloads`: states of one stage fetched by who moved; joiners' are not in
it, they are the same for all rules. Means over seeds (victims, chance of joiners, phase of the periods);
`worst` is the worst seed. A trace of less than two days has ten times as many seeds: it has few deaths.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import machine, report
from stage_speeds import Outcome, Rule, ours, papers, run_trace

from swarm.errors import SetupError
from swarm.sim.trace import Trace, read_trace

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
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
    text, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=text, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="*", type=Path, help=f"files (default: those in {TRACES.name})")
    parser.add_argument("--stages", type=int, default=4, help="(default: 4)")
    parser.add_argument("--seeds", type=int, default=10, help="(default: 10)")
    parser.add_argument("--download-s", type=float, default=0.0, help="of a stage's state (default: 0)")
    parser.add_argument("--quick", action="store_true", help="one seed")
    options = parser.parse_args(arguments)
    options.traces = options.traces or sorted([*TRACES.glob("*.json"), *TRACES.glob("*.csv")])
    if options.quick:
        options.seeds = 1
    if options.stages < 1 or options.seeds < 1 or options.download_s < 0:
        parser.error("--stages and --seeds are at least 1, --download-s at least 0")
    if not options.traces:
        parser.error("no traces: name files, or put them into ../shared/data/traces")
    return options


def main() -> None:
    options = parse()
    try:
        traces = {path.stem: read_trace(path.read_text(), path.name) for path in options.traces}
    except (SetupError, OSError) as error:
        sys.exit(f"error: {error}")
    rows = bench(options, traces)
    print(f"{machine()}; {time.strftime('%Y-%m-%d')}; rebalance.py {' '.join(sys.argv[1:])}")
    report(rows, COLUMNS, "throughput ÷ that of the best assignment at every instant")


if __name__ == "__main__":
    main()
