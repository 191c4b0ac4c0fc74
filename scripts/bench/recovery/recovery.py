"""How long a swarm takes to notice a fault, and to be as fast again as those who are left can be.

    python scripts/bench/recovery/recovery.py                     # every kind, 3 rounds; a quarter of an hour
    python scripts/bench/recovery/recovery.py --only kill --rounds 10
    python scripts/bench/recovery/recovery.py --quick             # one round, shorter measurements

3 stages × 3 peers train a small model; as root, on hosts of their own with 5 ms between them (`netlab.py`).
The trainer tells when each microbatch is done. In a round one thing happens:

    kill   SIGKILL of a peer
    hang   SIGSTOP of a peer, for the rest of the round
    cut    a peer's cable is pulled, for the rest of the round
    join   a peer starts, in a stage that has two
    move   two of a stage's three peers are killed; another stage's peer decides to go there

`detected_s`: until the first program says that the peer is lost. `recovered_s`: until a window of two steps
begins that is 95 % as fast as the end of the round, when everything has settled: what the remaining peers
can give; work that is run again is work. `control_s`: what the same measure says before the fault, where
nothing happened. `lost_s`: what the whole round lost against the settled speed, where work that is run again
is none. `pass_s`: one microbatch through the pipeline, the median before the fault. A move counts from the
decision; its download is `download_s`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from peers import events
from scripts.bench.common.arguments import parser_of
from scripts.bench.common.netlab import Lab, Link, why_not
from scripts.bench.recovery.chaos import ChaosSwarm, chaos_run, speaker
from swarm.ids import Stage
from swarm.manifest import Run
from tests.process.swarm_processes import Program

KINDS = ("kill", "hang", "cut", "join", "move")
SHARE = 0.95
"""Of the settled speed, for a swarm that has recovered."""
SETTLED = 0.5
"""The last part of a round is taken as settled."""
COLUMNS = (
    "kind", "stage", "detected_s", "recovered_s", "control_s", "lost_s", "pass_s", "step_s", "before_per_s",
    "after_per_s", "back_s", "download_s", "target",
)  # fmt: skip


def recovery_run(microbatches: int = 24) -> Run:
    """The small model of the chaos test, with other steps."""
    return replace(chaos_run(microbatches=microbatches), name="recovery")


# --- what a list of moments says ----------------------------------------------------------------------------


def rate(done: Sequence[float], start: float, end: float) -> float:
    """Microbatches per second in [start, end); `done` is sorted."""
    return (bisect_left(done, end) - bisect_left(done, start)) / (end - start)


def recovered_s(done: Sequence[float], fault: float, end: float, *, window_s: float, per_s: float) -> float:
    """Seconds from `fault` until a window begins that is `SHARE` as fast as `per_s`; all if none is."""
    moments = [fault, *(at for at in done if fault < at <= end - window_s)]
    for at in moments:
        if rate(done, at, at + window_s) >= SHARE * per_s:
            return at - fault
    return end - fault


def control_s(done: Sequence[float], start: float, end: float, *, window_s: float) -> float:
    """What `recovered_s` finds where nothing happened: the median over moments in the first half of the time.

    So much of a result is the measure: a window is rarely just as fast as all of them together.
    """
    per_s = rate(done, start, end)
    moments = [start + i * (end - start) / 40 for i in range(20)]
    return statistics.median(recovered_s(done, at, end, window_s=window_s, per_s=per_s) for at in moments)


@dataclass(frozen=True)
class Done:
    """A microbatch's loss came back to the trainer."""

    at: float
    """Unix seconds."""
    took_s: float
    t: int
    m: int
    again: bool = False
    """It was done before; a peer died with it."""


# --- the trainer that tells everything ----------------------------------------------------------------------


