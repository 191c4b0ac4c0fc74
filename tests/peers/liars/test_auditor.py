"""`swarm audit`: one that serves nothing computes contributions again, and the stage looks there, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from peers.audit.asking import AuditCaller
from peers.audit.auditor import Auditor
from peers.events import Note, Trouble
from peers.ports import Answer, Request
from peers.sim.device import SimDevice
from peers.sim.network import SimSigner
from swarm.errors import NotNow, NotReady, Refused, Stale
from swarm.manifest import Run
from swarm.model.reductions import vectors_digest
from swarm.model.stage import StageCompute
from swarm.protocol.ledger import Bitmap
from swarm.protocol.messages import Directive, ReplicaReport, StepDirective
from swarm.protocol.proofs import signed_report
from swarm.protocol.rounds import Proof, StepReport, round_id
from swarm.protocol.statements import sign
from swarm.protocol.sums import Projected
from swarm.wire.evidence import (
    AskConvicted,
    AskKept,
    AskProducts,
    Convicted,
    Products,
    Projecting,
    ShowEvidence,
    WrongContribution,
)
from swarm.wire.messages import OpenHeld, PeerStatus, pack, unpack
from tests.peers import sybils
from tests.peers.admitted import OTHER as AUDITOR
from tests.peers.admitted import admitting
from tests.peers.alone import Line, Records
from tests.peers.liars.test_false_answers import LIES as ANSWERS
from tests.peers.liars.test_false_answers import TRAINER, accused, audited_run, lie
from tests.peers.liars.test_false_contributions import LIES, add_falsely
from tests.peers.lies import coordinate_all, direct_falsely
from tests.peers.loops import JOB_S, Swarm, swarm

pytestmark = [pytest.mark.virtual_time, pytest.mark.timeout(240)]


def run_of(*, steps: int, microbatches: int = 8) -> Run:
    return admitting(audited_run(steps=steps, microbatches=microbatches), TRAINER, AUDITOR)


def add_auditor(s: Swarm, *stages: int) -> Auditor:
    end = s.network.join(AUDITOR)

    def build(stage: int) -> StageCompute:
        return StageCompute(s.run, stage)

    auditor = Auditor(
        s.run, end.transport, end.directory, SimDevice(s.dice, JOB_S), stages or range(s.run.S), build,
        s.events.append,
    )  # fmt: skip
    s.start(end, auditor.run())
    return auditor


async def play(run: Run, liar: str | None = None, *, audits: bool = True) -> tuple[Swarm, Auditor | None]:
    """Run beside a liar so bold that one look in 60,000 misses it: its own chance decides an auditor's."""
    async with swarm(run, replicas=3) as s:
        await s.until_serving()
        if liar is not None:
            add_falsely(s.peers[liar], 1000.0)
        for peer in s.peers.values():  # they look where the auditor points
            peer.contribution_audits._screen.strangest = lambda *_: None  # type: ignore[method-assign]
        s.add_trainer(TRAINER, window=1)
        auditor = add_auditor(s) if audits else None
        await s.until(lambda: all(p.core.version >= run.steps for n, p in s.peers.items() if n != liar))
        await asyncio.sleep(10.0)
        return s, auditor


@pytest.mark.slow
async def test_honest_contributions_fit_and_the_auditor_ends_with_the_run() -> None:
    s, auditor = await play(run_of(steps=8))
    assert auditor is not None and auditor.audited >= 8 and not auditor.found
    assert not accused(s) and not s.seen(Trouble)
    assert s.tasks[AUDITOR].done()
    assert s.seen(Note)[-1].text == f"{auditor.audited} contributions were computed again"
    assert all((row == 8).all() for row in s.count_matrix().values())


async def test_of_two_that_both_gave_the_last_version_alone_once_both_are_asked_again() -> None:
    """An auditor that asked each time the one that it had not asked before did not end with the run."""
    async with swarm(run_of(steps=2), replicas=2) as s:
        await s.until_serving()
        s.add_trainer(TRAINER)
        await s.until(lambda: all(peer.core.version == 2 for peer in s.peers.values()))
        auditor: Any = add_auditor(s, 0)
        auditor._gave_alone[0] = {"s0p0"}
        await s.until(lambda: s.tasks[AUDITOR].done(), limit_s=60.0)
        alone = [note.text for note in s.seen(Note) if "one peer alone gives version 2" in note.text]
        assert len(alone) == 1


