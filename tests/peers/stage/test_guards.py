"""The last look before a sum, a ledger or a state changes: what came before may have changed meanwhile."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peers.clock import now_s
from peers.owner.commands import Owner
from peers.ports import Rank
from peers.sim.swarm import AuditCompute
from peers.stage import recovery
from peers.stage.joining import LOST_S, _ask_others
from peers.stage.microbatches import MAX_WAITING
from peers.stage.next_stage import NextStage, WorkCall
from peers.stage.open_step import KeptMicrobatch, OpenStep
from peers.stage.pause import PeerLife
from peers.stage.tied_weights import TiedWeights
from peers.stage_calls import StageCalls
from peers.transfer.client import Download
from swarm.errors import (
    Busy,
    Leaving,
    NotAdmitted,
    NotReady,
    PeerGone,
    Refused,
    SetupError,
    Stale,
    SwarmError,
)
from swarm.ids import Generation, Microbatch, Position
from swarm.manifest import IslandsSpec, audit_run
from swarm.model.layout import initial_state
from swarm.model.stage import Gradients
from swarm.model.stage_io import input_metas
from swarm.policy.router import Router
from swarm.protocol.ledger import Bitmap, Claim, Ledger
from swarm.protocol.messages import Directive
from swarm.protocol.replica import ApplyStep, BeginAllReduce, CatchUp, Fetch, Unfreeze
from swarm.protocol.rollback import FAR_BACK_S
from swarm.protocol.rounds import Commit, Plan, Prepared, Proof, round_id
from swarm.protocol.step import StepState
from swarm.records import PeerRecord, State
from swarm.wire.codec import Encoded
from swarm.wire.messages import (
    Hop,
    LedgerCounts,
    Located,
    Opened,
    OpenHeld,
    PeerStatus,
    Work,
    WorkDone,
    pack,
    unpack,
)
from tests.peers.alone import Alone, Line, Records

pytestmark = pytest.mark.virtual_time

RUN = audit_run(stages=1, steps=2, microbatches_per_step=4)
TWO = audit_run(stages=2, steps=2, microbatches_per_step=4)


def gradients(alone: Alone, m: int) -> tuple[Gradients, KeptMicrobatch]:
    """What the backward of a microbatch gives, in no sum yet."""
    inputs = [Encoded(meta, [bytes(9)]) for meta in input_metas(RUN, 0)]
    found = alone.core.compute.loss_gradients(Microbatch(0, m), inputs, weights=True)

    return found, KeptMicrobatch(inputs, (), WorkDone(loss=found.loss), ())


async def count(alone: Alone, *microbatches: int) -> None:
    """They enter the sum and the ledger, as `work` does it."""
    for m in microbatches:
        found, kept = gradients(alone, m)
        alone.peer.microbatches._count(alone.core.steps[0], found, kept)  # type: ignore


async def freeze(alone: Alone, name: str = "a round") -> OpenStep:
    """The sum of step 0 is promised."""
    step = alone.core.steps[0]
    await alone.core.device.run(Rank.STEP, 0, step.ledger.freeze, name)
    return step


# --- microbatches -------------------------------------------------------------------------------------------


async def test_a_gradient_that_ends_after_its_sum_was_promised_stays_out() -> None:
    alone = await Alone(RUN).opened()
    await count(alone, 0)
    late, kept = gradients(alone, 1)
    step, before = await freeze(alone), alone.sum()
    alone.peer.microbatches._count(step, late, kept)  # type: ignore
    assert (alone.sum(), step.ledger.done) == (before, 1) and 1 not in step.kept


async def test_a_gradient_that_another_request_added_meanwhile_is_not_added_again() -> None:
    alone = await Alone(RUN).opened()
    (found, kept), _ = gradients(alone, 2), await count(alone, 2)
    before = alone.sum()
    alone.peer.microbatches._count(alone.core.steps[0], found, kept)  # type: ignore
    assert alone.sum() == before


async def test_a_duplicate_is_not_taken_out_of_a_sum_that_was_promised() -> None:
    alone = await Alone(RUN).opened()
    await count(alone, 0, 1)
    step, before = await freeze(alone), alone.sum()
    await alone.core.retract(step, 0b10)
    assert (alone.sum(), step.ledger.done) == (before, 0b11)


async def test_what_a_liar_had_in_a_sum_that_was_promised_is_taken_out_once_that_is_open_again() -> None:
    """It was tried once only: what it sent stayed in the sum of the next round."""
    alone = await Alone(RUN).opened()
    await count(alone, 0)
    honest = alone.sum()
    await count(alone, 1)
    step = alone.core.steps[0]
    step.kept[1].asked = ("liar", work(m=1))
    step.start_round("a round", now=0.0)
    await freeze(alone)
    step.end_round("a round", failed=True)
    await alone.core.forget_work_of("liar")
    assert step.ledger.done == 0b11
    alone.peer.actions.act(Unfreeze(0))
    await asyncio.sleep(1.0)
    assert (step.ledger.done, step.state, step.false) == (0b1, StepState.OPEN, 0)
    assert alone.sum() == honest


async def test_what_a_liar_has_under_way_when_it_is_convicted_enters_no_sum() -> None:
    alone = await Alone(RUN).opened()
    step, (found, kept) = alone.core.steps[0], gradients(alone, 0)
    kept.answer = WorkDone(loss=0.0, hops=(Hop(stage=1, peer="liar", own_s=0.0, compute_s=0.0),))
    alone.peer.convictions.convicted.add("liar")
    alone.peer.microbatches._count(step, found, kept)  # type: ignore
    assert (step.ledger.done, step.kept, any(alone.sum())) == (0, {}, False)


async def test_a_sum_that_a_liar_cannot_be_taken_out_of_is_lost_and_looked_at_where_nothing_enters() -> None:
    """It was tried once: the sum stayed false where memory was short then, or a thread added meanwhile."""
    alone = await Alone(RUN).opened()
    await count(alone, 0, 1)
    step, books = alone.core.steps[0], alone.core.device.books

    class Booked(dict[int, KeptMicrobatch]):
        def items(self) -> Any:
            books.check()
            return super().items()

    def subtract(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    step.kept = Booked(step.kept)
    step.kept[1].asked = ("liar", work(m=1))
    alone.core.compute.subtract = subtract  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        await alone.core.forget_work_of("liar")
    assert (step.ledger.done, step.kept, any(alone.sum())) == (0, {}, False)


async def test_a_liars_work_is_taken_out_of_the_next_step_though_the_first_sum_breaks() -> None:
    alone = await Alone(replace(RUN, delayed_updates=True)).opened()
    subtract: Any = alone.core.compute.subtract
    for t, step in alone.core.steps.items():
        inputs = [Encoded(meta, [bytes(9)]) for meta in input_metas(RUN, 0)]
        found = alone.core.compute.loss_gradients(Microbatch(t, 0), inputs, weights=True)
        kept = KeptMicrobatch(inputs, (), WorkDone(loss=found.loss), (), asked=("liar", work(m=0)))
        alone.peer.microbatches._count(step, found, kept)  # type: ignore

    def subtracted(mb: Microbatch, *args: object) -> None:
        if mb.t == 0:
            raise torch.OutOfMemoryError("no memory")
        subtract(mb, *args)

    alone.core.compute.subtract = subtracted  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        await alone.core.forget_work_of("liar")
    await asyncio.sleep(1.0)
    assert [(step.ledger.done, any(alone.sum(t))) for t, step in alone.core.steps.items()] == [(0, False)] * 2


async def test_a_peer_without_memory_for_the_sum_of_a_step_ends() -> None:
    """It went on to take microbatches, and failed all of them; the only one of its stage did so for ever."""
    alone = await Alone(RUN).opened()
    core, sums = alone.core, alone.core.compute.sums

    def begin(t: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    sums.begin = begin  # type: ignore[method-assign]
    core.steps.pop(0).close()
    with pytest.raises(SetupError, match="CUDA out of memory"):
        await core.open_steps()
    assert core.device.failure is not None and not core.joined


async def test_what_is_undone_and_is_the_peers_own_leaves_the_sum_and_nothing_else_does() -> None:
    alone = await Alone(RUN).opened()
    await count(alone, 0)
    before = alone.sum()
    await count(alone, 3)
    await alone.core.retract(alone.core.steps[0], 0b1000)
    assert (alone.sum(), alone.core.steps[0].ledger.done, alone.core.undone) == (before, 1, 1)


# --- freezing and thawing -----------------------------------------------------------------------------------


async def test_the_end_of_what_was_fed_again_is_not_that_of_what_was_claimed_since() -> None:
    """Its microbatch had been retracted meanwhile: it was said to be lacking while it was computed anew."""
    alone = await Alone(RUN).opened()
    server, step, never = alone.peer.microbatches, alone.core.steps[0], asyncio.Event()
    await count(alone, 0)

    def taken() -> asyncio.Task[KeptMicrobatch]:
        request: Any = SimpleNamespace(peer="trainer", body_sizes=[9], accept=never.wait)
        return asyncio.ensure_future(server._take(step, work(), request))  # type: ignore

    again = taken()
    await asyncio.sleep(0)
    await alone.core.retract(step, 0b1)
    assert step.ledger.claim(0) is Claim.NEW
    newer = taken()
    await asyncio.sleep(0)
    job = step.jobs[0]
    again.cancel()
    await asyncio.wait([again])
    assert (step.jobs.get(0), step.ledger.in_progress, server.inflight) == (job, 0b1, 1)
    newer.cancel()
    await asyncio.wait([newer])
    assert (step.jobs, step.ledger.in_progress, server.inflight) == ({}, 0, 0)


async def test_a_sum_that_was_promised_anew_stays_as_it_is_though_it_was_told_to_open() -> None:
    alone = await Alone(RUN).opened()
    step = alone.core.steps[0]
    step.start_round("one", now=0.0)
    await freeze(alone, "one")
    step.end_round("one", failed=True)
    opening = asyncio.create_task(alone.peer.actions._thaw(step))  # type: ignore
    await asyncio.sleep(0)
    step.start_round("two", now=0.0)
    await opening
    assert (step.state, step.ledger.frozen_for) == (StepState.FROZEN, "one")


async def test_of_two_changes_of_the_state_the_second_waits_to_be_told_again() -> None:
    alone = await Alone(RUN).opened()
    began: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        async def change(_: object) -> None:
            began.append(name)
            await asyncio.sleep(1.0)

        return change

    peer: Any = alone.peer
    peer.actions._apply_step, peer.actions._catch_up = noted("step"), noted("state")
    directive = Directive(run=RUN.id, stage=0, coordinator="me", version=1)
    peer.actions.act(ApplyStep(Commit(0, 1.0)))
    peer.actions.act(CatchUp(directive))
    await asyncio.sleep(0.5)
    assert began == ["step"]
    await asyncio.sleep(1.0)
    peer.actions.act(CatchUp(directive))
    await asyncio.sleep(0.5)
    assert began == ["step", "state"]


async def test_of_requests_for_a_step_that_is_not_open_a_bounded_number_waits() -> None:
    alone = await Alone(RUN).opened()
    desk: Any = alone.peer.microbatches
    assert await desk._open(0) is alone.core.steps[0]
    desk._waiting = MAX_WAITING
    with pytest.raises(NotReady, match="many already wait for step 1"):
        await desk._open(1)
    assert await desk._open(0) is alone.core.steps[0] and desk._waiting == MAX_WAITING


# --- the next stage -----------------------------------------------------------------------------------------

ANY_ANSWER = WorkCall(body=(), max_answer_bytes=0, check=lambda *_: None, closed=lambda: None)
"""Sends no tensors, and takes whatever comes."""


def work(**changes: Any) -> Work:
    return Work(**{"run": TWO.id, "t": 0, "m": 0, "version": 0, "tensors": input_metas(TWO, 1), **changes})


async def test_a_microbatch_goes_to_who_has_it_else_to_who_is_suggested_and_not_in_backoff() -> None:
    line, records, router, asked = Line(), Records(), Router(), list[str]()
    records.known = [replica(run=TWO.id, stage=1, peer=name) for name in "abc"]
    following = NextStage(
        TWO.id, 1, line, records, router, stages=2, on_fault=lambda _: None,  # type: ignore[arg-type]
    )  # fmt: skip
    line.answers["locate"] = lambda peer, _: Located(has=peer == "c")

    def done(peer: str, _: bytes) -> WorkDone:
        asked.append(peer)
        return WorkDone(loss=0.0)

    async def goes_to(**changes: Any) -> str:
        await following.call(work(**changes), ANY_ANSWER)
        return asked[-1]

    line.answers["work"] = done
    assert await goes_to(route=("b",)) == "b"
    assert await goes_to(route=("b",), attempt=1) == "b", "one that has never answered here is not asked"
    assert await goes_to(route=("c",)) == "c"
    assert await goes_to(route=("b",), attempt=1) == "c", "it has been asked for before: who has it?"
    assert await goes_to(route=("b",), deepest=2) == "c", "a later stage lost it"
    assert await goes_to(route=("c",), deepest=1) == "a", "who answered it has lost it, or does not count"
    router.failed("b", now=now_s())
    assert await goes_to(route=("b",)) != "b"


async def test_of_many_callers_each_has_less_patience_with_one_that_was_charged() -> None:
    """Each learns for itself."""
    line, records, router = Line(), Records(), Router()
    records.known = [replica(run=TWO.id, stage=1, peer="a")]
    following = NextStage(
        TWO.id, 1, line, records, router, stages=2, on_fault=lambda _: None,  # type: ignore[arg-type]
    )  # fmt: skip
    line.answers["work"] = lambda peer, _: WorkDone(loss=0.0)
    router.backoff.charge("a", t=0, since_s=now_s(), now=now_s())
    limits_s = list[float]()
    for callers in (2, 5):
        records.known += [replica(run=TWO.id, stage=0, peer=f"{callers} {each}") for each in range(callers)]
        await following.call(work(), ANY_ANSWER)
        limits_s.append(following.limits.limit_s("a", [], t=0))
    assert limits_s[1] < limits_s[0] - 1.0


@pytest.mark.parametrize("caller", "pqrstu")
async def test_what_failed_once_goes_to_one_that_is_known(caller: str) -> None:
    line, records, router, asked = Line(), Records(), Router(caller=caller), list[str]()
    records.known = [replica(run=TWO.id, stage=1, peer=name) for name in "abcdefg"]
    following = NextStage(
        TWO.id, 1, line, records, router, stages=2, on_fault=lambda _: None,  # type: ignore[arg-type]
    )  # fmt: skip
    router.set_peers(1, "abcdefg")
    for peer in "fg":
        router.answered(1, peer, 1.0)

    def done(peer: str, _: bytes) -> WorkDone:
        asked.append(peer)
        if peer not in "fg":
            raise PeerGone(peer, "cannot be reached")
        return WorkDone(loss=0.0)

    line.answers["work"] = done
    onward = work(route=("a",))
    await following.call(onward, ANY_ANSWER)
    assert asked[0] == "a" and asked[1] in "fg" and len(asked) == 2


async def test_what_is_over_for_one_peer_of_a_stage_goes_to_another_and_is_over_when_all_say_so() -> None:
    line, records, router, asked = Line(), Records(), Router(), list[str]()
    records.known = [replica(run=TWO.id, stage=1, peer=name) for name in "abc"]
    following = NextStage(
        TWO.id, 1, line, records, router, stages=2, on_fault=lambda _: None,  # type: ignore[arg-type]
    )  # fmt: skip
    behind = ["c"]

    def done(peer: str, _: bytes) -> WorkDone:
        asked.append(peer)
        if peer not in behind:
            raise Stale("step 0 is over", version=1)
        return WorkDone(loss=0.0)

    async def call() -> str:
        found = await following.call(work(route=("a",)), ANY_ANSWER)
        return found[0]

    line.answers["work"] = done
    assert await call() == "c" and asked[0] == "a"
    behind.clear()
    asked.clear()
    with pytest.raises(Stale, match="step 0 is over"):
        await call()
    assert sorted(asked) == ["a", "b", "c"]


async def test_what_is_sent_is_let_go_once_it_is_answered_though_others_were_busy() -> None:
    """It may be megabytes, and many are busy at once."""

    class Body(bytearray):
        pass

    line, records, router = Line(), Records(), Router()
    records.known = [replica(run=TWO.id, stage=1, peer=name) for name in "ab"]
    following = NextStage(
        TWO.id, 1, line, records, router, stages=2, on_fault=lambda _: None,  # type: ignore[arg-type]
    )  # fmt: skip

    def done(peer: str, _: bytes) -> WorkDone:
        if peer == "a":
            raise Busy("no more fit")
        return WorkDone(loss=0.0)

    line.answers["work"] = done
    gc.disable()
    try:
        body = Body(9)
        kept = weakref.ref(body)
        await following.call(work(route=("a",)), replace(ANY_ANSWER, body=[body]))
        del body
        assert line.calls["work"] == 2 and kept() is None
    finally:
        gc.enable()


async def test_those_whose_word_does_not_count_refuse_nothing_for_their_stage() -> None:
    line, records, router = Line(), Records(), Router()
    records.known = [replica(run=TWO.id, stage=1, peer=name) for name in "abcdh"]
    following = NextStage(
        TWO.id, 1, line, records, router, stages=2, on_fault=lambda _: None,  # type: ignore[arg-type]
        heard=lambda peers: [peer for peer in peers if peer == "h"],
    )  # fmt: skip
    router.set_peers(1, "abcdh")
    for peer in "abcdh":
        router.answered(1, peer, 1.0)
    router.failed("h", now=now_s())  # it is asked when all others were

    def done(peer: str, _: bytes) -> WorkDone:
        if peer != "h":
            raise Refused("no")
        return WorkDone(loss=0.0)

    line.answers["work"] = done
    line.answers["status"] = lambda peer, _: PeerStatus(
        peer=peer, stage=1, state="serving", device="", since=0.0, version=0
    )
    found = await following.call(work(route=("a",)), ANY_ANSWER)
    assert found[0] == "h" and line.calls["work"] == 5


async def test_a_peer_that_refuses_since_it_has_moved_is_not_one_that_refuses() -> None:
    """Seed 9410236: at stage 0 it admitted a peer of stage 0 as no trainer, and that ended the trainer."""
    line, at = Line(), dict.fromkeys("abc", 1)
    no, old = Refused("the loss is not finite"), NotAdmitted("the charter names other trainers")

    def say(peer: str, _: bytes) -> PeerStatus:
        if peer not in at:
            raise PeerGone(peer, "cannot be reached")
        return PeerStatus(peer=peer, stage=at[peer], state="serving", device="cpu", version=0, since=0.0)

    async def refuse(peers: str, *, counted: str, error: Refused = no) -> set[str]:
        calls = StageCalls(
            TWO.id, 1, line, Records(), Router(), 2, on_fault=lambda _: None,  # type: ignore[arg-type]
            heard=lambda _: counted,
        )  # fmt: skip
        return await calls.refusing(dict.fromkeys(peers, error))

    line.answers["status"] = say
    assert await refuse("ab", counted="abcd") == set() and not line.calls, "these are too few: none is asked"
    assert await refuse("abc", counted="abcd") == set("abc")
    assert await refuse("abz", counted="ab") == set("ab")
    at["a"] = 0
    assert await refuse("a", counted="a") == set() == await refuse("abc", counted="abc")
    assert await refuse("ab", counted="b") == {"b"}
    del at["b"]
    assert await refuse("b", counted="b") == set(), "who says nothing does not say where it serves"
    assert await refuse("ab", counted="ab", error=old) == set("ab"), "the charter holds at all stages"


async def test_what_nobody_needs_or_nobody_can_finish_is_not_sent_on() -> None:
    alone = await Alone(TWO).opened()
    step, desk = alone.core.steps[0], alone.peer.microbatches
    assert desk._pointless(step, work()) is None  # type: ignore
    alone.core.leave()
    assert isinstance(desk._pointless(step, work()), Leaving), "and nobody serves the next stage"  # type: ignore
    step.close()
    assert isinstance(desk._pointless(step, work()), NotReady)  # type: ignore


@pytest.mark.parametrize(("there", "found"), [("ab", ""), ("b", ""), ("a", "a")])
async def test_one_of_a_stage_that_is_all_that_was_known_of_it_does_not_refuse_for_all(
    there: str, found: str
) -> None:
    """Of random lies, seed 25: one that altered what it sent on, and was so refused, ended the trainer."""
    line, records = Line(), Records()
    records.known = [replica(peer="a", stage=1)]

    async def refresh(stages: object) -> list[PeerRecord]:
        records.known = [replica(peer=peer, stage=1) for peer in there]
        return records.known

    records.refresh = refresh  # type: ignore[method-assign]
    line.answers["status"] = lambda peer, _: PeerStatus(
        peer=peer, stage=1, state="serving", device="", since=0.0, version=0
    )
    calls = StageCalls(TWO.id, 1, line, records, Router(), 2, on_fault=lambda _: None)
    assert await calls.refusing({"a": Refused("no")}) == set(found)


async def test_of_two_that_find_a_microbatch_refused_at_once_one_may_clear_what_both_noted() -> None:
    """A trainer that peers did not admit yet cleared who refused it; a second microbatch of it was being
    refused, and broke."""
    line, records, refusals = Line(), Records(), {"a": NotAdmitted("the charter names other trainers")}
    records.known = [replica(peer="a", stage=1)]

    async def refresh(stages: object) -> list[PeerRecord]:
        refusals.clear()
        return records.known

    records.refresh = refresh  # type: ignore[method-assign]
    calls = StageCalls(TWO.id, 1, line, records, Router(), 2, on_fault=lambda _: None)
    assert await calls.refusing(refusals) == {"a"}


async def test_what_is_sent_on_is_noted_where_no_other_thread_notes_anything() -> None:
    """Of two that made room for it at once one broke. The books are not held for it: else each forward waits
    for gradients that others add.
    """
    alone = await Alone(TWO).opened()
    desk: Any = alone.peer.microbatches
    step, books, desk._is_audited = alone.core.steps[0], alone.core.device.books, True

    class Booked(dict[Any, Any]):
        def __setitem__(self, name: object, kept: object) -> None:
            with pytest.raises(AssertionError, match="holds the books"):
                books.check()
            assert step._noting.locked()  # type: ignore
            super().__setitem__(name, kept)

    step.sent_on = Booked()
    inputs = [Encoded(meta, [bytes(9)]) for meta in input_metas(TWO, 0)]
    sent_on = asyncio.create_task(desk._middle(step, "trainer", work(), inputs))
    await asyncio.sleep(1.0)
    assert len(step.sent_on) == 1
    sent_on.cancel()


# --- a round ------------------------------------------------------------------------------------------------


async def promised(alone: Alone) -> tuple[Any, OpenStep, Plan]:
    """The peer, its step with all microbatches, and the plan of a round with itself."""
    await count(alone, *range(RUN.M))
    step, done = alone.core.steps[0], Bitmap(0b1111)
    parts = (alone.core.compute.numel,)
    name = round_id(RUN.id, 0, 0, 0, ["me"], [done], parts)
    step.start_round(name, now=0.0)
    return alone.peer, step, Plan(name, 0, ("me",), (done,), parts)


async def test_a_result_that_comes_when_the_sum_is_open_again_is_not_taken() -> None:
    alone = await Alone(RUN).opened()
    peer, step, plan = await promised(alone)

    async def late(*_: object) -> tuple[torch.Tensor, Prepared]:
        await alone.core.device.run(Rank.STEP, 0, step.ledger.thaw)
        return torch.ones(alone.core.compute.numel, dtype=torch.float64), Prepared(plan.round, 1.0, "")

    peer.actions._all_reduce.run = late
    await peer.actions._reduce(step, plan)
    assert (step.prepared, step.reduced, step.round) == (None, None, None)


async def test_a_round_is_not_begun_again_before_its_end_has_ended() -> None:
    """Seed 26256: the end of the one that was given up ended the one that followed, again and again."""
    alone = await Alone(RUN).opened()
    peer, step, plan = await promised(alone)
    step.give_up_round()
    peer.actions.act(BeginAllReduce(0, plan))
    await asyncio.sleep(0)
    peer.actions.act(Unfreeze(0))
    peer.actions.act(BeginAllReduce(0, plan))
    assert step.ending and step.round is None
    await step.stopped()
    peer.actions.act(BeginAllReduce(0, plan))
    await asyncio.sleep(0)
    assert step.round is not None and step.round.name == plan.round
    await asyncio.sleep(1.0)
    assert step.prepared is not None and step.prepared.round == plan.round


async def test_a_round_that_runs_beside_a_result_that_was_fetched_is_ended_before_it_is_begun_again() -> None:
    """Seed 771221: it was begun and ended again and again, without end in virtual time."""
    alone = await Alone(RUN).opened()
    peer, step, plan = await promised(alone)
    step.give_up_round()
    peer.actions.act(BeginAllReduce(0, plan))
    await asyncio.sleep(0)
    step.promise("fetched", now=0.0)
    for _ in range(2):
        peer.actions.act(BeginAllReduce(0, plan))
        await step.stopped()
        await asyncio.sleep(0)
    assert step.round is not None and step.round.name == plan.round
    await asyncio.sleep(1.0)
    assert step.prepared is not None and step.prepared.round == plan.round


async def test_a_result_that_is_fetched_is_not_given_up_with_the_round_that_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That is of the same name: with it went the promise, and the round could begin once more beside it."""
    alone = await tied(lambda step: None).opened()
    actions, step, never = alone.peer.actions, alone.core.steps[0], asyncio.Event()
    result = torch.ones(alone.core.compute.numel, dtype=torch.float64), Prepared("r", 1.0, "")
    actions._tied_weights._part = lambda *_: never.wait()  # type: ignore
    monkeypatch.setattr("peers.stage.actions.fetch_gradient", lambda *_, **__: asyncio.sleep(0, result))
    step.start_round("r", now=0.0)

    async def reduces() -> None:
        try:
            await never.wait()
        finally:
            step.end_round("r", failed=False)

    step.work["reduce"] = asyncio.create_task(reduces())
    fetch = asyncio.create_task(actions._fetch(step, Fetch(0, "r", ("other",), "")))  # type: ignore
    await asyncio.sleep(1.0)
    assert (step.state, step.round and step.round.name) == (StepState.COMPLETING, "r")
    fetch.cancel()