class Feed:
    """A trainer in a process of its own, in a host of its own; it tells when each microbatch is done."""

    def __init__(self, swarm: ChaosSwarm) -> None:
        self.done: list[Done] = []
        self.events: list[events.Event] = []
        host = swarm.free_host()
        lab = swarm.lab
        with lab.inside(host) if lab is not None else nullcontext():
            self._process = subprocess.Popen(
                [
                    sys.executable, __file__, "--feed", lab.ip(host) if lab is not None else "127.0.0.1",
                    *swarm.membership(),
                ],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
        self._seen: set[tuple[int, int]] = set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = events.parse_event(line)
            if event is not None:
                self.events.append(event)
                continue
            done = Done(**json.loads(line))
            self.done.append(replace(done, again=(done.t, done.m) in self._seen))
            self._seen.add((done.t, done.m))

    def close(self) -> None:
        """It leaves."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(10)
        self._process.stdout.close()


class _Telling:
    """A transport that prints when a microbatch is done."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.peer_id, self.signer, self.serve = inner, inner.peer_id, inner.signer, inner.serve

    async def call(self, peer: str, method: str, header: bytes, *rest: Any, **named: Any) -> Any:
        from swarm.wire.messages import Work, WorkDone, unpack, unpack_answer

        began = time.monotonic()
        answer = await self._inner.call(peer, method, header, *rest, **named)
        if method == "work":
            asked = unpack(header, Work)
            unpack_answer(peer, answer.header, WorkDone)  # raises if it is no loss
            took_s = time.monotonic() - began
            told = {"at": time.time(), "took_s": round(took_s, 5), "t": asked.t, "m": asked.m}
            print(json.dumps(told), flush=True)
        return answer


async def feed(host: str, run_id: str, join: Sequence[str], window: int) -> None:
    """Train until standard input ends."""
    from peers.events import Emitter
    from peers.net.node import Node
    from peers.net.p2pd import DaemonOptions
    from peers.storage.dataset import open_dataset
    from peers.trainer import Trainer, TrainerSettings

    async with Node(options=DaemonOptions(host=host), join=join, run_id=run_id) as node:
        run = await node.directory.fetch_manifest(run_id)
        transport: Any = _Telling(node.transport)
        settings = TrainerSettings(window=window)
        trainer = Trainer(run, open_dataset(run), transport, node.directory, settings, Emitter("json"))
        asyncio.get_running_loop().add_reader(0, trainer.leave)
        await trainer.run()


# --- rounds -------------------------------------------------------------------------------------------------


class Rounds:
    """One swarm, and one thing after the other that happens to it."""

    def __init__(
        self, swarm: ChaosSwarm, feed: Feed, *, replicas: int, before_s: float, after_s: float
    ) -> None:
        self._swarm, self._feed, self._replicas = swarm, feed, replicas
        self._before_s, self._after_s = before_s, after_s

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._swarm.listen(0.05)
            self._swarm.assert_none_ended()

    def make_whole(self) -> None:
        """All peers are there, and step."""
        swarm = self._swarm
        swarm.peers(self._replicas)
        now = self._version()
        for stage in range(swarm.run.S):
            for peer in swarm.serving(stage):
                swarm.until(
                    lambda peer=peer: any(e.t > now + 1 for e in peer.heard(events.Stepped)),
                    f"{peer.name} takes no step",
                )
        self.wait(3.0)

    def _version(self) -> int:
        return max((event.t for event in self._feed.events if isinstance(event, events.StepDone)), default=0)

    def play(self, kind: str, stage: Stage) -> dict[str, Any]:
        """One round; the swarm has to be whole."""
        swarm, lab = self._swarm, self._swarm.lab
        members = swarm.serving(stage)
        if kind == "join":
            swarm.kill(members[-1])
        self.wait(self._before_s)
        victim = members[0]
        began = time.time()
        if kind == "kill":
            swarm.kill(victim)
        elif kind == "hang":
            victim.stop()
        elif kind == "cut":
            assert lab is not None
            lab.cut(victim.host)
        elif kind == "join":
            victim = swarm.peer(stage)
        else:
            victim, began = self._until_moved(stage)
        self.wait(self._after_s)
        row = self._row(kind, stage, victim, began, time.time())
        if kind in ("hang", "cut"):
            healed = time.time()
            if kind == "hang":
                victim.cont()
            elif lab is not None:
                lab.heal(victim.host)
            row["back_s"] = self._back_s(victim, healed)
        return row

    def _until_moved(self, stage: Stage) -> tuple[Program, float]:
        """All but one peer of the stage die; who goes there, and when it decided to."""
        swarm, began = self._swarm, time.time()
        swarm.kill(*swarm.serving(stage)[1:])

        def moved() -> list[tuple[Program, events.Moved]]:
            return [
                (p, e) for p in swarm.programs for e in p.heard(events.Moved)
                if e.at > began and e.to_stage == stage
            ]  # fmt: skip

        swarm.until(lambda: moved(), f"nobody moves to stage {stage}")
        program, event = moved()[0]
        return program, event.at

    def _back_s(self, victim: Program, healed: float) -> float:
        """Until it takes a step with the others."""
        now = self._version()

        def steps() -> list[float]:
            return [e.at for e in victim.heard(events.Stepped) if e.at > healed and e.t >= now]

        self._swarm.until(lambda: steps(), f"{victim.name} takes no step after it was healed")
        return round(steps()[0] - healed, 3)

    def _row(self, kind: str, stage: Stage, victim: Program, fault: float, end: float) -> dict[str, Any]:
        done = sorted(one.at for one in self._feed.done)
        progress = sorted(one.at for one in self._feed.done if not one.again)
        before = [one for one in self._feed.done if fault - self._before_s <= one.at < fault]
        stepped = [e.at for e in self._feed.events if isinstance(e, events.StepDone) and e.at < fault][-20:]
        step_s = (stepped[-1] - stepped[0]) / (len(stepped) - 1)
        after_per_s = rate(done, end - SETTLED * (end - fault), end)
        window_s = max(1.0, 2 * step_s)
        lost = sorted(
            event.at - fault
            for source in [self._feed.events, *(program.events for program in self._swarm.programs)]
            for event in source
            if isinstance(event, events.PeerLost) and event.peer == victim.peer_id and event.at >= fault
        )
        row: dict[str, Any] = {
            "kind": kind,
            "stage": stage,
            "detected_s": round(lost[0], 3) if lost and kind in ("kill", "hang", "cut") else None,
            "recovered_s": round(recovered_s(done, fault, end, window_s=window_s, per_s=after_per_s), 3),
            "control_s": round(control_s(done, fault - self._before_s, fault, window_s=window_s), 3),
            "lost_s": round((end - fault) * (1 - rate(progress, fault, end) / after_per_s), 3),
            "pass_s": round(statistics.median(one.took_s for one in before), 4),
            "step_s": round(step_s, 3),
            "before_per_s": round(len(before) / self._before_s, 2),
            "after_per_s": round(after_per_s, 2),
            "curve_per_s": [
                round(rate(done, fault + 0.5 * i, fault + 0.5 * i + 0.5), 1)
                for i in range(-int(2 * self._before_s), int(2 * self._after_s))
            ],
        }
        fetched = [e for e in victim.heard(events.StateFetched) if e.at >= fault]
        served = [e.at - fault for e in victim.heard(events.Serving) if e.at >= fault]
        if kind in ("join", "move"):
            row["download_s"] = round(fetched[0].seconds, 3) if fetched else None
            row["serves_s"] = round(served[0], 3) if served else None
        row["target"] = target(row)
        return row


def target(row: dict[str, Any]) -> str:
    """`met`, or what was not."""
    missed = []
    detected, limit_s = row["detected_s"], {"kill": 1.0, "hang": 5.0, "cut": 5.0}.get(row["kind"])
    if limit_s is not None and (detected is None or detected >= limit_s):
        missed.append(f"detected in {limit_s:.0f} s")
    if row["kind"] == "kill" and row["recovered_s"] > (detected or 0.0) + 2 * row["pass_s"]:
        missed.append("recovered in 2 passes")
    if row["kind"] == "move" and row["recovered_s"] > 10.0 + (row["download_s"] or 0.0):
        missed.append("recovered in 10 s + download")
    return "not " + ", not ".join(missed) if missed else "met"


def measure(
    kinds: Sequence[str], *, rounds: int, before_s: float, after_s: float, say: Any, replicas: int = 3,
    microbatches: int = 24, job_s: float = 0.0,
) -> list[dict[str, Any]]:  # fmt: skip
    """`rounds` of each kind, in turn, in one swarm whose forwards and backwards take `job_s` at least."""
    rows: list[dict[str, Any]] = []
    lab = None if why_not() else Lab([f"h{i}" for i in range(20)], link=Link(delay_s=0.005), queue_s=1.0)
    with lab if lab is not None else nullcontext(), tempfile.TemporaryDirectory() as folder:
        with ChaosSwarm(Path(folder), recovery_run(microbatches), lab=lab) as swarm:
            swarm.job_s = job_s
            swarm.bootstrap()
            if "move" in kinds:
                swarm.peers(2)
                for _ in range(swarm.run.S):
                    swarm.roaming_peer()
                swarm.all_serve()
            swarm.peers(replicas)
            feeding = Feed(swarm)
            try:
                play = Rounds(swarm, feeding, replicas=replicas, before_s=before_s, after_s=after_s)
                for number in range(rounds):
                    for kind in kinds:
                        play.make_whole()
                        stage = (number + kinds.index(kind)) % swarm.run.S
                        row = play.play(kind, stage)
                        rows.append(row)
                        say(json.dumps({k: v for k, v in row.items() if k != "curve_per_s"}))
            finally:
                feeding.close()
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For people."""
    cells = [[c.replace("_", " ") for c in COLUMNS]]
    cells += [["–" if row.get(c) is None else str(row[c]) for c in COLUMNS] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--only", action="append", default=[], choices=KINDS, help="repeatable")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind (default: 3)")
    parser.add_argument("--before", type=float, default=10.0, help="seconds before a fault (default: 10)")
    parser.add_argument("--after", type=float, default=30.0, help="seconds after it (default: 30)")
    parser.add_argument("--quick", action="store_true", help="one round, 5 s before and 15 s after")
    parser.add_argument("--json", action="store_true", help="the JSON line only, without the table")
    parser.add_argument("--feed", metavar="IP", help=argparse.SUPPRESS)
    parser.add_argument("--window", type=int, default=8, help="microbatches in flight (default: 8)")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--join", action="append", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.quick:
        args.rounds, args.before, args.after = 1, 5.0, 15.0
    return args


def main() -> int:
    args = parse()
    if args.feed:
        import uvloop

        uvloop.run(feed(args.feed, args.run, args.join, args.window))
        return 0
    kinds = tuple(kind for kind in KINDS if not args.only or kind in args.only)
    if why_not():
        print(f"no cables to pull: a network lab {why_not()}", file=sys.stderr)
        kinds = tuple(kind for kind in kinds if kind != "cut")
    rows = measure(kinds, rounds=args.rounds, before_s=args.before, after_s=args.after, say=speaker())
    if not args.json:
        print(table(rows))
    print(json.dumps({"rows": rows}), flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # everything is ended by then
        sys.exit("stopped")
