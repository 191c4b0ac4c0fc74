"""100, 1 000 and 10 000 peers in 32 stages: an hour with churn, and what a decision costs by their number.

    python scripts/bench/wire/scale.py            # five minutes, one core
    python scripts/bench/wire/scale.py --quick    # 100 and 1 000 peers

`share` is the coarse simulation (`stage_speeds.py`): stage speeds and who moves, each decision
by the real `rebalance` and each joiner's stage by what the records say, but no microbatches. Of n peers, 20 %
an hour die at random times and as many join, each two minutes after a death; moves and joins take 30 s of
download. All begin at random stages, as peers that see nobody; who joins within the same 6 s sees none of the
others. `share` is throughput ÷ that of the best assignment at every instant, which is without downloads and
made of whole peers; `last_half` of the hour leaves out its unlevelled beginning. All of that with records
that are always fresh; `share_late`, `last_half_late` and `moves_late` with records as old as the directory
makes them.

Costs are measured CPU time, with the real classes:

    route_us      one `Router.route` in a stage of n / 32 peers, all with answers, and one `answered`
    rebalance_ms  one `rebalance` of n records, unlevelled; `level_ms`: where nobody needs to move
    choose_ms     one `choose_stages` of n records: where a joiner goes

The second table is the live directory (`directory.py` beside this file, with the meaning of its columns).

`visits_per_s` is the speed of the coarse simulation of 64 peers in 8 stages: microbatches of a stage, forward
and backward, in a second of a processor; `without_routing` leaves out what the Router takes of that.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from peers.sim.dice import Dice
from peers.sim.throughput.engine import simulate
from peers.sim.throughput.trainer import Trainer
from peers.sim.throughput.world import Peer, Settings
from scripts.bench.common.arguments import parser_of
from scripts.bench.common.harness import machine, report
from scripts.bench.recovery.stage_speeds import Fluid, ours
from scripts.bench.wire.directory import directory
from swarm.plan.network import Device, Network, StepWork
from swarm.policy.rebalance import choose_stages, is_due, rebalance
from swarm.policy.router import Router
from swarm.records import NO_STAGE, PeerRecord

STAGES = 32
HOUR_S = 3600.0
DIES = 0.2
"""Of all peers, in an hour."""
BACK_S = 120.0
BATCH_S = 6.0
DOWNLOAD_S = 30.0
PERIOD_S = 60.0
LOOK_S = 10.0
VIEWS = 8
COLUMNS = (
    "peers", "stages", "share", "last_half", "moves", "deaths", "route_us", "rebalance_ms", "level_ms",
    "choose_ms",
)  # fmt: skip


class Late:
    """What peers see of each other while it takes `lag_s` to read the whole directory.

    The parts of a picture are of different ages, up to that; which, is chance, for each peer and for each of
    the `VIEWS` pictures.
    """

    def __init__(self, lag_s: float) -> None:
        self._past: deque[dict[str, PeerRecord]] = deque(maxlen=1 + math.ceil(lag_s / LOOK_S))

    def look(self, swarm: Fluid) -> None:
        """To be called every `LOOK_S`."""
        self._past.appendleft({record.peer: record for record in swarm.records()})

    def going(self, swarm: Fluid) -> list[tuple[str, int]]:
        """Who moves where: each goes by its own picture, and only from where it is."""
        names = sorted(set().union(*self._past))
        found: list[tuple[str, int]] = []
        for view in range(VIEWS):
            ages = [zlib.crc32(f"{view} {name}".encode()) % len(self._past) for name in names]
            seen = [self._past[age].get(name) for name, age in zip(names, ages, strict=True)]
            for name, to_stage in ours([r for r in seen if r], STAGES, PERIOD_S, swarm.now_s):
                peer = swarm.peers.get(name)
                if peer is not None and zlib.crc32(name.encode()) % VIEWS == view and peer.stage != to_stage:
                    found.append((name, to_stage))
        return found


def hour(peers: int, *, moving: bool, lag_s: float = 0.0) -> dict[str, Any]:
    """The coarse hour."""
    late = Late(lag_s)
    dice, swarm, deaths = Dice(peers), Fluid(STAGES, load_s=DOWNLOAD_S), 0
    swarm.join((f"p{i:05d}" for i in range(peers)), dice, blind=True)
    events: list[tuple[float, str]] = [
        (PERIOD_S * (i + 0.5), "decide") for i in range(int(HOUR_S / PERIOD_S))
    ]
    if lag_s:
        events += [(LOOK_S * i, "a look") for i in range(int(HOUR_S / LOOK_S))]
    for _ in range(round(DIES * peers)):
        at_s = BATCH_S * dice.below(int(HOUR_S / BATCH_S))
        events += [(at_s, "die"), (at_s + BACK_S, "join")]
    made, half, coming = peers, 0, 0
    for at_s, what in sorted(events):
        if coming and (what != "join" or at_s > swarm.now_s):
            swarm.join((f"p{made + i:05d}" for i in range(coming)), dice, blind=True)
            made, coming = made + coming, 0
        if at_s >= HOUR_S:
            break
        if at_s >= HOUR_S / 2 and not half:
            swarm.pass_until(HOUR_S / 2)
            half = swarm.mark()
        swarm.pass_until(at_s)
        if what == "die":
            swarm.die([dice.pick(list(swarm.peers))])
            deaths += 1
        elif what == "join":
            coming += 1
        elif what == "a look":
            late.look(swarm)
        elif lag_s:
            if is_due(period_s=PERIOD_S, lag_s=lag_s, now_s=at_s):
                for name, to_stage in late.going(swarm):
                    swarm.move(name, to_stage)
        elif moving:
            for name, to_stage in ours(swarm.records(), STAGES, PERIOD_S, swarm.now_s):
                swarm.move(name, to_stage)
    swarm.pass_until(HOUR_S)
    return {
        "share": round(swarm.outcome().overall.share, 4),
        "last_half": round(swarm.since(half).share, 4),
        "moves": swarm.moves,
        "deaths": deaths,
    }


def cpu_s(what: Callable[[], object], least_s: float = 0.3) -> float:
    """CPU seconds of one call, of as many as take long enough."""
    times, began_s = 0, time.process_time()
    while (spent_s := time.process_time() - began_s) < least_s:
        what()
        times += 1
    return spent_s / times


def route_s(there: int) -> float:
    router, dice = Router(), Dice(there)
    names = [f"p{i:05d}" for i in range(there)]
    router.set_peers(0, names)
    for _ in range(6):
        for name in names:
            router.answered(0, name, dice.between(0.1, 0.4))

    def once() -> None:
        route = router.route(0, now=1.0, horizon_s=100.0)
        router.answered(0, route.peer, dice.between(0.1, 0.4))

    return cpu_s(once)


def records(peers: int, *, level: bool) -> list[PeerRecord]:
    dice = Dice(peers)
    return [
        PeerRecord(
            peer=f"p{i:05d}", run="r", stage=i % STAGES if level else dice.below(STAGES), state="serving",
            version=5, speed=1.0 if level else dice.between(0.5, 2.0), load=4.0, state_bytes=10**8,
            bandwidth_bps=1e8,
        )
        for i in range(peers)
    ]  # fmt: skip


def decisions(peers: int) -> dict[str, Any]:
    """What each of them costs."""
    uneven, level = records(peers, level=False), records(peers, level=True)

    def decide(found: list[PeerRecord]) -> object:
        return rebalance(found, stages=STAGES, period_s=PERIOD_S, now_s=1e6)

    def choose() -> object:
        newcomer = PeerRecord(peer="new", run="r", stage=NO_STAGE, state="choosing", version=0)
        return choose_stages(uneven, [newcomer], stages=STAGES, depth=STAGES, now_s=1e6)

    told = decide(uneven)
    return {
        "route_us": round(1e6 * route_s(max(1, peers // STAGES)), 1),
        "rebalance_ms": round(1e3 * cpu_s(lambda: decide(uneven)), 2),
        "moves_of_one": len(told.moves),
        "level_ms": round(1e3 * cpu_s(lambda: decide(level)), 2),
        "choose_ms": round(1e3 * cpu_s(choose), 2),
    }


def event_speed() -> dict[str, Any]:
    devices = tuple(Device(f"d{i}", 0, 1.0) for i in range(64))
    network = Network(devices, ("here",), np.array([[0.02]]), np.array([[1e9]]))
    job = StepWork(
        stages=8, microbatches=256, forward_flops=(0.1,) * 8, forward_bytes=(1e6,) * 7,
        backward_bytes=(1e6,) * 7, gradient_bytes=(1e8,) * 8, state_bytes=(0.0,) * 8,
        activation_bytes=(0.0,) * 8,
    )  # fmt: skip
    choose, routing_s = Trainer._route, 0.0

    def timed(self: Trainer, t: int, m: int) -> list[Peer]:
        """Adds up the CPU seconds of choosing routes."""
        nonlocal routing_s
        began_s = time.process_time()
        hops = choose(self, t, m)
        routing_s += time.process_time() - began_s
        return hops

    Trainer._route = timed
    try:
        began_s = time.process_time()
        layout = [i // 8 for i in range(64)]
        found = simulate(network, job, layout, end_s=600.0, settings=Settings(rebalance_every_s=0.0))
        took_s = time.process_time() - began_s
    finally:
        Trainer._route = choose
    return {
        "peers": 64,
        "stages": 8,
        "name": "coarse simulation",
        "visits": found.computed,
        "visits_per_s": round(found.computed / took_s),
        "without_routing": round(found.computed / (took_s - routing_s)),
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--peers", nargs="+", type=int, default=[100, 1000, 10_000])
    parser.add_argument("--quick", action="store_true", help="no more than 1 000 peers")
    options = parser.parse_args(arguments)
    if options.quick:
        options.peers = [100, 1000]
    if min(options.peers) < STAGES:
        parser.error(f"--peers: at least {STAGES}, one for each stage")
    return options


def main() -> None:
    options = parse()
    rows: list[dict[str, Any]] = []
    lists: list[dict[str, Any]] = []
    for peers in options.peers:
        still = hour(peers, moving=False)
        one = {"peers": peers, "stages": STAGES, **hour(peers, moving=True), **decisions(peers)}
        lists.append({"peers": peers, "stages": STAGES, **directory(peers, STAGES)})
        seen_late = hour(peers, moving=True, lag_s=lists[-1]["survey_s"])
        late = {f"{name}_late": seen_late[name] for name in ("share", "last_half", "moves")}
        rows.append({**one, **late, "share_without_moves": still["share"]})
    rows.append(event_speed())
    print(f"{machine()}; {time.strftime('%Y-%m-%d')}; scale.py {' '.join(sys.argv[1:])}")
    columns = [
        *COLUMNS,
        "share_late",
        "last_half_late",
        "moves_late",
        "share_without_moves",
        "visits_per_s",
        "without_routing",
    ]
    report(rows, columns, "an hour with churn, and the cost of decisions")
    report(lists, list(lists[0]), "the directory: what it costs a peer")


if __name__ == "__main__":
    main()