async def test_that_nobody_serves_a_stage_is_said_once() -> None:
    """It was said twice a second, for as long as that lasted."""
    said, line = list[Any](), Line(AUDITOR)
    auditor: Any = Auditor(run_of(steps=2), line, Records(), Any, range(2), Any, said.append)  # type: ignore
    for stage in (0, 1, 0, 1):
        assert not await auditor._visit(stage)
    auditor._say(0, "it is there again")
    await auditor._visit(0)
    nobody = [f"could not download stage {stage}: no peer serves it" for stage in (0, 1, 0)]
    assert [note.text for note in said] == [*nobody[:2], "it is there again", nobody[2]]


@pytest.mark.slow
@pytest.mark.parametrize("audits", [True, False])
async def test_what_an_auditor_finds_the_stage_finds_as_well_and_nobody_does_without_it(audits: bool) -> None:
    s, auditor = await play(run_of(steps=5, microbatches=16), "s1p1", audits=audits)
    assert accused(s) == ({"s1p1"} if audits else set())
    if auditor is not None:
        assert auditor.found == {"s1p1"}
        said = s.seen(Trouble)[0].text
        assert said.startswith("stage 1, step ") and "peer s1p1 added something else than its" in said
        end = "were computed again; other work was signed by s1p1"
        assert any(note.text.endswith(end) for note in s.seen(Note))


@pytest.mark.parametrize("kind", ["sign flip", "zero"])
async def test_an_answer_that_a_caller_got_is_computed_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sum is true, and its receipt is what its caller has. Callers have nothing computed again."""
    monkeypatch.setattr(AuditCaller, "answered", lambda *_: None)
    run = run_of(steps=10)
    async with swarm(run, replicas=(1, 3, 1)) as s:
        await s.until_serving()
        lie(s.peers["s1p1"], ANSWERS[kind])
        s.add_trainer(TRAINER, window=1)
        auditor = add_auditor(s, 1)
        await s.until(lambda: auditor.found or "s1p1" in s.peers["s1p0"].convictions.convicted)
        assert auditor.found == {"s1p1"}
        said = s.seen(Trouble)[0].text
        assert said.startswith("stage 1: peer s1p1 answered microbatch (")


async def test_who_passes_all_on_to_a_stranger_has_what_it_adds_audited_as_well() -> None:
    """That may be a name of its own, which signs what suits: but here its sum is none of what it shows."""
    run = admitting(audited_run(steps=6), sybils.TRAINER, AUDITOR)
    async with swarm(run, replicas=(1, 3, 2)) as s:
        sybils.give_voice(s, *(name for name in s.peers if name != "s2p1"))
        await s.until_serving()
        add_falsely(s.peers["s1p1"], 1000.0)
        for peer in s.peers.values():  # they look where the auditor points
            peer.contribution_audits._screen.strangest = lambda *_: None  # type: ignore[method-assign]
        known = s.network.peers["s2p0"].transport
        honest, most = known.handlers["work"]

        async def not_of_the_liar(request: Request) -> Answer:
            if request.peer == "s1p1":
                raise NotNow("it is another's turn", retry_after_s=0.1)
            return await honest(request)

        known.serve("work", not_of_the_liar, max_body_bytes=most)
        s.add_trainer(sybils.TRAINER, window=1)
        auditor = add_auditor(s, 1)
        await s.until(lambda: auditor.found or s.finished, limit_s=60.0)
        assert auditor.found == {"s1p1"}


async def test_who_gives_an_auditor_a_result_slowly_has_it_miss_no_contribution() -> None:
    """It says that it has taken each step, so that it is asked for the result, and is slow: it was waited for
    until all was forgotten.
    """
    run = run_of(steps=12)
    async with swarm(run, replicas=(1, 3, 1)) as s:
        await s.until_serving()
        add_falsely(s.peers["s1p1"], 1000.0)
        for peer in s.peers.values():  # they look where the auditor points
            peer.contribution_audits._screen.strangest = lambda *_: None  # type: ignore[method-assign]
        liar = s.network.peers["s1p1"].transport
        status, (held, most) = liar.handlers["status"][0], liar.handlers["held"]

        async def is_further(request: Request) -> Answer:
            said = unpack((await status(request)).header, PeerStatus)
            return Answer(pack(msgspec.structs.replace(said, version=min(run.steps, said.version + 1))))

        async def slowly(request: Request) -> Answer:
            if request.peer == AUDITOR:
                await asyncio.sleep(30.0)
            return await held(request)

        liar.serve("status", is_further)
        liar.serve("held", slowly, max_body_bytes=most)
        s.add_trainer(TRAINER, window=1)
        auditor = add_auditor(s, 1)
        await s.until(lambda: auditor.found or s.finished, limit_s=120.0)
        assert auditor.found == {"s1p1"}


async def test_an_answer_that_a_member_hides_is_found_by_its_signature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It shows another one than it gave, which its caller has signed: of that nothing was said."""
    monkeypatch.setattr(AuditCaller, "answered", lambda *_: None)
    async with swarm(run_of(steps=10), replicas=(1, 3, 1)) as s:
        await s.until_serving()
        liar = s.peers["s1p1"]
        compute: Any = liar.core.compute
        forward = compute.forward
        lie(liar, ANSWERS["sign flip"])
        compute.forward = forward
        honest, _ = liar.core.transport.handlers["kept"]

        async def others(request: Request) -> Answer:
            answer = await honest(request)
            if not unpack(request.header, AskKept).made:
                return answer
            return Answer(answer.header, [*answer.body[:-1], bytes(memoryview(answer.body[-1]).nbytes)])

        liar.core.transport.serve("kept", others)
        s.add_trainer(TRAINER, window=1)
        auditor = add_auditor(s, 1)
        await s.until(lambda: auditor.found or s.finished)
        assert auditor.found == {"s1p1"}
        assert s.seen(Trouble)[0].text.endswith("with something else than it shows")


