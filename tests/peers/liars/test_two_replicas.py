"""A stage of two replicas with voice, neither of them a founder: which of them lies, the others compute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from peers.audit import answers as answer_audits
from peers.audit.convictions import MAX_TRIES, Referee
from peers.ports import Answer, Request
from peers.transfer.leases import Snapshot
from swarm.errors import Refused
from swarm.protocol.messages import RunStatus
from swarm.wire.evidence import WrongAnswer
from swarm.wire.messages import Watched, pack
from swarm.wire.receipts import Answered
from tests.peers.liars.test_false_answers import LIES, audit, audited_run, judges_falsely, lie
from tests.peers.loops import Swarm, swarm
from tests.peers.sybils import TRAINER, admitting, give_voice
from tests.seeds import some

pytestmark = [pytest.mark.virtual_time, pytest.mark.timeout(240)]


@asynccontextmanager
async def two_by_two(monkeypatch: pytest.MonkeyPatch, **steps: int) -> AsyncIterator[Swarm]:
    """Three stages; all have voice, `steps` of them another one."""
    audit(monkeypatch, share=1.0)
    monkeypatch.setattr(answer_audits, "make", answer_audits.make)
    async with swarm(admitting(audited_run(steps=4)), replicas=2) as s:
        give_voice(s, *s.peers, steps=steps)
        await s.until_serving()
        yield s


@pytest.mark.parametrize("stage", some([0, 1, 2], quick=[0]))
async def test_of_two_replicas_the_one_that_lies_is_left_out_by_all(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_by_two(monkeypatch) as s:
        liar = f"s{stage}p1"
        lie(s.peers[liar], LIES["sign flip"])
        trainer = s.add_trainer(TRAINER)
        honest = [peer for name, peer in s.peers.items() if name != liar]
        await s.until(lambda: all(peer.core.version >= s.run.steps for peer in honest), limit_s=200.0)
        around = [peer for peer in honest if abs(peer.stage - stage) <= 1]
        assert all(peer.convictions.convicted == {liar} for peer in around)
        await trainer.verdicts.ask()
        assert trainer.verdicts.convicted == {liar}


@pytest.mark.parametrize(("stage", "voice"), some([(0, 30), (1, 100), (2, 30)], quick=[(0, 30)]))
async def test_of_two_replicas_the_one_that_accuses_falsely_is_left_out_by_all(
    stage: int, voice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much voice it has. Else the run stands still: it takes part in no round with the other one."""
    liar = f"s{stage}p1"
    async with two_by_two(monkeypatch, **{liar: voice}) as s:
        judges_falsely(s, s.peers[liar])
        s.add_trainer(TRAINER)
        honest = [peer for name, peer in s.peers.items() if name != liar]
        await s.until(lambda: all(peer.core.version >= s.run.steps for peer in honest), limit_s=200.0)
        assert s.peers[liar].convictions.convicted
        assert {name for peer in honest for name in peer.convictions.convicted} == {liar}


@pytest.mark.parametrize(
    ("t", "given"), [(0, "the same"), (1, "the same"), (0, "another"), (0, "none"), (0, "too much")]
)
async def test_an_answer_is_judged_by_weights_of_its_step_that_both_replicas_give(
    t: int, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the accuser would make up a state with which an honest answer is wrong."""
    async with swarm(audited_run(), replicas=2) as s:
        await s.until_serving()
        accuser: Any = s.peers["s1p1"]._states  # type: ignore
        copy = accuser._copy

        def made_up() -> Snapshot:
            tensors = {name: torch.full_like(t, 7.0) for name, t in copy().tensors.items()}
            return copy()._replace(tensors=tensors)

        async def refuse(request: Request) -> Answer:
            raise Refused("not to you")

        if given == "another":
            accuser._copy = made_up
        elif given == "none":
            s.network.transports["s1p0"].serve("state", refuse)
        elif given == "too much":
            monkeypatch.setattr("peers.audit.convictions.host_memory", lambda: (0, 0))
        referee = Referee(s.run, s.add_stranger().end.transport)
        proves: Any = referee
        said = Answered(1, t, 0, b"", b"", b"", b"", 0.0)
        evidence = WrongAnswer(
            accused="s1p0", statement=said, signature=b"", inputs=(), output_grads=(), outputs=(),
            input_grads=(),
        )  # fmt: skip
        for wrong, liar in ((True, "s1p0"), (False, "s1p1"), (None, None)):
            proves._proves = lambda *_, wrong=wrong: wrong
            found = await referee.liar(evidence, [], "s1p1")
            await asyncio.sleep(5.0)  # sources copy their state for one reader a quarter of the time
            assert found == (liar if t == 0 and given == "the same" else None)
        assert MAX_TRIES == 3 and (given == "too much") == referee.may_judge("s1p0")
        assert referee.may_judge("s1p1")


async def test_a_trainer_asks_about_a_peer_that_tells_it_old_news() -> None:
    """One that all had left out led a trainer back to version 0, again and again: it had the most voice."""
    async with swarm(audited_run(), replicas=3) as s:
        await s.until_serving()
        for name in ("s0p1", "s0p2"):
            s.peers[name].convictions.convicted.add("s0p0")

        async def tell_old_news(request: Request) -> Answer:
            await asyncio.sleep(0.5)
            return Answer(pack(Watched(revision=1, version=0, status=RunStatus(run=s.run.id))))

        s.network.transports["s0p0"].serve("watch", tell_old_news)
        trainer = s.add_trainer(TRAINER)
        verdicts = trainer.verdicts
        await s.until(lambda: verdicts.convicted == {"s0p0"}, limit_s=60.0)
