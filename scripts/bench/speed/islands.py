"""What islands are worth on slow lines: tokens/s, bytes, and how much of the time trains.

    python scripts/bench/speed/islands.py --virtual                                   # ten minutes
    python scripts/bench/speed/islands.py --case 1 4/8/blockwise8 --lines 20          # as root; three minutes

Real processes (bootstrap, peers, a trainer), each on a host of its own (`netlab.py`) whose line has the
stated Mbit/s up and down, 5 ms from all others. A case is COUNT/LOCAL_STEPS/CODEC, or `1`: a run without
islands. All have as many peers, `--peers` for each stage: the islands divide them, and the microbatches of a
step, among themselves. COUNT/LOCAL_STEPS/CODEC/copies is plain DiLoCo: each peer is an island that has the
whole model, and a device takes as long for a microbatch as the stages do together.

Devices are slow ones, so that two cores can play several: a forward, a backward, and the two together in the
last stage, take `--job` seconds each; what is really computed takes a part of that. The model has few tokens
in a microbatch and wide layers, so that what is sent is weights.

With `--virtual` there are no processes but the classes that ship, in virtual time, over the same lines and
with the same devices, which do not wait for this machine's cores.

A swarm of processes goes through all lines, which change under it. With islands it takes on each as many
steps as lie between two meetings, and a meeting; without, a step that is not counted (in virtual time five),
then `--steps`. `busy` is the share of the time in which the devices of the busiest stage work; `trains` the
share that is no meeting. `bytes_weight_step` is what a peer sends to others of its stage, reports and
heartbeats included, for each weight of the stage and each step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from peers.events import Event, Serving, StepDone
from peers.islands.directory import split_cell
from peers.islands.trainers import IslandTrainers
from peers.sim.device import SimDevice
from peers.sim.dice import Dice
from peers.sim.directory import Dht, SimDirectory
from peers.sim.lines import Sent
from peers.sim.loop import Process, VirtualLoop
from peers.sim.network import Network, SimTransport
from peers.stage.server import StagePeer
from peers.stage.settings import StageSettings
from peers.trainer import TrainerSettings
from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import Segment, Swarm, bench_run, machine, report, role_names
from scripts.bench.common.host_lines import HostLines
from scripts.bench.common.netlab import Lab, Link, why_not
from scripts.bench.loss.islands_loss import islands_of
from scripts.bench.plan.validate import Case, Tokens, Unhurried, hosts_of
from swarm.manifest import IslandsSpec, Run
from swarm.model.layout import stage_layout
from swarm.plan.network import Network as Described

COLUMNS = ("mbit", "case", "tokens_per_s", "to_1", "bytes_weight_step", "trains", "busy")
CASES = (
    "1", "2/8/blockwise8", "2/32/blockwise8", "4/8/none", "4/8/blockwise8", "4/32/none", "4/32/blockwise8",
)  # fmt: skip
STAGES = 2
DELAY_S = 0.005
"""One way, between any two hosts."""
WARM_STEPS = 5
"""Of a run without islands in virtual time: until trainers and peers know each other's pace."""
QUEUE_S = 2.0
"""What waits longer for a line is dropped. Four replicas that all send to one another fill such a queue."""


@dataclass(frozen=True)
class Found:
    """One measurement."""

    tokens_per_s: float
    bytes_weight_step: float
    trains: float
    busy: float


COPIES = "/copies"
JOBS = 2 * STAGES - 1
"""Of a microbatch on all stages."""


@dataclass(frozen=True)
class Shape:
    """What a case is run with."""

    spec: IslandsSpec
    stages: int
    peers: int
    """Of each stage, of all islands."""
    job_s: float


def shape_of(case: str, options: argparse.Namespace) -> Shape:
    """What a case is run with: as many devices, which work as much for a microbatch."""
    spec = islands_of(case.removesuffix(COPIES))
    if case.endswith(COPIES):
        return Shape(spec, 1, STAGES * options.peers, JOBS * options.job)
    return Shape(spec, STAGES, options.peers, options.job)


