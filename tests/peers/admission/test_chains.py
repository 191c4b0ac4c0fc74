"""The chain behind a microbatch: who signed what it was made of, back to one whose word counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from peers.clock import now_s
from peers.sim.network import SimSigner
from peers.vouching.tickets import ticket_for
from swarm.errors import NotReady, Refused
from swarm.ids import Microbatch, Stage
from swarm.model.stage_io import input_metas
from swarm.records import PeerRecord
from swarm.wire.messages import Work, WorkDone
from swarm.wire.receipts import Link, tensors_digest
from swarm.wire.tensor_meta import buffer_sizes
from tests.peers import sybils
from tests.peers.admitted import half_receipt
from tests.peers.liars.test_false_answers import audited_run
from tests.peers.loops import Swarm, swarm

pytestmark = pytest.mark.virtual_time

RUN = sybils.admitting(audited_run(stages=5))
MB = Microbatch(0, 0)
KNOWN = ["s2y", *(f"s{stage}p{n}" for stage in range(RUN.S) for n in range(2))]


def came(*chain: str, to: str = "s3p0", shown: int = RUN.S) -> Work:
    """A microbatch that came through these peers, of stage 0 at first; `shown`: the last links of that."""
    body = [bytes(n) for n in buffer_sizes(input_metas(RUN, 0))]
    ticket = ticket_for(SimSigner(sybils.TRAINER), RUN, MB, body, chain[0])
    inputs, links = ticket.inputs, list[Link]()
    for stage, (peer, onward) in enumerate(zip(chain, (*chain[1:], to), strict=True)):
        metas = input_metas(RUN, stage + 1)
        outputs = tensors_digest(metas, zeros(stage + 1))
        links.append(Link(peer, half_receipt(SimSigner(peer), RUN.id, stage, MB, inputs, outputs, onward)))
        inputs = outputs
    return Work(
        run=RUN.id, t=0, m=0, version=0, tensors=input_metas(RUN, len(chain)), ticket=ticket,
        fed=links[-1].half, through=tuple(reversed(links[:-1]))[:shown],
    )  # fmt: skip


def zeros(stage: Stage) -> list[bytes]:
    return [bytes(n) for n in buffer_sizes(input_metas(RUN, stage))]


class Feeders:
    """Peers without voice, of stages that others have voice in; and s2y, which has it."""

    def __init__(self, s: Swarm) -> None:
        self._of = {name: s.add_stranger(name) for name in ("s0x", "s1x", "s2x", "s2y")}
        for name in self._of:
            s.network.announce(
                PeerRecord(peer=name, run=RUN.id, stage=int(name[1]), state="serving", version=0)
            )

    async def feed(self, work: Work, *, by: str = "s2x", to: str = "s3p0") -> WorkDone:
        return await self._of[by].ask(to, "work", work, WorkDone, zeros(3))


async def open_swarm(s: Swarm) -> Feeders:
    await s.until_serving()
    return Feeders(s)


@pytest.mark.parametrize(
    ("chain", "shown"),
    [
        (("s0p0", "s1p0", "s2y"), 1), (("s0p0", "s1p0", "s2x"), 2), (("s0p0", "s1x", "s2x"), 2),
        (("s0x", "s1x", "s2x"), 2),
    ],
)  # fmt: skip
async def test_what_is_sent_on_is_taken_with_the_chain_behind_it(chain: Sequence[str], shown: int) -> None:
    async with swarm(RUN, replicas=2) as s:
        sybils.give_voice(s, *KNOWN)
        feeders = await open_swarm(s)
        done = await feeders.feed(came(*chain, shown=shown), by=chain[-1])
        assert [hop.stage for hop in done.hops] == [3, 4]


@pytest.mark.parametrize(
    ("chain", "shown"),
    [
        (("s0p0", "s1p0", "s2y"), 0), (("s0p0", "s1p0", "s2x"), 1), (("s0p0", "s1x", "s2x"), 1),
        (("s0p0", "s1x", "s2y"), 1),
    ],
)  # fmt: skip
async def test_of_a_chain_that_does_not_begin_with_two_that_have_voice_nothing_is_taken(
    chain: Sequence[str], shown: int
) -> None:
    """Another name of the liar's would sign what it makes up, or pass on what one with voice makes up."""
    async with swarm(RUN, replicas=2) as s:
        sybils.give_voice(s, *KNOWN)
        feeders = await open_swarm(s)
        with pytest.raises(NotReady, match=r"does not show how \(0, 0\) came to it"):
            await feeders.feed(came(*chain, shown=shown), by=chain[-1])