async def test_several_threads_of_an_auditor_compute_what_they_may_not_at_once_one_after_the_other() -> None:
    async with swarm(run_of(steps=1), replicas=(1, 2, 1)) as s:
        await s.until_serving()
        auditor: Any = add_auditor(s)
        build, built = auditor._build, list[Any]()
        auditor._build = lambda stage: built.append(build(stage)) or built[-1]
        await s.until(lambda: built)
        await asyncio.sleep(1.0)
        assert built[0]._function.lock is auditor._device.books


async def test_a_crowd_of_strangers_does_not_keep_an_auditor_from_those_that_take_part() -> None:
    """They say that they serve, and are in no round: to ask about one costs the auditor half a second."""
    run = admitting(audited_run(steps=4, microbatches=4), sybils.TRAINER, AUDITOR)
    async with swarm(run, replicas=(1, 3, 1)) as s:
        sybils.give_voice(s, *(f"s{stage}p{replica}" for stage in range(run.S) for replica in range(3)))
        await s.until_serving()
        for number in range(40):
            await sybils.add_liar(s, f"a{number:03}", 1, 0)
        s.add_trainer(sybils.TRAINER, window=1)
        auditor = add_auditor(s, 1)
        honest = list(s.peers.values())
        await s.until(lambda: all(peer.core.version >= run.steps for peer in honest))
        assert auditor.audited >= 2 and not auditor.found


async def test_of_what_a_replica_signed_the_others_tell_and_cannot_tell_anything_else() -> None:
    """The replica itself might show an auditor another signature than the round had."""
    run = run_of(steps=3)
    async with swarm(run, replicas=(1, 3, 1)) as s:
        await s.until_serving()
        mate, asked = s.network.peers["s1p0"].transport, list[tuple[str, str]]()
        honest, _ = mate.handlers["products"]

        async def others(request: Request) -> Answer:
            answer = await honest(request)
            told = unpack(answer.header, Products)
            sums = tuple(bytes(8) if one else b"" for one in told.said.sums)
            digests = tuple(bytes(32) for _ in told.said.contributions)
            said = msgspec.structs.replace(told.said, sums=sums, contributions=digests)
            return Answer(pack(msgspec.structs.replace(told, said=said)))

        mate.serve("products", others)
        s.add_trainer(TRAINER, window=1)
        auditor = add_auditor(s, 1)
        calls = s.network.peers[AUDITOR].transport
        call = calls.call

        async def noted(peer: str, method: str, header: bytes, *args: Any, **more: Any) -> Answer:
            if method == "products":
                asked.append((peer, unpack(header, AskProducts).member))
            return await call(peer, method, header, *args, **more)

        calls.call = noted  # type: ignore[method-assign]
        await s.until_finished()
        assert auditor.audited >= 2 and not auditor.found
        assert ("s1p0", "s1p1") in asked and all(peer != member for peer, member in asked)