async def test_a_round_that_breaks_here_is_said_to_have_failed() -> None:
    alone = await Alone(RUN).opened()
    peer, step, plan = await promised(alone)

    async def breaks(*_: object) -> None:
        raise MemoryError

    peer.actions._all_reduce.run = breaks
    with pytest.raises(MemoryError):
        await peer.actions._reduce(step, plan)
    assert (step.failed_round, step.state) == (plan.round, StepState.FROZEN)


async def test_a_plan_that_names_another_ledger_freezes_nothing() -> None:
    alone = await Alone(RUN).opened()
    peer, step, plan = await promised(alone)
    await alone.core.retract(step, 0b1000)
    await peer.actions._reduce(step, plan)
    assert (step.failed_round, step.ledger.frozen_for, step.state) == (plan.round, None, StepState.OPEN)


async def test_a_step_is_taken_once_and_in_its_turn() -> None:
    run = replace(RUN, delayed_updates=True)
    alone = await Alone(run).opened()
    for t in (0, 1):
        step, ones = alone.core.steps[t], torch.ones(alone.core.compute.numel, dtype=torch.float64)
        step.start_round("r", now=0.0)
        await alone.peer.actions._tied_weights.hold(step, ones, Prepared("r", 1.0, ""))  # type: ignore
    await alone.core.apply(Commit(1, 1.0))
    assert alone.core.version == 0 and not alone.core.steps[1].over
    await asyncio.gather(*(alone.core.apply(Commit(0, 1.0)) for _ in range(2)))
    assert alone.core.version == 1 and list(alone.core.commits) == [0]