@pytest.mark.parametrize("lie", ["a ticket for another", "sent to another", "made of something else"])
async def test_a_chain_that_is_broken_is_refused(lie: str) -> None:
    """What an honest peer signed for another is known to all that it came to."""
    async with swarm(RUN, replicas=2) as s:
        sybils.give_voice(s, *KNOWN)
        feeders = await open_swarm(s)
        chain = came("s0x", "s1x", "s2x")
        if lie == "a ticket for another":
            chain = msgspec.structs.replace(chain, ticket=came("s0p0", "s1x", "s2x").ticket)
        elif lie == "sent to another":
            half = came("s0p0", "s1p0", to="s2p0").fed
            assert half is not None
            chain = msgspec.structs.replace(chain, through=(Link("s1p0", half),))
        else:
            outputs = chain.through[0].half.outputs
            half = half_receipt(SimSigner("s1x"), RUN.id, 1, MB, bytes(32), outputs, "s2x")
            chain = msgspec.structs.replace(chain, through=(Link("s1x", half), chain.through[1]))
        with pytest.raises(Refused, match="takes what a peer of stage 2 signed to the one that gets it"):
            await feeders.feed(chain)


async def test_a_chain_from_before_the_first_stage_is_refused() -> None:
    async with swarm(RUN, replicas=2) as s:
        sybils.give_voice(s, *KNOWN)
        feeders = await open_swarm(s)
        chain, made_up = came("s0x", "s1x", "s2x"), bytes(32)
        assert chain.ticket is not None
        outputs = chain.through[1].half.outputs
        first = half_receipt(SimSigner("s0x"), RUN.id, -1, MB, chain.ticket.inputs, made_up, "s0x")
        second = half_receipt(SimSigner("s0x"), RUN.id, 0, MB, made_up, outputs, "s1x")
        through = (chain.through[0], Link("s0x", second), Link("s0x", first))
        with pytest.raises(Refused, match="takes what"):
            await feeders.feed(msgspec.structs.replace(chain, through=through))


async def test_nothing_is_taken_of_a_peer_that_rests_for_what_it_sent_on() -> None:
    async with swarm(RUN, replicas=2) as s:
        sybils.give_voice(s, *KNOWN)
        feeders, chain = await open_swarm(s), came("s0p0", "s1p0", "s2x")
        for _ in range(2):
            assert (await feeders.feed(chain)).hops
            s.peers["s3p0"].core.backoff.charge("s2x", t=0, since_s=now_s(), now=now_s(), rounds=1)
        with pytest.raises(NotReady, match="takes nothing of its caller for a while"):
            await feeders.feed(chain)


async def test_before_anybody_has_voice_the_chains_of_all_that_are_announced_are_taken() -> None:
    async with swarm(RUN, replicas=2) as s:
        feeders = await open_swarm(s)
        assert (await feeders.feed(came("s0p0", "s1x", "s2x", shown=1))).hops
        with pytest.raises(NotReady):
            await feeders.feed(came("s0p0", "nobody", "s2x", to="s3p1", shown=1), to="s3p1")


async def test_a_microbatch_is_given_up_if_those_that_it_came_through_are_gone() -> None:
    """The next stage would take it no more, and all that run it again would wait for it."""
    async with swarm(RUN, replicas=1) as s:
        sybils.give_voice(s, *KNOWN)
        feeders = await open_swarm(s)
        s.kill("s4p0")
        feeding = asyncio.create_task(feeders.feed(came("s0p0", "s1p0", "s2y", shown=1), by="s2y"))
        await s.until(lambda: bool(s.peers["s3p0"].core.steps[0].ledger.in_progress))
        s.network.dht.forget("s2y")
        await s.until(feeding.done, limit_s=10.0)
        with pytest.raises(NotReady, match=r"the peers that \(0, 0\) came through are gone"):
            await feeding
        assert not s.peers["s3p0"].core.steps[0].ledger.in_progress


async def test_a_stranger_does_not_have_the_microbatches_of_others_refused() -> None:
    """It feeds what it did not sign, again and again, while others ask for the same."""
    async with swarm(RUN, replicas=2) as s:
        sybils.give_voice(s, *KNOWN)
        feeders = await open_swarm(s)
        chain = came("s0x", "s1x", "s2x")
        assert chain.fed is not None
        metas, other = input_metas(RUN, 3), [b"\1" * n for n in buffer_sizes(input_metas(RUN, 3))]
        half = half_receipt(
            SimSigner("s2x"), RUN.id, 2, MB, chain.fed.inputs, tensors_digest(metas, other), "s3p0"
        )
        lie = msgspec.structs.replace(chain, fed=half)
        lies = [asyncio.create_task(feeders.feed(lie)) for _ in range(3)]
        await s.until(lambda: s.peers["s3p0"].core.steps[0].ledger.in_progress)
        assert (await feeders.feed(came("s0p0", "s1p0", "s2y", shown=1), by="s2y")).hops
        for refused in lies:
            with pytest.raises(Refused, match="takes what a peer of stage 2 signed"):
                await refused


async def test_what_nobody_signed_is_refused_before_it_comes() -> None:
    async with swarm(RUN, replicas=2) as s:
        sybils.give_voice(s, *KNOWN)
        feeders = await open_swarm(s)
        chain = came("s0x", "s1x", "s2x")
        with pytest.raises(Refused, match="takes what"):
            await feeders.feed(msgspec.structs.replace(chain, through=(chain.through[1], chain.through[0])))
        assert s.peers["s3p0"].microbatches.taken == 0
