"""A peer that was shown to lie at one stage, and announces itself at another: it is known there, too."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from peers.audit.convictions import Convictions
from peers.audit.verdicts import MAX_TOLD, Verdicts
from peers.clock import now_s
from peers.ports import Answer
from peers.sim.network import SimSigner
from peers.status_query import ASK_S
from swarm.digest import DIGEST_BYTES
from swarm.errors import PeerGone, Refused
from swarm.manifest import audit_run
from swarm.protocol.statements import sign
from swarm.protocol.sums import Reduced
from swarm.records import PeerRecord
from swarm.wire.evidence import AskConvicted, Convicted, ShowEvidence, WrongAnswer, WrongSum
from swarm.wire.messages import pack, unpack
from swarm.wire.receipts import Answered
from tests.peers.alone import Line, Records
from tests.peers.liars.test_false_sums import convicted, one_more, value
from tests.peers.loops import Swarm, swarm
from tests.peers.sybils import TRAINER, add_liar, admitting, give_voice

pytestmark = [pytest.mark.virtual_time, pytest.mark.timeout(240)]

RUN = admitting(replace(audit_run(stages=4, steps=400, microbatches_per_step=8, seed=1), dtype="float32"))
LIAR = "s1p1"
NOTHING = bytes(DIGEST_BYTES)


def accusation(accused: str, stage: int = 1) -> WrongAnswer:
    """What shows that a peer answered at a stage, and that the answer is wrong to those who say so."""
    said = Answered(stage, 0, 0, NOTHING, NOTHING, NOTHING, NOTHING, 1.0)
    signature = sign(SimSigner(accused), RUN.id, said)
    return WrongAnswer(
        accused=accused, statement=said, signature=signature, inputs=(), output_grads=(), outputs=(),
        input_grads=(),
    )  # fmt: skip


def told_of(s: Swarm, *names: str) -> set[str]:
    return {liar for name in names for liar in s.peers[name].convictions.convicted}


def convictions_of(s: Swarm, name: str) -> Convictions:
    return s.peers[name].convictions


async def moved(s: Swarm, name: str, stage: int) -> None:
    """A peer announces itself at another stage, and does nothing else there."""
    s.kill_and_forget(name)
    await add_liar(s, name, stage, 0)


async def convict(s: Swarm, *mates: str, accused: str = LIAR) -> None:
    """Some replicas of stage 1 found a peer out, and say so."""
    evidence = accusation(accused)
    for name in mates:
        convictions_of(s, name).convict(evidence)
    for name in mates:
        convictions_of(s, name).pass_on(evidence, [])


async def test_of_a_sum_whose_evidence_is_too_long_for_a_message_the_stage_is_asked() -> None:
    """Of 147 that contributed, or 1.4 thousand million weights of two, nobody heard of who added wrongly."""
    said = Reduced(1, 0, "round", (), b"")
    evidence = WrongSum(
        accused=LIAR, statement=said, signature=sign(SimSigner(LIAR), RUN.id, said), index=0,
        lists=tuple(bytes(32 * 750) for _ in range(3)),
    )  # fmt: skip
    async with swarm(RUN, replicas=3) as s:
        give_voice(s, *s.peers)
        await s.until_serving()
        for name in ("s1p0", "s1p2"):
            convictions_of(s, name).found(evidence, [b"chunk"])
        honest = [name for name in s.peers if name[:2] != "s1"]
        await s.until(lambda: all(LIAR in convictions_of(s, name).convicted for name in honest), limit_s=30.0)


@pytest.mark.parametrize("voice", [True, False])
async def test_a_peer_that_was_shown_to_lie_is_left_out_by_all_stages(voice: bool) -> None:
    async with swarm(RUN, replicas=3) as s:
        if voice:
            give_voice(s, *s.peers)
        await s.until_serving()
        await convict(s, "s1p0", "s1p2")
        honest = [name for name in s.peers if name[:2] != "s1"]
        await s.until(lambda: all(LIAR in convictions_of(s, name).convicted for name in honest), limit_s=30.0)


async def test_newcomers_and_trainers_know_who_lied_at_another_stage_before() -> None:
    """Its stage is asked, and not the one that it announces itself at."""
    async with swarm(RUN, replicas=3) as s:
        give_voice(s, *s.peers, "n", TRAINER)
        await s.until_serving()
        await convict(s, "s1p0", "s1p2")
        await s.until(lambda: LIAR in told_of(s, "s0p0") & told_of(s, "s0p1") & told_of(s, "s0p2"))
        await moved(s, LIAR, 3)
        newcomer = s.add_peer("n", 3)
        trainer = s.add_trainer(TRAINER)
        await s.until(lambda: newcomer.convictions.convicted == {LIAR}, limit_s=30.0)
        await trainer.verdicts.ask()
        assert trainer.verdicts.convicted == {LIAR}


async def test_one_alone_convicts_nobody_that_was_at_its_stage_before() -> None:
    """An honest peer that moves leaves one behind, whose word against it counted as that of all its stage."""
    async with swarm(RUN, replicas=2) as s:
        give_voice(s, *s.peers)
        await s.until_serving()
        await moved(s, LIAR, 3)
        await convict(s, "s1p0")
        await s.until(lambda: s.network.loop.now_s > 60.0)
        others = [name for name in s.peers if name not in ("s1p0", LIAR)]
        assert not told_of(s, *others)
        asks = convictions_of(s, "s3p0")
        convictions_of(s, "s0p0").convicted.add(LIAR)
        await asks.ask()
        assert not asks.convicted


async def test_what_a_peer_did_not_sign_has_no_stage_asked_about_it() -> None:
    """Else most of any stage convict any peer of the run."""
    async with swarm(RUN, replicas=3) as s:
        give_voice(s, *s.peers)
        await s.until_serving()
        false = msgspec.structs.replace(accusation("s3p1"), signature=b"none")
        for name in ("s1p0", "s1p1", "s1p2", "s0p0"):
            convictions_of(s, name).convict(false)
        asks = convictions_of(s, "s2p0")
        await asks.ask_about("s3p1", ["s0p0"])
        assert not asks.convicted
        for name in ("s1p0", "s1p1", "s1p2", "s0p0"):
            convictions_of(s, name).convict(accusation("s3p2"))
        await asks.ask_about("s3p2", ["s0p0"])
        assert asks.convicted == {"s3p2"}


async def test_trainers_ask_no_stage_about_what_a_peer_did_not_sign() -> None:
    """Else most of one stage take all peers of the others from them."""
    async with swarm(RUN, replicas=3) as s:
        give_voice(s, *s.peers)
        await s.until_serving()
        trainer = s.add_trainer(TRAINER)
        for name in ("s1p0", "s1p2"):
            convictions_of(s, name).convicted |= {"s3p1", LIAR}
        false = msgspec.structs.replace(accusation("s3p1"), signature=b"none")
        for evidence in (false, accusation(LIAR)):
            header = pack(ShowEvidence(run=RUN.id, evidence=evidence))
            transport = s.network.peers["s1p0"].transport
            with contextlib.suppress(Refused):
                await transport.call(TRAINER, "evidence", header, deadline_s=30.0)
        assert trainer.verdicts.convicted == {LIAR}


async def test_what_nobody_has_to_be_believed_for_convicts_one_of_two_in_all_stages() -> None:
    """An owner's sum is wrong by what it signed itself: each peer computes that, whatever others say."""
    async with swarm(replace(RUN, name="sums"), replicas=2) as s:
        give_voice(s, *s.peers)
        await s.until_serving()
        value(one_more)(s, s.peers[LIAR])
        s.add_trainer(TRAINER)
        honest = [name for name in s.peers if name != LIAR]
        await s.until(lambda: all(convicted(s)[name] == {LIAR} for name in honest), limit_s=60.0)