async def test_with_a_step_that_is_over_nothing_is_computed() -> None:
    alone = await Alone(RUN).opened()
    step, desk = alone.core.steps[0], alone.peer.microbatches
    work = Work(run=RUN.id, t=0, m=0, version=0, tensors=input_metas(RUN, 0))
    assert desk._alive(step, work) == Microbatch(0, 0)  # type: ignore
    step.close()
    with pytest.raises(NotReady, match="was dropped here"):
        desk._alive(step, work)  # type: ignore


async def test_a_directive_that_comes_when_a_peer_has_ended_or_still_joins_starts_nothing() -> None:
    """One that joins was told by who knew it from before: it loaded what two downloads had brought into the
    same memory, a mixture of two versions.
    """
    alone = await Alone(RUN).opened()
    peer: Any = alone.peer
    ahead = Directive(run=RUN.id, stage=0, coordinator="other", version=1)

    def comes() -> int:
        peer.coordination._step(lambda now: peer.coordination.protocol.directive_came(ahead, now=now))
        return len(peer.actions.tasks)

    peer.core.joined = False
    assert comes() == 0
    peer.core.joined = True
    assert comes() == 1


# --- another state ------------------------------------------------------------------------------------------


async def test_with_another_state_the_open_steps_and_their_commits_are_over() -> None:
    alone = await Alone(RUN).opened()
    await count(alone, 0)
    core, old = alone.core, alone.core.steps[0]
    late, kept = gradients(alone, 1)
    core.commits = {0: Commit(0, 1.0)}
    await core.load(Position(Generation(1, 0), 0), initial_state(RUN, 0))
    assert old.over and core.steps[0] is not old and not core.steps[0].over
    assert (core.commits, core.steps[0].ledger.done, any(alone.sum())) == ({}, 0, False)
    with pytest.raises(SwarmError, match="weights that are gone"):
        alone.peer.microbatches._count(old, late, kept)  # type: ignore
    assert not any(alone.sum())


