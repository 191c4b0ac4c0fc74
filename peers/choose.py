"""Which stage a newcomer serves that leaves the choice to us (`--stage auto`)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from peers.job import even_job, job_of
from peers.ports import Directory, Transport
from peers.whereabouts import measure_place
from swarm.ids import PeerId, Stage
from swarm.plan.advice import Newcomer, choose_stages
from swarm.plan.network import Job
from swarm.plan.places import Place, read_place
from swarm.records import NO_STAGE, PeerRecord
from swarm.run import Run

MOST_OTHERS = 64
"""That a newcomer places before itself: strangers may claim to choose as many as they like."""
OTHERS_S = 1.0
"""So long a newcomer waits for the records of others that came in the same instant."""


async def choose_stage(
    me: PeerId, run: Run, transport: Transport, directory: Directory, addresses: Sequence[str]
) -> tuple[Stage, Place | None]:
    """The stage, and where this peer is, as far as it could be measured.

    It says first that it is choosing, and looks who else is: they place one another, in the order of their
    ids, by the same rule. So ten that start together do not all go to the stage that was slowest before
    they came.
    """
    place = await measure_place(me, run.id, transport, await directory.survey(), random.Random())

    async def say(stage: Stage) -> None:
        await directory.announce(
            PeerRecord(
                peer=me,
                run=run.id,
                stage=stage,
                state="choosing" if stage == NO_STAGE else "joining",
                version=0,
                place=() if place is None else place.numbers(),
                addresses=tuple(addresses),
                since=time.time(),
            )
        )

    await say(NO_STAGE)
    await asyncio.sleep(OTHERS_S)
    records = await directory.survey()
    job = await asyncio.to_thread(planning_job, run)
    others = sorted(r.peer for r in records if r.state == "choosing" and r.peer != me)[:MOST_OTHERS]
    places = {r.peer: read_place(r.place) for r in records}
    newcomers = [Newcomer(me, place), *(Newcomer(peer, places[peer]) for peer in others)]
    stage = (await asyncio.to_thread(choose_stages, records, job, newcomers))[me]
    await say(stage)  # who chooses after this counts us there
    return stage, place


def planning_job(run: Run) -> Job:
    """What the planner reckons with; only of the decoder it is known what a stage has to do."""
    return job_of(run) if run.model.kind == "gpt" else even_job(run)