async def test_who_shows_an_auditor_nothing_is_looked_at_by_its_stage() -> None:
    """A liar may know who audits. What it hides from that one, the replicas of its stage see."""
    run = run_of(steps=10)
    async with swarm(run, replicas=3) as s:
        await s.until_serving()
        liar = s.peers["s1p1"]
        add_falsely(liar, LIES["a tenth more"])
        honest, _ = s.network.peers["s1p1"].transport.handlers["kept"]

        async def hides(request: Request) -> Answer:
            if request.peer == AUDITOR:
                raise Stale("microbatch (0, 0) is not kept here", version=0)
            return await honest(request)

        s.network.peers["s1p1"].transport.serve("kept", hides)
        s.add_trainer(TRAINER, window=1)
        auditor = add_auditor(s, 1)
        others = [p for n, p in s.peers.items() if n != "s1p1" and p.stage == 1]
        await s.until(lambda: all("s1p1" in p.convictions.convicted for p in others))
        assert not auditor.found
        assert "s1p1 does not show what it added: microbatch (0, 0)" in s.seen(Trouble)[0].text


async def test_of_two_one_that_shows_an_auditor_nothing_does_not_say_that_its_step_is_over() -> None:
    """The other one alone says that: else nobody heard that there was nothing to see."""
    run = run_of(steps=4)
    async with swarm(run, replicas=(1, 2, 1)) as s:
        await s.until_serving()
        liar = s.network.peers["s1p1"].transport
        status, _ = liar.handlers["status"]

        async def hides(request: Request) -> Answer:
            raise Stale("microbatch (0, 0) is not kept here", version=0)

        async def is_further(request: Request) -> Answer:
            said = unpack((await status(request)).header, PeerStatus)
            return Answer(pack(msgspec.structs.replace(said, version=min(run.steps, said.version + 3))))

        liar.serve("kept", hides)
        liar.serve("status", is_further)
        s.add_trainer(TRAINER, window=1)
        add_auditor(s, 1)
        await s.until(lambda: s.finished, limit_s=120.0)
        told = [said for said in s.seen(Trouble) if "s1p1 does not show what it added" in said.text]
        assert len(told) > 1, "in the last step it cannot say that it is further"


@pytest.mark.parametrize(
    ("version", "voice"), [(2, ()), (4, ()), (2, ("s1p1",))], ids=["early", "last", "it alone has voice"]
)
async def test_of_two_one_that_gives_an_auditor_another_state_has_nobody_accused_and_ends_no_audit(
    version: int, voice: tuple[str, ...]
) -> None:
    """Of two with as much voice the newest state was believed: the honest one looked like a liar."""
    run = admitting(audited_run(steps=4), sybils.TRAINER if voice else TRAINER, AUDITOR)
    async with swarm(run, replicas=(1, 2, 1)) as s:
        sybils.give_voice(s, *voice)
        await s.until_serving()
        liar = s.network.peers["s1p1"].transport
        honest = dict(liar.handlers)
        sybils.StateLeases(run, liar, {1: sybils.MadeUp(run, 1, (version,))})
        for method in set(liar.handlers) & set(honest):
            if liar.handlers[method] is not honest[method]:
                only_to(liar, method, AUDITOR, honest[method][0])
        s.add_trainer(run.admission.trainers[0], window=1)
        auditor = add_auditor(s, 1)
        await s.until_version(3)
        assert not s.tasks[AUDITOR].done()
        await s.until(lambda: s.finished, limit_s=120.0)
        assert auditor.found <= {"s1p1"}, "its own work does not fit what it gives"
        assert auditor.audited or voice, "the other one is audited with what that gives"
        assert all("peer s1p1 " in said.text for said in s.seen(Trouble))
        assert any("one peer alone gives version" in said.text for said in s.seen(Note))


def only_to(transport: Any, method: str, reader: str, honest: Any) -> None:
    """What a method says now is for one reader; others hear what is `honest`."""
    lie, most = transport.handlers[method]

    async def answer(request: Request) -> Answer:
        return await (lie if request.peer == reader else honest)(request)

    transport.serve(method, answer, max_body_bytes=most)