async def test_who_stays_where_a_generation_begins_keeps_its_sum_and_forgets_the_commits() -> None:
    alone = await Alone(RUN).opened()
    await count(alone, 0)
    alone.core.commits = {0: Commit(0, 1.0)}
    alone.core.enter(Generation(1, 0))
    assert (alone.core.commits, alone.core.steps[0].ledger.done) == ({}, 1)


async def test_a_digest_is_told_of_the_version_that_it_was_made_of_only() -> None:
    alone = await Alone(RUN).opened()
    await alone.core.refresh_digest()
    assert alone.core.digest
    alone.core.compute.state.version = 1
    assert not alone.core.digest


async def test_no_step_is_open_before_a_peer_has_joined_nor_waited_for_once_it_leaves() -> None:
    alone = await Alone(RUN).opened()
    alone.core.joined = False
    with pytest.raises(NotReady, match="step 0 is not open"):
        await alone.core.step(0, wait_s=0.0)
    waiting = asyncio.create_task(alone.core.step(0, wait_s=1000.0))
    await asyncio.sleep(1.0)
    alone.core.leave()
    await asyncio.sleep(1.0)
    with pytest.raises(Leaving):
        waiting.result()


# --- who may be relied on -----------------------------------------------------------------------------------


def replica(**changes: Any) -> PeerRecord:
    return PeerRecord(
        **{"peer": "other", "run": RUN.id, "stage": 0, "state": "serving", "version": 0, **changes}
    )