def run_of(case: str, options: argparse.Namespace) -> Run:
    """The run of a case."""
    shape = shape_of(case, options)
    base = bench_run(
        stages=shape.stages, hidden=options.hidden, layers=STAGES * options.layers, codec="blockwise8",
        microbatches=options.microbatches, microbatch_size=1, sequence_length=16,
    )  # fmt: skip
    spec = shape.spec
    window = spec.local_steps + 1 if spec.count > 1 else 1
    model = replace(base.built_in, ffn_hidden=options.ffn)
    steps = base.steps // window * window
    return replace(base, name="islands", rebalance_every_s=0, steps=steps, model=model, islands=spec)


def found_in(segment: Segment, run: Run, stage_of: Mapping[str, int]) -> Found:
    """What some steps were like; `stage_of`: the stage of each role."""
    ends, times = [event.at for event in segment.events], len(segment.events)
    met = [run.meets_at(event.t) for event in segment.events]
    if any(met):
        seconds, steps = segment.seconds, times - sum(met)
        durations = [b - a for a, b in zip([ends[-1] - seconds, *ends], ends, strict=False)]
        local_s = [s for s, meets in zip(durations, met, strict=True) if not meets]
        trains, share = sum(local_s) / seconds, 1.0
    else:
        seconds, steps = ends[-1] - ends[0], times - 1
        trains, share = 1.0, steps / times
    stage_of_peer = {status.peer: stage_of[name] for name, status in segment.after.items()}
    sent = list[float]()
    busy: dict[int, list[float]] = {}
    for name, status in segment.after.items():
        before = {link.peer: link.bytes_out for link in segment.before[name].links}
        own = stage_of[name]
        sent.append(
            sum(
                link.bytes_out - before.get(link.peer, 0)
                for link in status.links
                if stage_of_peer.get(link.peer) == own
            )
            / (times * stage_layout(run, own).numel)
        )
        busy.setdefault(own, []).append(segment.busy_s[name] * share / seconds)
    return Found(
        tokens_per_s=steps * run.tokens_per_step / seconds,
        bytes_weight_step=statistics.fmean(sent),
        trains=trains,
        busy=max(statistics.fmean(of) for of in busy.values()),
    )


def lay(lab: Lab, mbit: float) -> None:
    """Lay lines of that many Mbit/s between all hosts; 0: as fast as they will."""
    for host in lab.hosts:
        lab.set_bandwidth(host, 1e6 * mbit)
    for a, b in combinations(lab.hosts, 2):
        lab.set_link(a, b, Link(delay_s=DELAY_S if mbit else 0.0))


class CountedLines(HostLines):
    """Lines that know what was sent."""

    def __init__(self, network: Described) -> None:
        super().__init__(network)
        self.sent_bytes = Counter[tuple[str, str]]()
        """By who sent it to whom."""

    def lasts_s(self, sent: Sent, dice: Dice) -> float:
        self.sent_bytes[sent.source, sent.destination] += sent.size_bytes
        return super().lasts_s(sent, dice)