async def test_an_auditor_cannot_have_an_honest_replica_left_out_and_is_heard_once_in_a_while() -> None:
    run = run_of(steps=3)
    async with swarm(run, replicas=(1, 3, 1)) as s:
        await s.until_serving()
        end = s.network.join(AUDITOR)
        s.add_trainer(TRAINER)
        await s.until_version(1)

        async def accuse(t: int, teller: str) -> None:
            said = Projected(1, t, "r", (), (), ())
            evidence = WrongContribution(
                accused="s1p2", statement=said, signature=sign(SimSigner("s1p2"), run.id, said)
            )
            show = pack(ShowEvidence(run=run.id, evidence=evidence))
            await s.network.peers[teller].transport.call("s1p0", "evidence", show, deadline_s=1.0)

        await accuse(1, end.peer_id)
        with pytest.raises(Refused, match="may name a suspect once in 20 steps"):
            await accuse(20, end.peer_id)
        s.network.join("stranger")
        with pytest.raises(Refused, match="may name a suspect"):
            await accuse(40, "stranger")
        await s.until_finished()
        assert s.peers["s1p0"].contribution_audits.audited > 0 and not accused(s)


async def test_an_auditor_convicts_nobody_alone_of_two() -> None:
    run = admitting(audited_run(steps=6), sybils.TRAINER, AUDITOR)
    async with swarm(run, replicas=2) as s:
        sybils.give_voice(s, *s.peers)
        await s.until_serving()
        end = s.network.join(AUDITOR)
        s.add_trainer(sybils.TRAINER)
        await s.until_version(1)
        said = Projected(1, 1, "r", (), (), ())
        signature = sign(SimSigner("s1p1"), run.id, said)
        evidence = WrongContribution(accused="s1p1", statement=said, signature=signature)
        show = pack(ShowEvidence(run=run.id, evidence=evidence))
        calls = (end.transport.call(peer, "evidence", show, deadline_s=20.0) for peer in s.peers)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(answer, Refused) for answer in answers) >= 4
        await s.until_finished()
        assert not accused(s)


async def test_an_auditor_looks_at_a_step_once() -> None:
    """The second time nothing of it is shown, as if an honest replica had something to hide."""
    run = run_of(steps=4)
    async with swarm(run, replicas=(1, 3, 1)) as s:
        await s.until_serving()
        end, device = s.network.join(AUDITOR), SimDevice(s.dice, JOB_S)
        compute = StageCompute(run, 1)
        auditor = Auditor(run, end.transport, end.directory, device, [1], lambda _: compute, s.events.append)
        await end.directory.lookup_all()
        device.start()
        s.add_trainer(TRAINER, steps=1)
        await s.until_version(1)
        for _ in range(2):
            await auditor._audit_step(compute, 0, None)  # type: ignore
        device.stop()
        assert auditor.audited and not s.seen(Trouble)


async def test_only_auditors_are_shown_what_replicas_keep_and_each_microbatch_once() -> None:
    run = run_of(steps=4)
    async with swarm(run, replicas=(1, 2, 1)) as s:
        await s.until_serving()
        for name in (AUDITOR, "stranger"):
            s.network.join(name)
        s.add_trainer(TRAINER, steps=2)
        await s.until_version(2)

        async def ask(caller: str, method: str, question: Any) -> Answer:
            calls = s.network.peers[caller].transport
            return await calls.call("s1p0", method, pack(question), max_answer_bytes=1 << 20, deadline_s=9.0)

        products = AskProducts(run=run.id, t=1, member="s1p1")
        assert await ask(AUDITOR, "products", products)
        with pytest.raises(NotReady, match="no products of step 2 are known here"):
            await ask(AUDITOR, "products", AskProducts(run=run.id, t=2, member="s1p1"))
        with pytest.raises(Refused, match="the owner of a run audits it, and the trainers that its manifest"):
            await ask("stranger", "products", products)
        applied = s.peers["s1p0"].core.applied
        assert applied is not None
        kept = [AskKept(run=run.id, t=applied.t, m=m, made=False) for m in applied.kept]
        for question in kept:
            assert await ask(AUDITOR, "kept", question)
        with pytest.raises(Refused, match="was shown to this peer before"):
            await ask(AUDITOR, "kept", kept[0])
        assert await ask("s1p1", "kept", kept[0]) and await ask("s1p1", "kept", kept[0])
        with pytest.raises(NotNow, match="is not announced at stage 1"):
            await ask("stranger", "kept", kept[0])