def status(**changes: Any) -> PeerStatus:
    usual = {
        "peer": "other", "stage": 0, "version": 0, "state": "serving", "device": "cpu", "done": 0,
        "inflight": 0, "max_inflight": 1, "speed": 0.0, "computed": 0, "coordinator": "",
        "audit": LedgerCounts(),
        "since": 0.0,
    }  # fmt: skip
    return PeerStatus(**{**usual, **changes})


@pytest.mark.parametrize(
    ("changes", "relied_on"),
    [
        ({}, True),
        ({"version": 1}, True),
        ({"version": 0}, False),
        ({"generation": Generation(2, 0)}, False),
        ({"state": "leaving"}, False),
    ],
)
async def test_a_stage_is_left_to_a_replica_only_that_has_its_weights(
    changes: dict[str, Any], relied_on: bool
) -> None:
    alone = await Alone(RUN).opened()
    alone.core.compute.state.version, alone.core.generation = 2, Generation(1, 0)
    alone.records.known = [replica()]
    alone.line.answers["status"] = lambda *_: status(
        **{"generation": Generation(1, 0), "version": 2, **changes}
    )
    assert await alone.core.keep_stage() is relied_on
    assert not await alone.core.keep_stage(going={"other"})


async def test_a_finished_run_goes_back_when_a_trainer_is_there_and_else_waits_for_one() -> None:
    alone = await Alone(RUN).opened()
    trainers: list[str] = []
    its: Any = alone.peer.actions._recovery  # type: ignore
    its._coordination = SimpleNamespace(trainers=trainers)
    finished = Position(Generation(), RUN.steps)
    assert not await its.restore(finished, waited_s=1000.0)
    assert alone.core.generation == Generation()
    trainers.append("trainer")
    assert await its.restore(finished, waited_s=1000.0)
    assert (alone.core.generation.number, alone.core.generation.start) == (1, 0)