class Slow(Line):
    """What one names takes it long to show."""

    async def call(self, peer: str, method: str, header: bytes, *_: Any, **__: Any) -> Answer:
        ask = unpack(header, AskConvicted)
        if not ask.peer:
            return Answer(pack(Convicted(yes=False, others=tuple(r.peer for r in NAMED))))
        if ask.show:
            await asyncio.sleep(ASK_S)
        return Answer(pack(Convicted(yes=peer == "s0p0")))


NAMED = [
    PeerRecord(peer=f"p{n:02}", run=RUN.id, stage=1, state="serving", version=0) for n in range(MAX_TOLD)
]


async def test_one_that_names_many_holds_up_the_question_who_lied_for_some_seconds() -> None:
    """Before they vouch for others trainers ask: with 192 s each time no voucher came before it was over."""
    directory, line = Records(), Slow("trainer")
    directory.known = [*NAMED, msgspec.structs.replace(NAMED[0], peer="s0p0", stage=0)]
    verdicts, began = Verdicts(RUN, line, directory, lambda _: None), now_s()  # type: ignore[arg-type]
    await verdicts.ask()
    assert now_s() - began < 15.0 and not verdicts.convicted


async def test_nothing_is_kept_of_peers_that_were_called_and_are_gone() -> None:
    """A future of each was: peers come and go, each under another name."""
    verdicts = Verdicts(RUN, Line("trainer"), Records(), lambda _: None)  # type: ignore[arg-type]
    for number in range(9):
        await verdicts.while_trusted(f"p{number}", asyncio.sleep(0))
    assert not verdicts._left_out
    calling = asyncio.ensure_future(verdicts.while_trusted(LIAR, asyncio.sleep(9.0)))
    await asyncio.sleep(1.0)
    verdicts.leave_out(LIAR, "it lies")
    for call in (calling, verdicts.while_trusted(LIAR, asyncio.sleep(9.0))):
        with pytest.raises(PeerGone, match="it is left out"):
            await call
