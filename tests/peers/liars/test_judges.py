"""Who judges whether a peer lied: those that worked for the run, however many identities there are."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from peers.audit.answers import AT_ONCE
from peers.audit.convictions import BODIES_AT_ONCE, MAX_BODIES, PASS_ON_S
from peers.audit.kept import KEPT_S, MAX_GIVEN, MAX_GIVEN_TO_STRANGERS
from peers.audit.verdicts import MAX_TOLD
from peers.clock import now_s
from peers.events import PeerLost
from peers.incoming import AHEAD_S, TIMES, Places
from peers.ports import Answer, Buffer, Request
from peers.sim.network import SimSigner
from swarm.digest import DIGEST_BYTES
from swarm.errors import Busy, NotReady, Refused, Stale
from swarm.manifest import audit_run
from swarm.protocol.statements import Statement, sign
from swarm.protocol.sums import Contribution, Projected, Reduced
from swarm.records import NO_STAGE
from swarm.wire.evidence import (
    AskConvicted,
    AskKept,
    AuditAnswer,
    Audited,
    Convicted,
    FalseContribution,
    Heard,
    ShowEvidence,
    WrongAnswer,
    WrongContribution,
    WrongSum,
)
from swarm.wire.messages import pack
from swarm.wire.receipts import Answered
from tests.peers.liars.test_false_answers import audit
from tests.peers.loops import Swarm, swarm
from tests.peers.sybils import TRAINER, add_liar, admitting, give_voice
from tests.peers.tarpits import Trickle
from tests.seeds import some

pytestmark = pytest.mark.virtual_time

RUN = admitting(replace(audit_run(stages=2, steps=6, microbatches_per_step=8, seed=1), dtype="float32"))
PEERS = tuple(f"s{stage}p{replica}" for stage in range(2) for replica in range(3))
NOTHING = bytes(DIGEST_BYTES)


async def begun(s: Swarm) -> None:
    give_voice(s, *PEERS)
    await s.until_serving()
    s.add_trainer(TRAINER, steps=2)
    await s.until_version(2)
    await s.until(lambda: all(2 in peer.core.steps for peer in s.peers.values()))


async def crowd(s: Swarm, stage: int, count: int = MAX_TOLD + 6) -> list[str]:
    """Strangers that announce that they serve a stage; their ids come before those of others."""
    names = [f"a{number:03}" for number in range(count)]
    for name in names:
        await add_liar(s, name, stage, 2)
    await asyncio.sleep(1.0)
    return names


def signed(name: str, statement: Statement) -> bytes:
    return sign(SimSigner(name), RUN.id, statement)


def answer_of(name: str, t: int = 2) -> tuple[Answered, bytes]:
    """What a stranger signs that it answered."""
    said = Answered(1, t, 0, NOTHING, NOTHING, NOTHING, NOTHING, 1.0)
    return said, signed(name, said)


def accusation(name: str, t: int = 2) -> WrongAnswer:
    """What says of that answer that it is wrong."""
    said, signature = answer_of(name, t)
    return WrongAnswer(
        accused=name,
        statement=said,
        signature=signature,
        inputs=(),
        output_grads=(),
        outputs=(),
        input_grads=(),
    )


def lies(name: str) -> FalseContribution:
    """A lie of a stranger that all can see: it names a contribution that nobody signed."""
    said = Reduced(1, 2, "round", (Contribution("nobody", NOTHING, NOTHING, b""),), b"")
    return FalseContribution(accused=name, statement=said, signature=signed(name, said), place=0)


async def test_a_crowd_of_strangers_does_not_keep_what_a_stage_says_from_others() -> None:
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        await crowd(s, 1)
        for name in ("s1p0", "s1p1"):
            s.peers[name].convictions.convicted.add("s1p2")
        assert await s.peers["s0p0"].convictions.most_have_convicted(1, "s1p2")
        assert not await s.peers["s0p0"].convictions.most_have_convicted(1, "s1p1")


@pytest.mark.parametrize("judges", [1, 2])
async def test_nobody_convicts_alone_where_a_third_has_voice_however_much_its_own_is(judges: int) -> None:
    async with swarm(RUN, replicas=3) as s:
        give_voice(s, *PEERS, steps={"s1p0": 100, "s1p1": 20, "s1p2": 20})
        await s.until_serving()
        for name in ("s1p0", "s1p1")[:judges]:
            s.peers[name].convictions.convicted.add("s1p2")
        assert await s.peers["s0p0"].convictions.most_have_convicted(1, "s1p2") == (judges == 2)


async def test_all_are_told_of_a_liar_however_many_they_are() -> None:
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        names = [*await crowd(s, 0), *PEERS]
        told = s.network.peers
        s.peers["s1p0"].convictions.pass_on(lies("s1p2"), [])
        await s.until(
            lambda: all(told[name].transport.calls["evidence"] for name in names if name != "s1p0"),
            limit_s=40.0,
        )


async def test_evidence_reaches_those_with_voice_in_a_crowd_of_strangers() -> None:
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        await crowd(s, 1)
        teller = s.peers["s1p0"].convictions
        heard = [s.network.peers[name].transport.calls for name in ("s1p1", "s1p2", "s0p0")]
        before = [calls["evidence"] for calls in heard]
        teller.pass_on(lies("a000"), [])
        await asyncio.sleep(2.0)
        assert all(calls["evidence"] > n for calls, n in zip(heard, before, strict=True))


async def test_strangers_judge_no_answer_of_those_with_voice(monkeypatch: pytest.MonkeyPatch) -> None:
    """They say of each that it is wrong: then its callers would leave an honest peer alone."""
    audit(monkeypatch, share=1.0)
    async with swarm(RUN, replicas=2) as s:
        give_voice(s, *PEERS)
        await s.until_serving()
        for name in await crowd(s, 1, 9):

            async def says_that_it_is_wrong(request: Request) -> Answer:
                return Answer(pack(Audited(fits=False)))

            s.network.peers[name].transport.serve("audit", says_that_it_is_wrong)
        s.add_trainer(TRAINER)
        await s.until_version(RUN.steps)
        lost = [event for event in s.seen(PeerLost) if "computed again" in event.why]
        assert not [event for event in lost if event.peer in PEERS]


async def test_strangers_have_no_replica_audit_one_another() -> None:
    """Each holds a place of two for 10 s, and no other answer is computed again meanwhile."""
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        await add_liar(s, "a000", 0, 2)
        await asyncio.sleep(1.0)
        said, signature = answer_of("a001")
        ask = AuditAnswer(run=RUN.id, peer="a001", statement=said, signature=signature)
        with pytest.raises(Refused, match="has no voice"):
            await s.network.peers["a000"].transport.call("s1p0", "audit", pack(ask))


async def test_bodies_that_trickle_make_way_for_an_audit_that_waits() -> None:
    """Two of them, of one peer beside the stage, had all places for ever."""
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        said, signature = answer_of("s1p1")
        ask = pack(AuditAnswer(run=RUN.id, peer="s1p1", statement=said, signature=signature))
        serve = s.peers["s1p0"].answer_audits._serve_audit  # type: ignore
        held = [asyncio.ensure_future(serve(Trickle("s0p1", ask, [64]))) for _ in range(AT_ONCE)]
        await asyncio.sleep(20.0)
        assert not any(task.done() for task in held), "while no other waits they may come slowly"
        with pytest.raises(Busy):
            await s.network.peers["s0p0"].transport.call("s1p0", "audit", ask)
        assert (await s.network.peers["s0p0"].transport.call("s1p0", "audit", ask)).header
        ended = await asyncio.gather(*held, return_exceptions=True)
        assert all(isinstance(error, NotReady) for error in ended)


async def test_who_had_answers_computed_again_for_long_has_none_for_a_while() -> None:
    """Those of a stranger that shows nothing for 10 s had both places of each replica for ever, so that no
    other answer was computed again; those of honest peers had the stage compute twice as much.
    """
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        await add_liar(s, "a001", 1, 2)
        s.network.peers["a001"].transport.serve("kept", never)
        await asyncio.sleep(1.0)
        said, signature = answer_of("a001")
        ask = pack(AuditAnswer(run=RUN.id, peer="a001", statement=said, signature=signature))

        def asks(caller: str) -> asyncio.Task[Answer]:
            return asyncio.create_task(s.network.peers[caller].transport.call("s1p0", "audit", ask))

        first = [asks("s0p1") for _ in range(AT_ONCE)]
        await asyncio.sleep(1.0)
        with pytest.raises(Busy):
            await asks("s0p0")
        await asyncio.wait(first)
        with pytest.raises(Busy, match="enough"):
            await asks("s0p1")
        assert await asks("s0p0")
        await asyncio.sleep(AT_ONCE * TIMES * KEPT_S)
        assert await asks("s0p1")


@pytest.mark.parametrize(("callers", "least"), [(1, 58), (3, 55)])
async def test_several_that_take_turns_leave_a_place_to_others(callers: int, least: int) -> None:
    """Of 60 questions of another caller three of them had 25 refused."""
    places, answered = Places(AT_ONCE, each=AT_ONCE), 0

    async def has_places(caller: str) -> None:
        while True:
            with contextlib.suppress(Busy), places.one_for(caller):
                await asyncio.sleep(5.0)
            await asyncio.sleep(0.05)

    taking = [asyncio.create_task(has_places(f"a{n}")) for n in range(callers) for _ in range(AT_ONCE)]
    for _ in range(60):
        await asyncio.sleep(4.7)
        with contextlib.suppress(Busy), places.one_for("honest"):
            await asyncio.sleep(0.3)
            answered += 1
    for one in taking:
        one.cancel()
    await asyncio.gather(*taking, return_exceptions=True)
    assert answered >= least


async def test_who_reads_nothing_has_few_microbatches_kept_for_it() -> None:
    """A stranger at the stage had those of one step after the other held, 768 at once, when all were done.
    Of a crowd each had as many as one.
    """
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        strangers = await crowd(s, 1, MAX_GIVEN_TO_STRANGERS // MAX_GIVEN + 1)
        steps = [(name, s.peers[name].core.applied) for name in ("s1p0", "s1p1", "s1p2")]
        kept_by = [(name, m) for m in range(RUN.M) for name, step in steps if step and step.shown(m, b"")]
        name, m = kept_by[0]
        ask = pack(AskKept(run=RUN.id, t=1, m=m, made=False))
        kept, _ = s.network.peers[name].transport.handlers["kept"]
        unread = [await kept(Trickle("a000", ask, [])) for _ in range(MAX_GIVEN)]
        with pytest.raises(Busy):
            await kept(Trickle("a000", ask, []))
        assert await kept(Trickle("a001", ask, [])), "others wait for none of it"
        unread.pop()
        assert await kept(Trickle("a000", ask, []))
        for one in strangers[1:]:
            with contextlib.suppress(Busy):
                unread += [await kept(Trickle(one, ask, [])) for _ in range(MAX_GIVEN)]
        assert len(unread) <= MAX_GIVEN_TO_STRANGERS
        assert all([await kept(Trickle(one, ask, [])) for one in PEERS[3:]]), "who has voice waits for none"


async def test_who_shows_what_proves_nothing_is_not_heard_again_and_again() -> None:
    """One with voice, and a stranger that signs what it answered truly, had each replica compute that again
    without end.
    """
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        (accused,) = await crowd(s, 1, 1)
        judged, judges = 0, s.peers["s1p0"].convictions

        async def judge(evidence: WrongAnswer, body: object) -> bool:
            nonlocal judged
            judged += 1
            await asyncio.sleep(0.1)
            return False

        judges.judge = judge
        evidence = accusation(accused)
        show = pack(ShowEvidence(run=RUN.id, evidence=evidence))
        began = now_s()
        while now_s() < began + 60.0:
            with contextlib.suppress(Refused, Busy):
                await s.network.peers["s1p1"].transport.call("s1p0", "evidence", show, [b"large"])
        assert AHEAD_S / TIMES / 0.1 <= judged <= (AHEAD_S + 60.0) / TIMES / 0.1 + 1


async def test_strangers_that_convict_themselves_do_not_hide_who_lied() -> None:
    """Of very many some are told: those with voice first."""
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        s.peers["s0p0"].convictions.convicted.add("s1p2")
        for name in await crowd(s, 1):
            s.peers["s0p0"].convictions.convict(lies(name))
        assert len(s.peers["s0p0"].convictions.convicted) > MAX_TOLD
        stranger = s.add_stranger()
        told = await stranger.ask("s0p0", "convicted", AskConvicted(run=RUN.id, peer=""), Convicted)
        assert len(told.others) == MAX_TOLD and told.others[0] == "s1p2"
        assert s.peers["s0p0"].convictions.convict(lies("s1p1"))
        shown = AskConvicted(run=RUN.id, peer="s1p1", show=True)
        told = await stranger.ask("s0p0", "convicted", shown, Convicted)
        assert told.evidence == lies("s1p1"), "it is shown to keepers, too"


async def test_no_evidence_is_kept_against_who_is_in_no_record() -> None:
    """Identities cost nothing, and each that is convicted is remembered."""
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        stranger = s.add_stranger()
        with pytest.raises(Refused, match="no peer here knows"):
            await stranger.send("s0p0", "evidence", ShowEvidence(run=RUN.id, evidence=lies("made up")))
        assert not s.peers["s0p0"].convictions.convicted


async def test_no_evidence_is_heard_of_a_stage_that_there_is_not() -> None:
    """Peers remember of each stage who has voice there: a stranger could name one after the other."""
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        stranger, *_ = await crowd(s, 1, 1)
        known = s.peers["s0p0"].convictions._voices._electorate._known  # type: ignore
        for stage in (RUN.S, -5, 1 << 40):
            said = Projected(stage, 0, "r", (), (), ())
            evidence = WrongContribution(
                accused=stranger, statement=said, signature=sign(SimSigner(stranger), RUN.id, said)
            )
            show = pack(ShowEvidence(run=RUN.id, evidence=evidence))
            with pytest.raises(Refused, match="did not sign what it is accused of"):
                await s.network.peers[stranger].transport.call("s0p0", "evidence", show)
        assert set(known) <= {NO_STAGE, *range(RUN.S)}


async def test_one_of_two_that_convicts_itself_towards_the_other_holds_nothing_up() -> None:
    """The other one would make no step with it any more, and nobody else know why."""
    async with swarm(RUN, replicas=2) as s:
        give_voice(s, *PEERS)
        await s.until_serving()
        s.add_trainer(TRAINER)
        await s.until_version(2)
        show = pack(ShowEvidence(run=RUN.id, evidence=lies("s1p1")))
        with contextlib.suppress(Refused):
            await s.peers["s1p1"].core.transport.call("s1p0", "evidence", show)
        await s.until_version(RUN.steps, limit_s=30.0)


@pytest.mark.parametrize("teller", ["s1p1", "a000"])
async def test_a_stranger_that_one_replica_alone_hears_of_has_nobody_left_out(teller: str) -> None:
    """It takes part in rounds all the same: who refuses them would be taken for the liar."""
    async with swarm(RUN, replicas=3) as s:
        give_voice(s, *PEERS)
        s.add_peer("a", 1)
        await s.until_serving()
        await crowd(s, 1, 1)
        s.add_trainer(TRAINER)
        await s.until(lambda: all(s.peers[name].core.version >= 2 for name in PEERS))
        show = pack(ShowEvidence(run=RUN.id, evidence=lies("a")))
        with contextlib.suppress(Refused):
            await s.network.peers[teller].transport.call("s1p2", "evidence", show)
        await s.until(lambda: all(s.peers[name].core.version >= RUN.steps for name in PEERS), limit_s=30.0)
        assert not any(s.peers[name].coordination.left_out for name in PEERS)
        assert s.peers["s1p2"].convictions.convicted == ({"a"} if teller in PEERS else set())


async def test_strangers_have_no_stage_asked_about_one_another() -> None:
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        teller, accused, *_ = await crowd(s, 1, 2)
        evidence = accusation(accused)
        show = pack(ShowEvidence(run=RUN.id, evidence=evidence))
        with pytest.raises(Refused, match="a replica of that stage has to say it, once"):
            await s.network.peers[teller].transport.call("s0p0", "evidence", show)
        assert not s.network.peers["s1p0"].transport.calls["convicted"]


async def test_no_body_of_evidence_is_taken_from_a_stranger() -> None:
    """It could have 256 of 64 MiB held at once, with a lie of its own."""
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        teller, accused, *_ = await crowd(s, 1, 2)
        show = pack(ShowEvidence(run=RUN.id, evidence=lies(accused)))
        with pytest.raises(Refused, match="a replica of that stage has to show it"):
            await s.network.peers[teller].transport.call("s0p0", "evidence", show, [b"large"])


async def test_no_body_of_evidence_is_taken_from_who_is_at_no_stage() -> None:
    """Keepers were taken for replicas of a stage of that number: four of them had all places for ever, and
    each peer verify 64 MiB after the other.
    """
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        for name in ("a000", "a001"):
            await add_liar(s, name, NO_STAGE, 2, state="keeping")
        await asyncio.sleep(1.0)
        said = Reduced(NO_STAGE, 2, "round", (Contribution("nobody", NOTHING, NOTHING, b""),), b"")
        lie = WrongSum(accused="a001", statement=said, signature=signed("a001", said), index=0, lists=(b"",))
        for body in ([b"large"], []):
            with pytest.raises(Refused, match="a replica of that stage has to s"):
                show = pack(ShowEvidence(run=RUN.id, evidence=lie))
                await s.network.peers["a000"].transport.call("s0p0", "evidence", show, body)


async def test_bodies_of_evidence_are_looked_at_one_of_each_peer_and_four_at_once() -> None:
    """Those with voice could have as many of 64 MiB held as they have calls."""
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        accused = await crowd(s, 1, 2)
        looked, done = list[str](), asyncio.Event()

        async def judge(evidence: WrongAnswer, body: object) -> bool:
            looked.append(evidence.accused)
            await done.wait()
            return False

        s.peers["s0p0"].convictions.judge = judge

        def shows(teller: str, liar: str) -> asyncio.Task[Answer]:
            said = Answered(int(teller[1]), 2, 0, NOTHING, NOTHING, NOTHING, NOTHING, 1.0)
            evidence = WrongAnswer(
                accused=liar, statement=said, signature=signed(liar, said), inputs=(), output_grads=(),
                outputs=(), input_grads=(),
            )  # fmt: skip
            show = pack(ShowEvidence(run=RUN.id, evidence=evidence))
            call = s.network.peers[teller].transport.call("s0p0", "evidence", show, [b"large"])
            return asyncio.create_task(call)

        calls = [shows("s1p0", accused[0])]
        await s.until(lambda: len(looked) == 1)
        with pytest.raises(Busy):
            await asyncio.wait_for(shows("s1p0", accused[1]), 5.0)
        calls += [shows(teller, accused[0]) for teller in ("s1p1", "s1p2", "s0p1")]
        await s.until(lambda: len(looked) == MAX_BODIES)
        with pytest.raises(Busy):
            await asyncio.wait_for(shows("s0p2", accused[0]), 5.0)
        done.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert all("does not show" in str(answer) for answer in answers)
        with pytest.raises(Refused, match="does not show"):
            await shows("s0p2", accused[1])


async def test_large_evidence_is_shown_to_two_at_a_time_and_told_to_those_whom_it_does_not_reach() -> None:
    """Over a line of 10 Mbit/s 24 MB reached nobody of a stage in 30 s, and nobody heard of the liar."""
    async with swarm(RUN, replicas=5) as s:
        give_voice(s, *(f"s{stage}p{replica}" for stage in range(2) for replica in range(5)))
        await s.until_serving()
        reached, told, most = list[str](), list[str](), 0

        def hears(name: str) -> None:
            async def evidence(request: Request) -> Answer:
                nonlocal most
                if not request.body_sizes:
                    told.append(name)
                    return Answer(pack(Heard()))
                reached.append(name)
                most = max(most, len(reached))
                await asyncio.sleep(20.0)
                reached.remove(name)
                if name == "s1p1":
                    await asyncio.sleep(1e6)
                return Answer(pack(Heard()))

            s.network.peers[name].transport.serve("evidence", evidence, max_body_bytes=1 << 20)

        for replica in range(1, 5):
            hears(f"s1p{replica}")
        evidence = accusation("s1p4")
        s.peers["s1p0"].convictions.pass_on(evidence, [b"large"])
        await asyncio.sleep(3 * PASS_ON_S)
        assert most == BODIES_AT_ONCE and told == ["s1p1"]


def added_falsely(name: str, stage: int) -> WrongContribution:
    """What a replica signed of its contribution to the first step."""
    said = Projected(stage, 0, "round", (), (), ())
    return WrongContribution(accused=name, statement=said, signature=signed(name, said))


async def never(request: Request) -> Answer:
    await request.accept()
    return await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("stage", some([0, 1], quick=[0]))
async def test_who_hears_that_a_peer_lied_waits_for_none_of_its_answers_any_more(stage: int) -> None:
    """Trainers hear of it, too. A call that passes two stages has 10 s."""
    liar, finders = f"s{stage}p1", (f"s{stage}p0", f"s{stage}p2")
    async with swarm(RUN, replicas=3) as s:
        give_voice(s, *PEERS)
        await s.until_serving()
        s.peers[liar].core.transport.serve("work", never, max_body_bytes=1 << 20)
        trainer = s.add_trainer(TRAINER)
        await asyncio.sleep(2.0)  # all else is done
        for name in finders:
            s.peers[name].convictions.convict(added_falsely(liar, stage))
            s.peers[name].convictions.pass_on(added_falsely(liar, stage), [])
        honest = [peer for name, peer in s.peers.items() if name != liar]
        await s.until(lambda: all(peer.core.version >= 2 for peer in honest), limit_s=2.0)
        assert trainer.verdicts.convicted == {liar}


@pytest.mark.parametrize("what", ["answer", "contribution"])
async def test_a_replica_that_cannot_look_for_itself_believes_most_of_its_stage(what: str) -> None:
    """Who was left out is in no round any more, and of a step that is over nobody has the weights."""
    async with swarm(RUN, replicas=4) as s:
        await begun(s)
        late = s.peers["s1p3"].convictions

        async def is_over(evidence: WrongAnswer, body: Sequence[Buffer]) -> bool:
            raise Stale("step 0 is over here", version=2)

        late.judge = is_over
        answered = accusation("s1p1", t=0)
        evidence = added_falsely("s1p1", 1) if what == "contribution" else answered
        for name, believed in (("s1p0", False), ("s1p2", True)):
            s.peers[name].convictions.convict(evidence)
            s.peers[name].convictions.pass_on(evidence, [b"tensors"])
            await asyncio.sleep(20.0)
            assert ("s1p1" in late.convicted) == believed


async def test_a_trainer_is_told_nothing_by_strangers() -> None:
    async with swarm(RUN, replicas=3) as s:
        await begun(s)
        await add_liar(s, "stranger", 1, 2)
        trainer = s.add_trainer(TRAINER[:-1] + "U")
        show = pack(ShowEvidence(run=RUN.id, evidence=added_falsely("s1p1", 1)))
        call = s.network.peers["stranger"].transport.call
        with pytest.raises(Refused, match="a replica of that stage has to say it"):
            await call(TRAINER[:-1] + "U", "evidence", show, deadline_s=1.0)
        assert not trainer.verdicts.convicted


@pytest.mark.parametrize("fits", some([True, False], quick=[True]))
async def test_who_has_no_time_to_judge_is_asked_again_after_the_others(fits: bool) -> None:
    """A lie in answers makes many strange at once. One judge is always busy, one at first."""
    async with swarm(RUN, replicas=4) as s:
        await begun(s)
        asked = Counter[str]()

        def judge(name: str, busy_times: float) -> None:
            async def answer(request: Request) -> Answer:
                asked[name] += 1
                if asked[name] <= busy_times:
                    raise Busy("this peer audits as much as it can")
                return Answer(pack(Audited(fits=fits)))

            s.peers[name].core.transport.serve("audit", answer)

        judge("s1p0", math.inf)
        judge("s1p2", 2)
        judge("s1p3", 2 if fits else 0)
        caller = s.peers["s0p0"]._neighbours  # type: ignore
        assert caller is not None
        said, signature = answer_of("s1p1")
        ask = AuditAnswer(run=RUN.id, peer="s1p1", statement=said, signature=signature)
        honest: list[str] = []
        judges = ["s1p0", "s1p2", "s1p3"]
        said_so = lambda: honest.append("it is")  # noqa: E731
        await caller._audit(judges, ask, said_so, [])  # type: ignore
        assert honest == (["it is"] if fits else [])
        lost = [event.peer for event in s.seen(PeerLost)]
        assert lost == ([] if fits else ["s1p1"])