@pytest.mark.parametrize(
    ("version", "generation", "voice", "behind_s", "rejoins"),
    [
        (2, Generation(), {}, 8.0, True),
        (2, Generation(), {"other": 40}, 8.0, True),
        (1, Generation(), {}, 8.0, False),
        (2, Generation(1), {}, 8.0, False),
        (2, Generation(), {"me": 40}, 8.0, False),
        (2, Generation(), {}, FAR_BACK_S, False),
    ],
    ids=["there", "with-voice", "behind-as-well", "elsewhere", "only-strangers", "for-long-in-vain"],
)
async def test_no_stage_is_restored_whose_replicas_are_where_the_run_is(
    version: int, generation: Generation, voice: dict[str, int], behind_s: float, rejoins: bool
) -> None:
    """They had another coordinator than a replica that was behind, and the run went back to its beginning."""
    alone = await Alone(RUN).opened()
    alone.records.known = [replica()]
    alone.line.answers["status"] = lambda *_: status(version=version, generation=generation)
    its: Any = alone.peer.actions
    run = Position(Generation(), 2)
    its._coordination = SimpleNamespace(run_status=SimpleNamespace(position=run), behind_s=behind_s)
    its._core.voice = lambda: voice
    did: list[object] = []

    async def to(directive: Directive) -> bool:
        did.append((directive.position, directive.coordinator, directive.sources))
        return True

    async def restore(position: Position, *, waited_s: float) -> bool:
        did.append((position, waited_s))
        return True

    its._recovery.to, its._recovery.restore = to, restore
    await its._restore()
    assert did == [(run, "other", ("other",)) if rejoins else (run, behind_s)]


