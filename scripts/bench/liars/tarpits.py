"""Peers that hold a run up, in swarms of the shipped classes in virtual time: how long 20 steps last longer.

    python scripts/bench/liars/tarpits.py           all ways, one tarpit and three, each in 3 runs
    python scripts/bench/liars/tarpits.py --way "never answers" --tarpits 1 --seeds 1
    scripts/bench/liars/tarpits.py | scripts/bench/tables.py --store liars --command "THIS COMMAND"

3 stages of 2 honest replicas, 8 microbatches a step. A tarpit is one more replica of the middle stage, or
of each stage, from the first step on: it lives, announces itself, and does all else as it should, but for
one thing. With `--honest-for 25` it does all as it should for so many steps, and has voice by then; with
`--first` its id is the smallest, so it coordinates its stage before others. What counts is by how much
longer the run takes than without tarpits; each microbatch must have counted once in each step at each
honest replica. The goal: one identity costs at most 30 s in 20 steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from peers.ports import Answer, Request
from peers.sim.loop import run_virtual
from peers.stage.server import StagePeer
from swarm.errors import Busy
from swarm.ids import PeerId
from swarm.manifest import audit_run
from swarm.protocol.replica import BeginAllReduce
from tests.peers.admitted import TRAINER, admitting
from tests.peers.loops import Swarm, swarm
from tests.peers.tarpits import (
    answer_late,
    answer_parts_late,
    begin_rounds_late,
    check_late,
    coordinate_late,
    never_answered,
    send_no_part,
    trickle,
    trickle_in_all,
)

STEPS, STAGES, MICROBATCHES = 20, 3, 8
GOAL_S = 30.0
PATIENCE_S = 4_000.0
"""A run that takes longer is given up, and counts as that long."""


Slow: TypeAlias = dict[PeerId, StagePeer]
Way: TypeAlias = Callable[[Swarm, Slow], None]


def silent(method: str) -> Way:
    """They answer no call of a method."""

    def begin(s: Swarm, slow: Slow) -> None:
        for name in slow:
            s.network.peers[name].transport.serve(method, never_answered, max_body_bytes=1 << 24)

    return begin


def late(by_s: float, blamed: int | None = None) -> Way:
    """They answer work truly, each time so much later; `blamed` as in `tests.peers.tarpits.answer_late`."""
    return partial(answer_late, by_s=by_s, blamed=blamed)


def busy(after_s: float) -> Way:
    """They have no room for work, for ever, and take so long to say so."""

    async def full(request: Request) -> Answer:
        await asyncio.sleep(after_s)
        raise Busy("8 microbatches are in flight; no more fit")

    def begin(s: Swarm, slow: Slow) -> None:
        for name in slow:
            s.network.peers[name].transport.serve("work", full, max_body_bytes=1 << 24)

    return begin


def each(act: Callable[..., None], *how: float) -> Way:
    """Each of them acts so."""

    def begin(s: Swarm, slow: Slow) -> None:
        for peer in slow.values():
            act(peer, *how)

    return begin


sends_no_part = each(send_no_part)


def starts_no_reduce(s: Swarm, slow: Slow) -> None:
    for peer in slow.values():

        def some(action: object, act: Callable[..., None] = peer.actions.act) -> None:
            if not isinstance(action, BeginAllReduce):
                act(action)

        peer.coordination.act = some


def by_name(act: Callable[..., None], *how: float) -> Way:
    """The same, of an act that needs the swarm."""

    def begin(s: Swarm, slow: Slow) -> None:
        for name in slow:
            act(s, name, *how)

    return begin


WAYS: dict[str, Way] = {
    "never answers": silent("work"),
    "answers 1 s late": late(1.0),
    "answers 4 s late": late(4.0),
    "answers 4 s late, says it had a queue": late(4.0, 0),
    "answers 4 s late, says the next one had": late(4.0, 1),
    "answers 20 s late": late(20.0),
    "busy at once": busy(0.0),
    "busy after 1.4 s": busy(1.4),
    "busy after 4 s": busy(4.0),
    "a byte a second": trickle,
    "250 bytes a second in all": trickle_in_all,
    "silent in held": silent("held"),
    "silent in part": silent("part"),
    "sends no part": sends_no_part,
    "starts no reduce": starts_no_reduce,
    "begins rounds 4.5 s late": each(begin_rounds_late, 4.5),
    "answers as an owner 4.5 s late": by_name(answer_parts_late, 4.5),
    "checks sums 4.5 s late": each(check_late, 4.5),
    "coordinates 2 s late": by_name(coordinate_late, 2.0),
}


async def lasts_s(
    way: str | None, tarpits: int, seed: int, honest_for: int, *, named: bool = False, steps: int = STEPS,
    first: bool = False, replicas: int = 2,
) -> float:  # fmt: skip
    """Seconds of `steps` steps, after those in which the tarpits are honest, at each honest peer. `named`: of
    a run that names its trainers: replicas have voice that these vouch for, and steps are signed. `first`:
    tarpits have the smallest ids, so they coordinate first. `replicas`: honest ones of each stage.
    """
    steps += honest_for
    run = replace(audit_run(stages=STAGES, steps=steps, microbatches_per_step=MICROBATCHES), seed=seed)
    # In float32 sums are checked, as in the runs that people start.
    run = admitting(replace(run, dtype="float32"), TRAINER) if named else run
    async with swarm(replace(run, name=f"tarpits {seed}"), seed=seed, replicas=replicas) as s:
        honest = list(s.peers)
        slow: Slow = {}
        if way is not None:
            stages = [1] if tarpits == 1 else range(tarpits)
            joined = {} if honest_for else {"joined_at": 1e12}
            letter = "a" if first else "z"
            slow = {f"{letter}{stage}": s.add_peer(f"{letter}{stage}", stage, **joined) for stage in stages}
            for peer in slow.values():
                peer.microbatches._left_out = tuple  # it takes work although it is told that it is left out
            if not honest_for:
                WAYS[way](s, slow)
        await s.until_serving()
        began = s.network.loop.now_s
        s.add_trainer(TRAINER)
        if honest_for:
            await s.until(
                lambda: all(s.peers[name].core.version >= honest_for for name in honest), limit_s=PATIENCE_S
            )
            began = s.network.loop.now_s
            if way is not None:
                WAYS[way](s, slow)
        last = 0.0

        def over() -> bool:
            nonlocal last
            last = s.network.loop.now_s - began
            return last >= PATIENCE_S or all(s.peers[name].core.version >= steps for name in honest)

        await s.until(over, limit_s=2 * PATIENCE_S)
        counts = s.count_matrix()
        assert last >= PATIENCE_S or all((counts[name] == steps).all() for name in honest), counts
        return last


@cache
def clean_s(seed: int, honest_for: int, named: bool, replicas: int) -> float:
    return run_virtual(lasts_s(None, 0, seed, honest_for, named=named, replicas=replicas))


def row(
    way: str, tarpits: int, seeds: int, honest_for: int, named: bool, first: bool, replicas: int
) -> dict[str, object]:
    lost_s = [
        run_virtual(lasts_s(way, tarpits, seed, honest_for, named=named, first=first, replicas=replicas))
        - clean_s(seed, honest_for, named, replicas)
        for seed in range(1, seeds + 1)
    ]
    return {
        "what": f"a run with {tarpits} tarpits: {way}" if tarpits > 1 else f"a run with a tarpit: {way}",
        "measured": ", ".join(f"{one_s + 0.0:.1f} s" for one_s in lost_s),
        "goal": f"{GOAL_S * tarpits:.0f} s",
        "missed": max(lost_s) > GOAL_S * tarpits,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", choices=list(WAYS), action="append", help="this one; may be repeated")
    several = "1: in the middle; 3: one in each stage"
    parser.add_argument("--tarpits", type=int, choices=(1, 3), action="append", help=several)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (%(default)s)")
    parser.add_argument(
        "--honest-for",
        type=int,
        default=0,
        help="steps that tarpits take part in as they should (%(default)s)",
    )
    parser.add_argument("--named", action="store_true", help="trainers are named, who vouch for peers")
    parser.add_argument(
        "--first", action="store_true", help="tarpits have the smallest ids: they coordinate first"
    )
    parser.add_argument("--replicas", type=int, default=2, help="honest ones in each stage (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = list[dict[str, object]]()
    for tarpits in options.tarpits or (1, 3):
        for way in options.way or WAYS:
            rows.append(
                row(
                    way, tarpits, options.seeds, options.honest_for, options.named, options.first,
                    options.replicas,
                )
            )  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
