"""Work begins with a trainer that the manifest names, at every stage."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from peers.sim.network import SimSigner
from peers.vouching.tickets import ticket_for
from swarm.errors import Refused
from swarm.ids import Microbatch
from swarm.manifest import Run, audit_run
from swarm.model.stage_io import input_metas
from swarm.records import PeerRecord
from swarm.wire.messages import Ticket, Work, WorkDone
from swarm.wire.receipts import tensors_digest
from tests.peers.admitted import OTHER, TRAINER, admitting, half_receipt
from tests.peers.loops import Stranger, Swarm, swarm

pytestmark = pytest.mark.virtual_time

RUN = admitting(audit_run(stages=2, steps=2, microbatches_per_step=4))
TOKENS = bytes(range(9))
FORGED = [struct.pack("<d", 1e6), TOKENS]


def ticket(
    mb: tuple[int, int] = (0, 0),
    *,
    by: str = TRAINER,
    tokens: bytes = TOKENS,
    run: Run = RUN,
    to: str = "s0p0",
) -> Ticket:
    return ticket_for(SimSigner(by), run, Microbatch(*mb), [tokens], to)


def work(stage: int, **changes: Any) -> Work:
    """A good request to a stage, but for the changes."""
    good = Work(run=RUN.id, t=0, m=0, version=0, tensors=input_metas(RUN, stage), ticket=ticket())
    return msgspec.structs.replace(good, **changes)


def announced(s: Swarm, name: str = "liar") -> Stranger:
    """Somebody who announced itself at stage 0, as anybody may."""
    liar = s.add_stranger(name)
    s.network.announce(PeerRecord(peer=name, run=RUN.id, stage=0, state="serving", version=0))
    return liar


TRUE = ticket()
BAD: dict[str, Ticket | None] = {
    "none": None,
    "its own": ticket(by="liar"),
    "under another's name": msgspec.structs.replace(ticket(by="liar"), trainer=TRAINER),
    "of another microbatch": ticket((0, 1)),
    "of another step": ticket((1, 0)),
    "of another run": ticket(run=replace(RUN, seed=9)),
    "for another peer, altered": msgspec.structs.replace(ticket(to="s0p1"), to="s0p0"),
    "with other inputs": msgspec.structs.replace(TRUE, inputs=bytes(32)),
    "of nobody": msgspec.structs.replace(TRUE, trainer="", signature=b""),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_mere_record_feeds_no_stage_behind_the_first(name: str) -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        liar = announced(s)
        with pytest.raises(Refused, match="without a ticket of a trainer that it names"):
            await liar.send("s1p0", "work", work(1, ticket=BAD[name]), list(FORGED))
        ledger = s.step("s1p0").ledger
        assert (ledger.done, ledger.in_progress) == (0, 0)
        assert s.peers["s1p0"].microbatches.taken == 0, "refused before its tensors came"


@pytest.mark.parametrize("name", BAD)
async def test_stage_0_takes_no_work_of_a_named_trainer_without_its_ticket(name: str) -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        with pytest.raises(Refused, match="without a ticket of a trainer that it names"):
            await s.add_stranger(TRAINER).send("s0p0", "work", work(0, ticket=BAD[name]), [TOKENS])


def forged(tokens: bytes) -> Work:
    """What a liar of stage 0 sends on of a microbatch that it was sent."""
    mine, metas = ticket(to="liar"), input_metas(RUN, 1)
    named = tensors_digest(metas, [FORGED[0], tokens])
    half = half_receipt(SimSigner("liar"), RUN.id, 0, Microbatch(0, 0), mine.inputs, named, "s1p0")
    return work(1, ticket=mine, fed=half)


async def test_other_inputs_than_the_trainer_signed_are_refused() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        with pytest.raises(Refused, match=r"what came for \(0, 0\) is not what its ticket names"):
            await s.add_stranger(TRAINER).send("s0p0", "work", work(0), [bytes(9)])
        with pytest.raises(Refused, match=r"what came for \(0, 0\) is not what its ticket names"):
            await announced(s).send("s1p0", "work", forged(bytes(9)), [FORGED[0], bytes(9)])
        for peer in ("s0p0", "s1p0"):
            assert (s.step(peer).ledger.done, s.step(peer).ledger.in_progress) == (0, 0)
            assert s.peers[peer].microbatches.inflight == 0


@pytest.mark.parametrize("trainer", [TRAINER, OTHER])
async def test_a_ticket_goes_with_its_microbatch_through_all_stages(trainer: str) -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        asked = work(0, ticket=ticket(by=trainer))
        done = await s.add_stranger(trainer).ask("s0p0", "work", asked, WorkDone, [TOKENS])
        assert len(done.hops) == 2


async def test_a_run_that_names_no_trainers_needs_no_tickets() -> None:
    run = audit_run(stages=2, steps=2, microbatches_per_step=4)
    async with swarm(run, replicas=1) as s:
        await s.until_serving()
        asked = work(0, run=run.id, ticket=None)
        assert await s.add_stranger().ask("s0p0", "work", asked, WorkDone, [TOKENS])


# --- every way that a microbatch takes ----------------------------------------------------------------------


async def test_what_a_stage_lost_is_fed_again_with_its_ticket() -> None:
    """By the stage before, which has it (`deepest`), and by another peer of stage 0, which has not."""
    run = admitting(audit_run(stages=3, steps=3, microbatches_per_step=8))
    async with swarm(run) as s:
        s.add_trainer(TRAINER)
        await s.until(lambda: any(s.done(name).bit_count() >= 2 for name in s.of_stage(2)))
        s.kill(max(s.of_stage(2), key=lambda name: s.done(name).bit_count()))
        await s.until_version(1)
        await s.until(lambda: any(s.done(name, 1).bit_count() >= 2 for name in s.of_stage(0)))
        s.kill(max(s.of_stage(0), key=lambda name: s.done(name, 1).bit_count()))
        await s.until_finished()
        s.assert_each_counted_once()
        assert s.replayed > 0


async def test_an_answer_that_is_lost_is_asked_for_again_with_the_ticket() -> None:
    run = admitting(audit_run(stages=2, steps=2, microbatches_per_step=8))
    async with swarm(run) as s:
        for peer in ("s1p0", "s0p1"):
            s.network.drop_answer(peer, "work", nth=2)
        s.add_trainer(TRAINER)
        s.add_trainer(OTHER)
        await s.until_finished()
        s.assert_each_counted_once()


async def test_after_one_left_and_one_died_what_is_run_again_has_its_ticket() -> None:
    run = admitting(audit_run(stages=2, steps=2, microbatches_per_step=8))
    async with swarm(run) as s:
        s.add_trainer(TRAINER)
        await s.until(lambda: s.done("s1p0").bit_count() >= 2)
        s.peers["s1p0"].leave()
        await s.until(lambda: s.tasks["s1p0"].done())
        s.kill(max(s.of_stage(0), key=lambda name: s.done(name).bit_count()))
        await s.until_finished()
        s.assert_each_counted_once()