async def test_a_replica_that_is_behind_goes_to_the_others_of_its_stage_though_one_lies() -> None:
    alone = await Alone(RUN).opened()
    alone.records.known = [replica(peer="liar"), replica()]
    alone.line.answers["status"] = lambda peer, *_: status(peer=peer, version=2 if peer == "liar" else 1)
    its: Any = alone.peer.actions._recovery  # type: ignore
    its._core.voice = lambda: {"liar": 60, "other": 40}
    did: list[tuple[str, int]] = []

    async def to(directive: Directive) -> bool:
        did.append((directive.coordinator, directive.version))
        return directive.coordinator == "other"

    its.to = to
    assert await its.rejoin(Position(Generation(), 1))
    assert did == [("liar", 2), ("other", 1)]


async def test_a_newcomer_restores_a_stage_when_it_has_been_gone_for_long_enough() -> None:
    alone = Alone(TWO)
    alone.core.device.start()
    alone.records.known = [replica(run=TWO.id, stage=1)]
    alone.line.answers["status"] = lambda *_: status(stage=1, version=1)
    waited: list[float] = []

    async def restore(_: Position, *, waited_s: float) -> bool:
        waited.append(waited_s)
        return True

    peer: Any = alone.peer
    peer.actions._recovery.restore = restore
    await peer._join()
    assert len(waited) == 1 and LOST_S < waited[0] < LOST_S + 2.0


async def test_once_a_peer_has_joined_nothing_of_that_goes_on() -> None:
    """Its steps were opened once more when its weights were hashed: a state that was loaded meanwhile lost
    the sum of a step that was open then, and all work of this peer on it was refused.
    """
    alone = Alone(RUN)
    alone.core.device.start()
    joining = asyncio.create_task(alone.peer._join())  # type: ignore
    while not alone.core.joined:
        await asyncio.sleep(0.001)
    assert joining.done() and alone.core.digest and not any(alone.sum())


async def test_with_a_state_comes_the_commit_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = await Alone(RUN).opened()
    commit = Commit(0, 1.0)
    opened = Opened(lease="", version=1, last_commit=commit, tensors=())

    async def download(*_: object, **__: object) -> Download:
        tensors = dict(initial_state(RUN, 0))
        return Download(opened=opened, tensors=tensors, sources=("other",), voiced=True)

    monkeypatch.setattr(recovery, "download", download)
    assert await alone.peer.actions._recovery.download(["other"])  # type: ignore
    assert (alone.core.version, alone.core.commits) == (1, {0: commit})


async def test_a_device_that_was_slow_before_a_pause_is_known_as_slow_after_it() -> None:
    known: list[float] = []

    class Briefly:
        """A stage peer that pauses at once, and the second time ends."""

        has_joined, moving_to, kept, alone, spare = True, None, None, False, None

        def __init__(self) -> None:
            self.core = SimpleNamespace(device=SimpleNamespace(longest_s=0.0))
            self.all_reduce = SimpleNamespace(bandwidth_bps=0.0)
            self.paused = False

        async def run(self) -> None:
            known.append(self.core.device.longest_s)
            self.core.device.longest_s, self.paused = 50.0, len(known) == 1

    async def build(*_: object) -> Any:
        return Briefly()

    hold: Any = None
    await PeerLife(0, Owner(), build, hold, place=str, device="cpu", emit=lambda _: None).run()
    assert known == [0.0, 50.0]


# --- tied weights -------------------------------------------------------------------------------------------


def tied(parts: Callable[[OpenStep], None]) -> Alone:
    """Stage 0 of two that share a weight; `parts` puts what the other found into the step."""
    alone = Alone(TWO, compute=AuditCompute(TWO, 0, tied=True))

    async def part(step: OpenStep, *_: object) -> None:
        parts(step)

    alone.peer.actions._tied_weights._part = part  # type: ignore[method-assign]  # type: ignore
    return alone


async def hold(alone: Alone) -> OpenStep:
    step, reduced = alone.core.steps[0], torch.ones(alone.core.compute.numel, dtype=torch.float64)
    step.start_round("r", now=0.0)
    held = Prepared("r", alone.core.compute.shared.sqnorm(reduced), "")
    await alone.peer.actions._tied_weights.hold(step, reduced, held)  # type: ignore
    return step