class Virtual:
    """The classes that ship, in virtual time, on one of the lines."""

    def __init__(self, run: Run, mbit: float, shape: Shape, options: argparse.Namespace) -> None:
        self._run = run = replace(run, data=replace(run.data, tokens=1_000_000))
        self._replicas, window = shape.peers // run.islands.count, window_of(run)
        self._job_s = shape.job_s
        self._case = Case(run.cells, self._replicas, mbit, DELAY_S, window, max_inflight=window)
        self._loop, self._lines = VirtualLoop(lambda: 0.001), CountedLines(hosts_of(self._case))
        self._network, self._dht = Network(self._loop, Dice(1), self._lines), Dht(self._loop, Dice(2))
        self._peers: list[tuple[int, SimTransport, SimDevice]] = []
        """Of each its stage."""
        self._serving = 0
        """Peers that serve: the trainer begins when all do, as that of processes does."""
        self._ends: list[tuple[float, list[int], list[float]]] = []
        """Of each step: when it ended; what each peer had sent to others of its stage by then, and worked."""
        self._steps = run.islands.local_steps + 1 if run.islands.count > 1 else options.steps

    def _hear(self, event: Event) -> None:
        if isinstance(event, StepDone):
            stage_of = {transport.peer_id: stage for stage, transport, _ in self._peers}
            sent = [
                sum(
                    n
                    for (source, other), n in self._lines.sent_bytes.items()
                    if source == transport.peer_id and stage_of.get(other) == stage
                )
                for stage, transport, _ in self._peers
            ]
            self._ends.append((self._loop.now_s, sent, [device.busy_s for *_, device in self._peers]))

    def _hear_peer(self, event: Event) -> None:
        self._serving += isinstance(event, Serving)

    def _begin(self, host: int) -> None:
        process, cell = Process(f"h{host}"), host // self._replicas
        self._lines.device_of[process.name] = host
        transport, directory = self._network.add(process), SimDirectory(self._dht, process)
        if cell == self._run.cells:
            settings = TrainerSettings(window=self._case.window)
            trainers = IslandTrainers(
                self._run, Tokens(self._run), transport, directory, settings, self._hear
            )
            process.start(self._loop, trainers.run())
            return
        island, stage = split_cell(self._run, cell)
        device = SimDevice(Dice(host), self._job_s, spread=0.0)
        self._peers.append((stage, transport, device))

        async def serve() -> None:
            settings = StageSettings(max_inflight=self._case.max_inflight, joined_at=self._loop.unix_s())
            peer = StagePeer(
                island, stage, Unhurried(island, stage), transport, directory, settings,
                self._hear_peer, device=device,
            )  # fmt: skip
            transport.on_gone = peer.peer_gone
            await peer.run()

        process.start(self._loop, serve())

    def found(self) -> Found:
        """Of the steps after the first ones: with islands one of them is a meeting."""
        run, loop, first = self._run, self._loop, 0 if self._run.islands.count > 1 else WARM_STEPS
        steps, last = self._steps, first + self._steps
        with loop.running():
            count = run.cells * self._replicas
            for host in range(count):
                self._begin(host)
            assert loop.run(lambda: self._serving == count or bool(loop.bugs), limit_s=1e6)
            self._begin(count)
            taken = loop.run(lambda: len(self._ends) > last or bool(loop.bugs), limit_s=1e6)
            assert taken and not loop.bugs, f"{len(self._ends)} steps; {loop.bugs}"
        (began_s, sent_before, busy_before), (ended_s, sent, busy) = self._ends[first], self._ends[last]
        met = [t for t in range(first + 1, last + 1) if run.meets_at(t)]
        met_s = sum(self._ends[t][0] - self._ends[t - 1][0] for t in met)
        seconds = ended_s - began_s
        numel = [stage_layout(run, stage).numel for stage, *_ in self._peers]
        by_stage: dict[int, list[float]] = {}
        for (stage, *_), before, after in zip(self._peers, busy_before, busy, strict=True):
            by_stage.setdefault(stage, []).append((after - before) / seconds)
        return Found(
            tokens_per_s=(steps - len(met)) * run.tokens_per_step / seconds,
            bytes_weight_step=statistics.fmean(
                (b - a) / (steps * n) for a, b, n in zip(sent_before, sent, numel, strict=True)
            ),
            trains=1.0 - met_s / seconds,
            busy=max(statistics.fmean(of) for of in by_stage.values()),
        )


def window_of(run: Run) -> int:
    """Microbatches in flight: all of a step of an island."""
    return run.M // run.islands.count


async def measure(lab: Lab, run: Run, shape: Shape, options: argparse.Namespace) -> dict[float, Found]:
    """One swarm on each of the lines."""
    lay(lab, options.lines[0])  # a step on a faster one would leave measurements of that behind
    found: dict[float, Found] = {}
    spec = run.islands
    steps = spec.local_steps + 1 if spec.count > 1 else 1 + options.steps
    async with Swarm(
        run, replicas=shape.peers // spec.count, window=window_of(run), lab=lab,
        environment={"SWARM_JOB_S": str(shape.job_s)}, peer_arguments=["--max-inflight", str(window_of(run))],
    ) as swarm:  # fmt: skip
        stage_of = {role.name: (role.stage or 0) % run.S for role in swarm.peers}
        await swarm.train(1)  # connects, and allocates
        for mbit in options.lines:
            lay(lab, mbit)
            found[mbit] = found_in(await swarm.train(steps), run, stage_of)
        lay(lab, 0.0)  # they leave at once
    return found


