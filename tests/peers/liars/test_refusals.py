"""Whose refusals end a trainer: those of three peers with voice, and nobody's by a charter that they know.

Peers hear of a new charter one after the other, within 30 s. A trainer reads it itself, and ends by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

import pytest
import torch

from peers.events import Trouble
from peers.ports import Answer, Request
from swarm.errors import NotAdmitted, Refused, SwarmError
from swarm.manifest import audit_run
from swarm.records import PeerRecord
from tests.peers.loops import Swarm, swarm
from tests.peers.sybils import TRAINER, admitting, give_voice
from tests.seeds import some

pytestmark = pytest.mark.virtual_time

RUN = admitting(audit_run(stages=2, steps=8, microbatches_per_step=4))
HEARS_S = 30.0
OLD = NotAdmitted("not admitted as a trainer: the run's charter names its trainers")
FALSE = Refused("the loss is not finite")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


async def begun(s: Swarm) -> None:
    give_voice(s, *s.peers)
    await s.until_serving()
    s.add_trainer(TRAINER)
    await s.until_version(2)


def refuse(s: Swarm, peers: Sequence[str], error: SwarmError) -> Callable[[], None]:
    """Those peers refuse all work, until what is returned is called."""
    handlers = {name: s.network.peers[name].transport.handlers for name in peers}
    honest = {name: handlers[name]["work"] for name in peers}

    async def no(request: Request) -> Answer:
        raise error

    for name in peers:
        handlers[name]["work"] = (no, honest[name][1])

    def serve_again() -> None:
        for name in peers:
            handlers[name]["work"] = honest[name]

    return serve_again


@pytest.mark.parametrize("stage", some([0, 1], quick=[0]))
async def test_a_trainer_goes_on_that_is_admitted_by_a_charter_which_others_do_not_know_yet(
    stage: int,
) -> None:
    """In stage 1 they do not know it of peers of stage 0, which pass that on."""
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        directory = s.trainers[TRAINER]._first.directory
        read = directory.refresh

        async def takes_its_time(stages: Collection[int] | None = None) -> Sequence[PeerRecord]:
            await asyncio.sleep(0.3)
            return await read(stages)

        directory.refresh = takes_its_time  # type: ignore[method-assign]
        hear_of_it = refuse(s, s.of_stage(stage), OLD)
        await asyncio.sleep(HEARS_S)
        assert not s.tasks[TRAINER].done()
        said = [event.text for event in s.seen(Trouble) if "is refused again and again" in event.text]
        assert said and len(said) < HEARS_S / 3, "microbatches that are refused together say so once"
        assert "not admitted as a trainer" in said[0]
        hear_of_it()
        await s.until_finished(limit_s=200.0)
        s.assert_each_counted_once()


@pytest.mark.parametrize("stage", some([0, 1], quick=[1]))
async def test_one_that_lies_ends_no_trainer_while_the_others_do_not_know_that_it_is_admitted(
    stage: int,
) -> None:
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        *others, liar = s.of_stage(stage)
        hear_of_it = refuse(s, others, OLD)
        refuse(s, [liar], FALSE)
        await asyncio.sleep(HEARS_S)
        hear_of_it()
        await s.until_finished(limit_s=200.0)
        s.assert_each_counted_once()


async def test_two_with_voice_of_a_later_stage_that_refuse_everything_end_no_trainer() -> None:
    """Honest peers of stage 0, of which there are three, pass on what so many say."""
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        refuse(s, s.of_stage(1)[:2], FALSE)
        await s.until_finished(limit_s=200.0)
        s.assert_each_counted_once()