async def test_one_that_alone_has_voice_is_audited_with_the_state_that_it_gives() -> None:
    """It cannot have that fit what it added, and frames no other with it."""
    run = admitting(audited_run(steps=12), sybils.TRAINER, AUDITOR)
    async with swarm(run, replicas=(1, 2, 1)) as s:
        sybils.give_voice(s, "s1p1")
        await s.until_serving()
        add_falsely(s.peers["s1p1"], 1000.0)
        for peer in s.peers.values():  # they look where the auditor points
            peer.contribution_audits._screen.strangest = lambda *_: None  # type: ignore[method-assign]
        s.add_trainer(sybils.TRAINER, window=1)
        auditor = add_auditor(s, 1)
        await s.until(lambda: auditor.found, limit_s=60.0)
        assert auditor.found == {"s1p1"}


async def test_of_two_one_whose_sum_the_other_and_an_auditor_find_false_is_left_out_by_all() -> None:
    """Between the words of the two nobody else could decide: the run stood still."""
    run = admitting(audited_run(steps=5), sybils.TRAINER, AUDITOR)
    async with swarm(run, replicas=(1, 2, 1)) as s:
        sybils.give_voice(s, *s.peers)
        await s.until_serving()
        add_falsely(s.peers["s1p1"], 1000.0)
        trainer = s.add_trainer(sybils.TRAINER, window=1)
        auditor = add_auditor(s, 1)
        honest = [peer for name, peer in s.peers.items() if name != "s1p1"]
        await s.until(lambda: all(peer.core.version >= run.steps for peer in honest), limit_s=200.0)
        assert auditor.found == {"s1p1"}
        assert all(peer.convictions.convicted == {"s1p1"} for peer in honest)
        assert trainer.verdicts.convicted == {"s1p1"}


def accuse_falsely(s: Swarm, teller: str, accused: str) -> None:
    """Have one say to all that ask that it has convicted another."""

    async def accuses(request: Request) -> Answer:
        return Answer(pack(Convicted(yes=unpack(request.header, AskConvicted).peer == accused)))

    s.network.peers[teller].transport.serve("convicted", accuses)


async def test_of_two_an_honest_one_that_shows_an_auditor_nothing_is_left_out_by_nobody() -> None:
    """It may have paused, or lost its sum: with the word of the other one all others left it out for good."""
    run = admitting(audited_run(steps=2, microbatches=4), sybils.TRAINER, AUDITOR)
    async with swarm(run, replicas=(1, 2, 1)) as s:
        sybils.give_voice(s, *s.peers)
        await s.until_serving()

        async def paused(request: Request) -> Answer:
            raise NotNow("this peer is paused", retry_after_s=1.0)

        s.network.peers["s1p1"].transport.serve("kept", paused)
        accuse_falsely(s, "s1p0", "s1p1")
        trainer = s.add_trainer(sybils.TRAINER, window=1)
        add_auditor(s, 1)
        await s.until_finished(limit_s=120.0)
        assert any("s1p1 does not show what it added" in said.text for said in s.seen(Trouble))
        assert not accused(s) and not trainer.verdicts.convicted


OTHER_SUMS = "peer s1p1 added something else than its"


def tell_of_another_round(s: Swarm, teller: str, member: str) -> None:
    """Have one tell auditors that a member of stage 1 signed something else: in a round of each step that was
    given up.
    """
    transport = s.network.peers[teller].transport
    honest, _ = transport.handlers["products"]

    async def other(request: Request) -> Answer:
        ask, answer = unpack(request.header, AskProducts), await honest(request)
        plan, said = unpack(answer.header, Products).plan, unpack(answer.header, Products).said
        if request.peer != AUDITOR or ask.member != member:
            return answer
        number, of = plan.number + 1, (plan.members, plan.ledgers, plan.parts)
        name = round_id(s.run.id, 1, ask.t, number, *of)
        nonces, sums = tuple(bytes(16) for _ in said.nonces), tuple(bytes(len(one)) for one in said.sums)
        signed = Projected(1, ask.t, name, nonces, tuple(bytes(32) for _ in said.contributions), sums)
        told = Projecting(
            contributions=signed.contributions, nonces=nonces, sums=sums,
            signature=sign(SimSigner(ask.member), s.run.id, signed),
        )  # fmt: skip
        plan = msgspec.structs.replace(plan, number=number, round=name)
        return Answer(pack(Products(plan=plan, said=told)))

    transport.serve("products", other)


