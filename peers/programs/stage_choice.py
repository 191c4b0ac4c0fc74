"""Which stages: the one that a newcomer serves if it leaves the choice to us (`--stage auto`), and those that
an option can name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from msgspec.structs import replace

from peers.ports import Directory
from swarm.errors import SetupError
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.policy.rebalance import choose_stages
from swarm.records import NO_STAGE, PeerRecord

MAX_OTHERS = 64
"""That a newcomer places before itself: strangers may claim to choose as many as they like."""
OTHERS_S = 1.0
"""So long a newcomer waits for the records of others that came in the same instant."""


async def choose_stage(
    me: PeerId, run: Run, directory: Directory, addresses: Sequence[str], machine: str,
    allowed: Sequence[Stage] = (),
) -> Stage:  # fmt: skip
    """The stage that needs this peer most, of those that are allowed; none: of all.

    Those that choose at the same time place one another (docs/design.md, *Moving*). What others may serve is
    not known here: they are taken to be as this one, as cards of one kind are.
    """
    mine = PeerRecord(
        peer=me, run=run.id, stage=NO_STAGE, state="choosing", version=0, addresses=tuple(addresses),
        machine=machine, since=time.time(),
    )  # fmt: skip
    await directory.announce(mine)
    await asyncio.sleep(OTHERS_S)
    records = await directory.lookup_all()
    others = [r for r in records if r.state == "choosing" and r.peer != me]
    coming = [mine, *sorted(others, key=lambda r: r.peer)[:MAX_OTHERS]]
    now = time.time()
    stage = choose_stages(records, coming, stages=run.cells, depth=run.S, now_s=now, among=allowed)[me]
    await directory.announce(replace(mine, stage=stage, state="joining"))  # later ones count us there
    return stage


def unserved(records: Sequence[PeerRecord], run: Run, mine: Sequence[Stage] = ()) -> list[Stage]:
    """Stages that no peer serves, or is about to. `mine`: that of the one that asks."""
    there = {record.stage for record in records if record.state in ("joining", "serving", "paused")}
    return [stage for stage in range(run.cells) if stage not in there and stage not in mine]


def check_stages(option: str, given: Sequence[Stage], run: Run, *, cells: bool = False) -> None:
    """Raise SetupError if the run has no such stage. Below 0 counts from the end. `cells`: of all islands."""
    there, noun = (run.cells, "cells") if cells and run.cells > run.S else (run.S, "stages")
    for stage in given:
        if not -there <= stage < there:
            raise SetupError(f"{option} {stage}: run {run.name!r} has {noun} 0 to {there - 1}")