async def test_the_norm_of_a_step_is_that_of_all_that_was_found_of_its_weights() -> None:
    def parts(step: OpenStep) -> None:
        step.shared[1] = torch.ones(alone.core.compute.shared.numel(1), dtype=torch.float64)

    alone = await tied(parts).opened()
    step = await hold(alone)
    assert step.whole is not None and step.prepared is not None
    assert set(step.whole.tolist()) == {2.0}
    assert step.prepared.sqnorm == alone.core.compute.shared.sqnorm(step.whole) == 4.0 * len(step.whole)


async def test_a_step_whose_parts_do_not_come_waits_to_be_told_what_to_do() -> None:
    def parts(step: OpenStep) -> None:
        raise Refused("not yours")

    alone = await tied(parts).opened()
    with pytest.raises(Refused):
        await hold(alone)
    assert alone.core.steps[0].state is StepState.FROZEN


@pytest.mark.parametrize("answers", [True, False])
async def test_what_another_stage_found_with_a_liar_is_got_again_before_a_step_is_taken(
    answers: bool,
) -> None:
    """It took the liar's work out and added up again, and the copies of the weight differed from then on."""
    found = [3.0, 2.0]

    def parts(step: OpenStep) -> None:
        if not found:
            raise NotReady("gone", version=0)
        if 1 not in step.shared:
            numel = alone.core.compute.shared.numel(1)
            step.shared[1] = torch.full((numel,), found.pop(0), dtype=torch.float64)

    alone, taken = await tied(parts).opened(), list[torch.Tensor]()
    apply = alone.core.compute.apply

    def noted(t: int, reduced: torch.Tensor, total_sqnorm: float) -> None:
        taken.append(reduced.clone())
        apply(t, reduced, total_sqnorm)

    alone.core.compute.apply = noted  # type: ignore[method-assign]
    step = await hold(alone)
    assert step.whole is not None and set(step.whole.tolist()) == {4.0}
    if not answers:
        found.clear()
    await alone.core.forget_work_of("liar")
    await alone.peer.actions._apply_step(Commit(0, 1.0))  # type: ignore
    assert alone.core.version == 1
    assert [set(one.tolist()) for one in taken] == [{3.0} if answers else {4.0}]


async def test_what_is_got_again_is_of_the_round_that_the_commit_names() -> None:
    """Another replica that gave the first result may still have it, and say so as others say theirs."""
    alone = await tied(lambda step: step.shared.setdefault(1, given)).opened()
    given, asked = torch.ones(alone.core.compute.shared.numel(1), dtype=torch.float64), list[str]()
    step = await hold(alone)

    def held(_: str, header: bytes) -> Any:
        asked.append(unpack(header, OpenHeld).round)
        raise NotReady("another round", version=0)

    alone.line.answers["held"] = held
    alone.records.known = [PeerRecord(peer="other", run=TWO.id, stage=1, state="serving", version=0)]
    proofs = ((Proof("me", Prepared("r", 1.0, "")),), (Proof("other", Prepared("again", 1.0, "")),))
    await alone.core.forget_work_of("liar")
    await TiedWeights(alone.core, alone.peer.actions._meeting).renew(step, Commit(0, 1.0, proofs))  # type: ignore
    assert set(asked) == {"again"}
    for made, gives in (("", True), ("r", True), ("again", False)):
        header = pack(OpenHeld(run=TWO.id, t=0, round=made, shared_with=1))
        try:
            await alone.line.handlers["held"](SimpleNamespace(peer="other", header=header))
        except NotReady:
            assert not gives
        else:
            assert gives


async def test_a_meeting_is_taken_as_it_was_added_up_whoever_is_shown_to_lie() -> None:
    """It was added up a second time, and where there was no memory for that it was never taken."""

    class Meeting:
        async def sum(self, step: OpenStep, own: torch.Tensor) -> torch.Tensor:
            sums.append(step.t)
            if len(sums) > 1:
                raise MemoryError
            return own

    alone, sums = Alone(replace(RUN, islands=IslandsSpec(count=2, local_steps=1))), list[int]()
    step, tied_weights = OpenStep(1, Ledger(1, 0)), TiedWeights(alone.core, Meeting())  # type: ignore
    step.start_round("r", now=0.0)
    await tied_weights.hold(step, torch.ones(alone.core.compute.numel), Prepared("r", 1.0, ""))
    step.doubted = True
    await tied_weights.renew(step, Commit(1, 1.0))
    assert sums == [1] and step.prepared is not None


async def test_the_last_version_is_saved_whatever_the_period_of_checkpoints() -> None:
    alone = await Alone(RUN).opened()
    saved: list[int] = []
    actions: Any = alone.peer.actions
    actions._writer = SimpleNamespace(save=lambda version, _: saved.append(version))
    for version in range(RUN.steps + 1):
        alone.core.compute.state.version = version
        await actions._save()
    assert RUN.checkpoint_every == 0 and saved == [RUN.steps]


@pytest.mark.parametrize(("state", "takes"), [("serving", True), ("leaving", True), ("joining", False)])
async def test_a_newcomer_takes_the_state_of_one_that_serves_or_leaves(state: State, takes: bool) -> None:
    """A stage whose last peer left while another joined went back to its last checkpoint."""
    alone = Alone(RUN)
    alone.line.answers["status"] = lambda peer, _: status(peer=peer, version=1, state=state)
    seen = await _ask_others(alone.core, [replica(state=state, version=1)])
    assert seen.replicas == ({"other": Position(Generation(), 1)} if takes else {})