async def test_of_two_an_honest_one_is_not_audited_by_what_it_signed_in_a_round_that_was_given_up() -> None:
    """It was sent something else since. With the auditor's word all left it out for the other one's."""
    run = admitting(audited_run(steps=3, microbatches=4), sybils.TRAINER, AUDITOR)
    async with swarm(run, replicas=(1, 2, 1)) as s:
        sybils.give_voice(s, *s.peers)
        await s.until_serving()
        accuse_falsely(s, "s1p0", "s1p1")
        tell_of_another_round(s, "s1p0", "s1p1")
        trainer = s.add_trainer(sybils.TRAINER, window=1)
        auditor = add_auditor(s, 1)
        await s.until_finished(limit_s=120.0)
        said = [trouble.text for trouble in s.seen(Trouble) if OTHER_SUMS in trouble.text]
        assert said and all("or signed other sums since" in text for text in said)
        assert not auditor.found and not accused(s) and not trainer.verdicts.convicted


async def test_a_liar_that_says_otherwise_of_itself_to_an_auditor_is_found_by_its_stage() -> None:
    async with swarm(run_of(steps=8), replicas=(1, 3, 1)) as s:
        await s.until_serving()
        add_falsely(s.peers["s1p1"], 1000.0)
        for peer in s.peers.values():  # they look where the auditor points
            peer.contribution_audits._screen.strangest = lambda *_: None  # type: ignore[method-assign]
        tell_of_another_round(s, "s1p1", "s1p1")
        s.add_trainer(TRAINER, window=1)
        auditor = add_auditor(s, 1)
        others = [s.peers[name] for name in ("s1p0", "s1p2")]
        await s.until(lambda: all("s1p1" in peer.convictions.convicted for peer in others))
        assert not auditor.found and "or signed other sums since" in s.seen(Trouble)[0].text


def take_steps_alone(s: Swarm, liar: str, other: str) -> None:
    """It has the other one of its stage retract all, and counts only what it has itself."""
    protocol = s.peers[liar].coordination.protocol
    stage: Any = protocol._coordinator  # type: ignore
    present = stage.present

    def directive(peer: str, said: Directive) -> Directive:
        if peer != other:
            return said
        undo = tuple(StepDirective(t=step.t, retract=Bitmap(s.done(other, step.t))) for step in said.steps)
        return msgspec.structs.replace(said, steps=undo)

    stage.present = lambda: {peer: report for peer, report in present().items() if peer != other}
    direct_falsely(protocol, directive)


async def play_alone(
    factor: float, also: Callable[[Swarm], None] = lambda s: None, steps: int = 3
) -> tuple[Swarm, Auditor]:
    """Of two with voice in stage 1 s1p0 takes each step alone; it adds `factor` times its gradients."""
    run = admitting(audited_run(steps=steps, microbatches=4), sybils.TRAINER, AUDITOR)
    async with swarm(run, replicas=(1, 2, 1)) as s:
        sybils.give_voice(s, *s.peers, steps={"s1p0": 80})
        await s.until_serving()
        take_steps_alone(s, "s1p0", "s1p1")
        add_falsely(s.peers["s1p0"], factor)
        also(s)
        coordinate_all(s)
        s.add_trainer(sybils.TRAINER, window=1)
        auditor = add_auditor(s, 1)
        await s.until_finished(limit_s=200.0)
        return s, auditor


def of_steps(s: Swarm) -> set[str]:
    """What auditors said of each step, without its number."""
    return {said.text.split(": ", 1)[1] for said in s.seen(Trouble)}


ALONE = "its result was signed by peer s1p0 alone, and is not that of the microbatches that"


@pytest.mark.parametrize("factor", [1.0, -1.0])
async def test_of_two_one_that_takes_steps_alone_is_audited_by_their_results(factor: float) -> None:
    """The other one, which had no part in them, knows nothing of what was added; so nothing was audited."""
    s, auditor = await play_alone(factor)
    assert auditor.audited and not accused(s)
    assert auditor.found == (set() if factor == 1.0 else {"s1p0"})
    assert of_steps(s) == (set() if factor == 1.0 else {f"{ALONE} s1p0 kept"})