Measured = Mapping[tuple[str, float], Sequence[Found]]
"""By case and line, one of each round."""


def rows_of(measured: Measured) -> list[dict[str, Any]]:
    """A row for each case on each line: medians, and of the ratio to `1` within a round."""
    rows: list[dict[str, Any]] = []
    for (case, mbit), found in sorted(measured.items(), key=lambda one: one[0][1]):
        plain = measured.get(("1", mbit), ())
        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(found, plain, strict=False)]
        medians = {
            name: statistics.median(getattr(each, name) for each in found)
            for name in ("tokens_per_s", "bytes_weight_step", "trains", "busy")
        }
        rows.append(
            {
                "mbit": mbit, "case": case, "tokens_per_s": round(medians["tokens_per_s"], 1),
                "to_1": round(statistics.median(ratios), 2) if ratios else None,
                "bytes_weight_step": round(medians["bytes_weight_step"], 4),
                "trains": round(medians["trains"], 3) if case != "1" else None,
                "busy": round(medians["busy"], 3),
            }
        )  # fmt: skip
    return rows


def bench(options: argparse.Namespace) -> list[dict[str, Any]]:
    import uvloop

    measured: dict[tuple[str, float], list[Found]] = {
        (case, mbit): [] for mbit in options.lines for case in options.case
    }
    for number in range(options.rounds):
        for case in options.case if number % 2 == 0 else reversed(options.case):
            run, shape, began = run_of(case, options), shape_of(case, options), time.monotonic()
            if options.virtual:
                found = {mbit: Virtual(run, mbit, shape, options).found() for mbit in options.lines}
            else:
                hosts = role_names(run.cells, shape.peers // run.islands.count)
                with Lab(hosts, queue_s=QUEUE_S) as lab:
                    found = uvloop.run(measure(lab, run, shape, options))
            for mbit, one in found.items():
                measured[case, mbit].append(one)
            told = ", ".join(f"{one.tokens_per_s:,.0f} at {mbit:g}" for mbit, one in found.items())
            took_s = time.monotonic() - began
            print(f"round {number}, {case}: {told}; {took_s:.0f} s", file=sys.stderr, flush=True)
    return rows_of(measured)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--case", nargs="+", default=list(CASES), help=f"(default: {' '.join(CASES)})")
    parser.add_argument(
        "--lines", nargs="+", type=float, default=[8.0, 20.0, 100.0, 200.0], metavar="MBIT",
        help="of each host (default: 8 20 100 200)",
    )  # fmt: skip
    parser.add_argument("--peers", type=int, default=4, help="of each stage, of all islands (default: 4)")
    parser.add_argument("--microbatches", type=int, default=32, help="of a step (default: 32)")
    parser.add_argument("--job", type=float, default=0.02, metavar="S", help="seconds (default: 0.02)")
    parser.add_argument("--layers", type=int, default=1, help="of each stage (default: 1)")
    parser.add_argument("--hidden", type=int, default=128, help="(default: 128)")
    parser.add_argument("--ffn", type=int, default=4096, help="(default: 4096)")
    parser.add_argument("--steps", type=int, default=8, help="without islands (default: 8)")
    parser.add_argument("--rounds", type=int, default=1, help="(default: 1)")
    parser.add_argument("--virtual", action="store_true", help="no processes")
    options = parser.parse_args(arguments)
    for case in options.case:
        shape = shape_of(case, options)
        if shape.peers % (count := shape.spec.count) or options.microbatches % count:
            parser.error(f"{case}: {count} islands must divide --peers and --microbatches")
    return options


def main() -> int:
    options = parse()
    if not options.virtual and why_not():
        print(f"no lines to shape: a network lab {why_not()}", file=sys.stderr)
        return 1
    title = f"{machine()}; {time.strftime('%Y-%m-%d')}; islands.py {' '.join(sys.argv[1:])}"
    report(bench(options), COLUMNS, title)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # everything is ended by then
        sys.exit("stopped")
