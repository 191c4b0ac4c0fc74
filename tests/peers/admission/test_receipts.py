"""What peers sign of their answers, in a run whose manifest names trainers."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgspec
import pytest

from peers.events import PeerLost
from peers.ports import Answer, Request
from peers.sim.network import SimSigner
from peers.vouching.tickets import ticket_for
from swarm.errors import Refused
from swarm.ids import Microbatch
from swarm.manifest import Run, audit_run
from swarm.model.stage_io import input_metas
from swarm.records import PeerRecord
from swarm.wire.messages import Hop, Work, WorkDone, pack, unpack
from swarm.wire.receipts import Answered, Receipt, give_receipt, is_receipt, tensors_digest
from swarm.wire.tensor_meta import TensorMeta
from tests.peers.admitted import TRAINER, admitting, half_receipt
from tests.peers.loops import Swarm, swarm

pytestmark = pytest.mark.virtual_time

RUN = admitting(audit_run(stages=3, steps=2, microbatches_per_step=4))
NOTHING = tensors_digest((), ())
LIAR = "s1z-liar"
GRADIENT = TensorMeta((1, 1, 1), "float64", "none")


def work_of(run: Run, *, to: str = "s0p0", **changes: Any) -> Work:
    """A good request to a peer of stage 0, but for the changes."""
    ticket = ticket_for(SimSigner(TRAINER), run, Microbatch(0, 0), [bytes(9)], to)
    good = Work(run=run.id, t=0, m=0, version=0, tensors=input_metas(run, 0), ticket=ticket)
    return msgspec.structs.replace(good, **changes)


async def test_the_receipts_of_an_answer_are_a_chain_from_the_trainer_to_the_loss() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        trainer = s.add_stranger(TRAINER)
        done = await trainer.ask("s0p0", "work", work_of(RUN), WorkDone, [bytes(9)])
        receipts = []
        for stage, hop in enumerate(done.hops):
            assert hop.receipt is not None and (hop.stage, hop.peer) == (stage, f"s{stage}p0")
            said = (SimSigner("z"), hop.peer, RUN.id, stage)
            assert is_receipt(*said, Microbatch(0, 0), done.loss, hop.receipt)
            assert not is_receipt(*said, Microbatch(0, 1), done.loss, hop.receipt)
            assert not is_receipt(*said, Microbatch(0, 0), done.loss + 1, hop.receipt)
            assert len(msgspec.msgpack.encode(hop.receipt)) <= 300
            receipts.append(hop.receipt)
        first, second, last = receipts
        assert first.inputs == tensors_digest(input_metas(RUN, 0), [bytes(9)])
        assert (first.outputs, second.outputs, last.outputs) == (second.inputs, last.inputs, NOTHING)
        assert (first.output_grads, second.output_grads) == (second.input_grads, last.input_grads)
        assert (first.input_grads, last.output_grads) == (NOTHING, NOTHING)
        assert len({first.inputs, first.outputs, first.output_grads, NOTHING}) == 4


async def test_without_named_trainers_nothing_is_signed() -> None:
    run = audit_run(stages=3, steps=2, microbatches_per_step=4)
    async with swarm(run, replicas=1) as s:
        await s.until_serving()
        done = await s.add_stranger().ask("s0p0", "work", work_of(run), WorkDone, [bytes(9)])
        assert [hop.receipt for hop in done.hops] == [None, None, None]


async def test_a_microbatch_that_is_asked_for_again_has_the_same_receipts() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        trainer = s.add_stranger(TRAINER)
        answers = [
            await trainer.ask("s0p0", "work", work_of(RUN, deepest=deepest), WorkDone, [bytes(9)])
            for deepest in (-1, -1, 2)
        ]
        assert len({pack(answer) for answer in answers}) == 1


def signed(
    mb: tuple[int, int], gradient: bytes, *, by: str = LIAR, stage: int = 1, loss: float = 0.0
) -> Receipt:
    digest = tensors_digest([GRADIENT], [gradient])
    return give_receipt(SimSigner(by), RUN.id, Answered(stage, *mb, NOTHING, NOTHING, NOTHING, digest, loss))


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("bare", "answered without a receipt of its own"),
        ("nobody", "answered without a receipt of its own"),
        ("another's", "answered without a receipt of its own"),
        ("gradient", "answered another gradient than its receipt names"),
        ("forged", "answered with a receipt that it did not sign"),
        ("loss", "answered with a receipt that it did not sign"),
        ("microbatch", "answered with a receipt that it did not sign"),
        ("stage", "answered with a receipt that it did not sign"),
        ("inputs", "answered something else than it was sent"),
    ],
)
async def test_an_answer_that_its_sender_did_not_sign_is_not_taken(lie: str, why: str) -> None:
    gradient = struct.pack("<d", 0.25)

    async def work(request: Request) -> Answer:
        asked = unpack(request.header, Work)
        await request.accept()
        mb = (asked.t, asked.m + (lie == "microbatch"))
        of = struct.pack("<d", 0.5) if lie == "gradient" else gradient
        receipt = signed(
            mb, of, by="s1p0" if lie == "forged" else LIAR, stage=2 if lie == "stage" else 1,
            loss=1.0 if lie == "loss" else 0.0,
        )  # fmt: skip
        hop = Hop(stage=1, peer="s1p0" if lie == "another's" else LIAR, own_s=0.01, compute_s=0.01)
        hop = msgspec.structs.replace(hop, receipt=None if lie == "bare" else receipt)
        hops = () if lie == "nobody" else (hop,)
        return Answer(pack(WorkDone(loss=0.0, tensors=(GRADIENT,), hops=hops)), [gradient])

    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        liar = s.add_stranger(LIAR)
        s.network.announce(PeerRecord(peer=LIAR, run=RUN.id, stage=1, state="serving", version=0))
        liar.end.transport.serve("work", work, max_body_bytes=1 << 20)
        s.add_trainer(TRAINER)
        await s.until_finished()
        s.assert_each_counted_once()
        lost = [event.why for event in s.seen(PeerLost) if event.peer == LIAR]
        assert lost and all(why in text for text in lost)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("bare", "answered without a receipt of its own"),
        ("forged", "answered with a receipt that it did not sign"),
        ("inputs", "answered something else than it was sent"),
    ],
)
async def test_a_trainer_takes_no_answer_that_it_could_not_have_computed_again(lie: str, why: str) -> None:
    liar = "s0z-liar"

    async def work(request: Request) -> Answer:
        asked = unpack(request.header, Work)
        await request.accept()
        said = Answered(0, asked.t, asked.m, NOTHING, NOTHING, NOTHING, NOTHING, 0.0)
        receipt = give_receipt(SimSigner("s0p0" if lie == "forged" else liar), RUN.id, said)
        hop = Hop(stage=0, peer=liar, own_s=0.01, compute_s=0.01, receipt=None if lie == "bare" else receipt)
        return Answer(pack(WorkDone(loss=0.0, tensors=(), hops=(hop,))))

    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        s.add_stranger(liar).end.transport.serve("work", work, max_body_bytes=1 << 20)
        s.network.announce(PeerRecord(peer=liar, run=RUN.id, stage=0, state="serving", version=0))
        s.add_trainer(TRAINER)
        await s.until_finished()
        s.assert_each_counted_once()
        lost = [event.why for event in s.seen(PeerLost) if event.peer == liar]
        assert lost and all(why in text for text in lost)


@pytest.mark.parametrize("lie", ["nobody's", "another's", "other bytes", "of other inputs", "to another"])
async def test_a_stage_takes_only_what_its_caller_signed(lie: str) -> None:
    """So that an audit is shown what came, and nothing that suits."""
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        feeder = s.add_stranger("s0x")
        s.network.announce(PeerRecord(peer="s0x", run=RUN.id, stage=0, state="serving", version=0))
        hidden, tokens = bytes(8), bytes(9)
        metas = input_metas(RUN, 1)
        named = tensors_digest(metas, [bytes(len(hidden)) if lie != "other bytes" else b"\1" * 8, tokens])
        fed = fed_by("s0p0" if lie == "another's" else "s0x", named)
        if lie == "of other inputs":
            fed = half_receipt(SimSigner("s0x"), RUN.id, 0, Microbatch(0, 0), NOTHING, named, "s1p0")
        if lie == "to another":
            fed = fed_by("s0x", named, to="s1p1")
        work = work_of(RUN, to="s0x", tensors=metas, fed=None if lie == "nobody's" else fed)
        with pytest.raises(Refused, match="takes what a peer of stage 0 signed"):
            await feeder.ask("s1p0", "work", work, WorkDone, [hidden, tokens])


def fed_by(name: str, outputs: bytes, *, to: str = "s1p0") -> Receipt:
    """What a peer of stage 0 signs of what it sends on of microbatch (0, 0)."""
    ticket = work_of(RUN).ticket
    assert ticket is not None
    return half_receipt(SimSigner(name), RUN.id, 0, Microbatch(0, 0), ticket.inputs, outputs, to)


class Feeders:
    """Peers of stage 0 that feed microbatch (0, 0) to stage 1."""

    def __init__(self, s: Swarm, *names: str) -> None:
        self._feeders = {name: s.add_stranger(name) for name in names}
        for name in names:
            s.network.announce(PeerRecord(peer=name, run=RUN.id, stage=0, state="serving", version=0))

    async def feed(self, name: str, hidden: bytes, *, signer: str = "") -> bytes:
        """Feed these bytes, which have to be what is answered; their digest. `signer`: if it is another."""
        metas, tokens = input_metas(RUN, 1), bytes(9)
        named = tensors_digest(metas, [hidden, tokens])
        work = work_of(RUN, to=name, tensors=metas, fed=fed_by(signer or name, named))
        done = await self._feeders[name].ask("s1p0", "work", work, WorkDone, [hidden, tokens])
        receipt = done.hops[0].receipt
        assert receipt is not None and receipt.inputs == named
        return named


async def test_who_is_fed_a_microbatch_with_other_inputs_answers_to_those_and_counts_the_first() -> None:
    """The first may have been a liar's: honest callers got the gradients of its inputs, which no sum had room
    for, and the run stood still. The second may be: then what a caller feeds after its answer is not counted.
    """
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        callee, feeders = s.peers["s1p0"], Feeders(s, "s0x", "s0y")
        step = callee.core.steps[0]

        async def feed(name: str, hidden: bytes) -> bytes:
            named = await feeders.feed(name, hidden)
            assert step.ledger.done == 1
            return named

        first, other = await feed("s0x", bytes(8)), await feed("s0y", b"\1" * 8)
        assert callee.core.computed == 2 and await feed("s0y", b"\1" * 8) == other
        assert callee.core.computed == 2, "it is asked again, and remembers"
        with pytest.raises(Refused):
            await feeders.feed("s0x", b"\1" * 8, signer="s0y")
        counted = step.kept[0].answer.hops[0].receipt
        assert counted is not None and counted.inputs == first and not callee.core.undone
        callee.convictions.on_conviction("s0x")
        await s.until(lambda: callee.core.undone == 1)
        await feed("s0y", b"\2" * 8)
        assert step.ledger.done == 1 and "s0y" in step.kept[0].by and "s0x" not in step.kept[0].by
        await asyncio.gather(feed("s0x", b"\3" * 8), feed("s0y", b"\4" * 8))
        for value in range(5, 13):
            await feed("s0x", bytes([value]) * 8)
        assert step.ledger.done == 1 and len(step.sent_on) == 2 * RUN.M


async def test_two_callers_that_feed_a_microbatch_at_once_are_each_answered_what_they_sent() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        feeders = Feeders(s, "s0x", "s0y", "s0z")
        sent = (("s0x", bytes(8)), ("s0y", b"\1" * 8), ("s0z", b"\1" * 8))
        await asyncio.gather(*(feeders.feed(*one) for one in sent))
        assert s.peers["s1p0"].core.steps[0].ledger.done == 1
        server: Any = s.peers["s1p0"].microbatches
        call, others = server._call_next, list[asyncio.Task[bytes]]()

        async def sent_on(*args: Any) -> Any:
            if not others:
                others.append(asyncio.create_task(feeders.feed("s0z", b"\2" * 8)))
                await asyncio.sleep(0.1)
            return await call(*args)

        server._call_next = sent_on
        assert await feeders.feed("s0y", b"\2" * 8) == await others[0]