def give_auditor_the_negative(s: Swarm, giver: str, signers: Sequence[str], *, forged: bool = False) -> None:
    """Have one give the auditor the negative of each result; in its commit the `signers`, if any, say so."""
    core, transport = s.peers[giver].core, s.network.peers[giver].transport
    honest, _ = transport.handlers["held"]

    async def negative(request: Request) -> Answer:
        step = core.applied
        if request.peer != AUDITOR or step is None or step.t != unpack(request.header, OpenHeld).t:
            return await honest(request)
        reduced, held, commit = step.reduced, step.prepared, step.commit
        assert reduced is not None and held is not None and commit is not None
        said = msgspec.structs.replace(held, digest=vectors_digest([-reduced], on_device=False))
        report = ReplicaReport(
            run=s.run.id, stage=1, generation=core.generation, version=core.version,
            steps=(StepReport(t=step.t, prepared=said),),
        )  # fmt: skip
        proofs = list[Proof]()
        for name in signers:
            (signed,) = signed_report(report, SimSigner("nobody" if forged else name), None).steps
            assert signed.prepared is not None
            proofs.append(Proof(name, signed.prepared))
        if proofs:
            step.commit = msgspec.structs.replace(
                commit, proofs=(commit.proofs[0], tuple(proofs), *commit.proofs[2:])
            )
        step.reduced = -reduced
        try:
            return await honest(request)
        finally:
            step.reduced, step.commit = reduced, commit

    transport.serve("held", negative)


@pytest.mark.parametrize("signers", [("s1p0",), ("x", "y")])
async def test_who_takes_steps_alone_shows_an_auditor_no_other_result(signers: tuple[str, ...]) -> None:
    """A true one, besides; or one of which it seems that several signed it."""
    s, auditor = await play_alone(-1.0, lambda s: give_auditor_the_negative(s, "s1p0", signers), steps=4)
    assert auditor.found == {"s1p0"} and auditor.audited >= 2
    assert len([said for said in s.seen(Trouble) if ALONE in said.text]) == auditor.audited


@pytest.mark.parametrize("signers", [(), ("s1p0",)])
async def test_who_was_left_out_has_an_auditor_blame_nobody(signers: tuple[str, ...]) -> None:
    """It gives another gradient than was signed, or a commit with a forged signature of that."""

    def also(s: Swarm) -> None:
        give_auditor_the_negative(s, "s1p1", signers, forged=True)

    s, auditor = await play_alone(1.0, also)
    assert not auditor.found and not s.seen(Trouble)


async def test_the_result_of_one_is_not_audited_with_a_state_that_another_alone_gives() -> None:
    """With one that was made up it would look false."""
    run = admitting(audited_run(steps=4), sybils.TRAINER, AUDITOR)
    async with swarm(run, replicas=(1, 2, 1)) as s:
        sybils.give_voice(s, *s.peers, steps={"s1p0": 80})
        await s.until_serving()
        take_steps_alone(s, "s1p0", "s1p1")
        s.add_trainer(sybils.TRAINER, steps=1)
        await s.until_version(1)
        end, device = s.network.join(AUDITOR), SimDevice(s.dice, JOB_S)
        compute = StageCompute(run, 1)
        auditor = Auditor(run, end.transport, end.directory, device, [1], lambda _: compute, s.events.append)
        await end.directory.lookup_all()
        device.start()
        for given_by, audited in (("s1p1", 0), ("s1p0", 1)):
            assert await auditor._audit_result(compute, 0, {given_by})  # type: ignore
            assert auditor.audited == audited
        device.stop()


async def test_who_alone_signed_is_not_blamed_for_what_another_kept() -> None:
    """One without voice has sent it something else than its microbatches add up to."""

    def also(s: Swarm) -> None:
        s.peers["s1p0"].contribution_audits._screen.strangest = lambda *_: None  # type: ignore[method-assign]
        add_falsely(s.add_peer("s1p2", 1), -1.0)

    s, auditor = await play_alone(1.0, also)
    assert f"{ALONE} s1p0 s1p2 kept" in of_steps(s) and not auditor.found


async def test_of_a_result_of_which_not_all_is_shown_an_auditor_says_so_and_blames_nobody() -> None:
    """An honest one may have it from another, which is gone."""

    async def hides(request: Request) -> Answer:
        raise Stale("microbatch (0, 0) is not kept here", version=0)

    s, auditor = await play_alone(1.0, lambda s: s.network.peers["s1p0"].transport.serve("kept", hides))
    assert not auditor.audited and not auditor.found and not s.seen(Trouble)
    assert any("alone, and not all that is in it is shown: microbatch" in said.text for said in s.seen(Note))
