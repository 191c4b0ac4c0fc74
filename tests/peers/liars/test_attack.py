"""Peers that say what cannot be true: whatever one of them says, the others go on, and each counts once.

What a liar cannot be kept from is in the README: a member of a stage can send wrong gradients.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from peers.ports import Answer, Buffer, Request
from peers.stage.all_reduce import AllReduce, RoundAborted
from peers.stage.next_stage import NextStage, WorkCall
from swarm.errors import NotReady, Refused, Stale, SwarmError
from swarm.ids import Generation
from swarm.manifest import audit_run
from swarm.model.stage_io import input_metas
from swarm.policy.router import Router
from swarm.protocol.ledger import Bitmap
from swarm.protocol.messages import (
    ReplicaReport,
    RunStatus,
    StageSummary,
)
from swarm.protocol.rounds import Commit, Plan, Prepared, StepReport, StepSummary, round_id
from swarm.records import PeerRecord
from swarm.wire.messages import (
    MAX_HEADER_BYTES,
    Hop,
    Watched,
    Work,
    WorkDone,
    pack,
    unpack,
)
from tests.peers.loops import Stranger, Swarm, obey, swarm
from tests.peers.network import CalmNetwork
from tests.peers.sybils import TRAINER, admitting, give_voice
from tests.seeds import cases, some

pytestmark = pytest.mark.virtual_time

LIAR = "z"
"""After all honest ids, so that it coordinates nothing."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


async def member(s: Swarm, stage: int) -> Stranger:
    """Somebody who announced itself as a member of a stage, and then does only what a test makes it do."""
    liar = s.add_stranger(LIAR)
    record = PeerRecord(peer=LIAR, run=s.run.id, stage=stage, state="joining", version=0)
    await liar.end.directory.announce(record)
    return liar


def report(s: Swarm, stage: int, **changes: object) -> ReplicaReport:
    nothing = Bitmap(0)
    steps = (StepReport(t=0, done=nothing, in_progress=nothing),)
    return msgspec.structs.replace(
        ReplicaReport(run=s.run.id, stage=stage, version=0, steps=steps), **changes
    )


def summary(s: Swarm, stage: int, **changes: object) -> StageSummary:
    nothing = Bitmap(0)
    steps = (StepSummary(t=0, unclaimed=nothing, ready=False, sqnorm=0.0),)
    return msgspec.structs.replace(
        StageSummary(run=s.run.id, stage=stage, version=0, members=1, steps=steps), **changes
    )


async def finishes(s: Swarm) -> None:
    await s.until_finished(limit_s=60.0)
    s.assert_each_counted_once()


async def test_losses_that_are_no_numbers_end_no_coordinator_and_are_not_the_runs() -> None:
    """A mere record at the last stage ended its coordinators, one after the other."""
    run = admitting(audit_run(stages=2, steps=3, microbatches_per_step=4))
    async with swarm(run) as s:
        give_voice(s, *s.peers)
        await s.until_serving()
        liar, body = await member(s, 1), struct.pack("<4d", math.inf, -math.inf, math.nan, math.inf)

        async def repeat() -> None:
            while True:
                t = max(peer.core.version for peer in s.peers.values())
                steps = (StepReport(t=t, done=Bitmap(0b1111)),) if t < run.steps else ()
                for name in s.of_stage(1):
                    with contextlib.suppress(SwarmError):
                        said = report(s, 1, version=t, steps=steps)
                        await liar.send(name, "report", said, [body] * len(steps))
                await asyncio.sleep(0.05)

        lying = asyncio.create_task(repeat())
        trainer = s.add_trainer(TRAINER)
        await finishes(s)
        lying.cancel()
        # Of the first step it said that it has all before anybody had anything.
        told = [loss for t, loss in trainer.step_losses.items() if t > 0]  # of the last it may not hear
        assert told and all(map(math.isfinite, told))


# --- among members ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", some([math.inf, math.nan, -1.0], quick=[math.nan]))
async def test_an_impossible_bandwidth_does_not_end_the_coordinator(bad: float) -> None:
    async with swarm(stages=2) as s:
        await s.until_serving()
        liar = await member(s, 1)
        with pytest.raises(Refused, match="impossible bandwidth"):
            await liar.send("s1p0", "report", report(s, 1, bandwidth_bps=bad), [b""])
        s.add_trainer("trainer")
        await finishes(s)


async def test_a_member_with_an_endless_upload_does_not_end_the_coordinator() -> None:
    """The part of all that is its own was no number, nor was that of the next one's coordinator."""
    async with swarm(stages=2, replicas=3) as s:
        await s.until_serving()
        for peer in s.peers.values():
            peer.all_reduce.bandwidth_bps = 1.7e308 if peer.core.me == "s1p2" else 1e8
        s.add_trainer("trainer")
        await finishes(s)


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param({"version": -(10**9)}, marks=pytest.mark.further),
        {"version": 10**9},
        {"steps": (StepSummary(t=0, unclaimed=Bitmap(1 << 70), ready=False, sqnorm=0.0),)},
        pytest.param({"steps": (StepSummary(t=0, ready=True, sqnorm=math.nan),)}, marks=pytest.mark.further),
        {"commits": (Commit(t=10**9, total_sqnorm=1.0),)},
    ],
)
async def test_an_impossible_summary_is_refused_and_the_run_coordinator_goes_on(
    lie: dict[str, object],
) -> None:
    async with swarm(stages=2) as s:
        await s.until_serving()
        liar = await member(s, 1)
        with pytest.raises(Refused):
            await liar.send("s0p0", "summary", summary(s, 1, **lie))
        s.add_trainer("trainer")
        await finishes(s)


@pytest.mark.parametrize("by", ["report", "summary"])
async def test_a_commit_for_a_step_that_nobody_can_have_prepared_is_forgotten(by: str) -> None:
    """It would hide every true one that comes after, for good, and travel from peer to peer."""
    run = audit_run(stages=2, steps=3, microbatches_per_step=8)
    async with swarm(run) as s:
        await s.until_serving()
        liar = await member(s, 1)
        commit = Commit(t=run.steps - 1, total_sqnorm=1.0)
        if by == "report":
            await liar.send("s1p0", "report", report(s, 1, commits=(commit,)), [b""])
        else:
            await liar.send("s0p0", "summary", summary(s, 1, commits=(commit,)))
        s.network.kill(LIAR)
        s.add_trainer("trainer")
        await finishes(s)


@pytest.mark.parametrize(
    ("number", "start", "by"),
    cases(
        [(*of, by) for of in ((1, 0), (1, 2), (10**6, 3)) for by in ("report", "summary")],
        name="{0}-{1}-{2}",
        quick=lambda number, start, by: (start, by) == (3, "summary"),
    ),
)
async def test_a_generation_that_calls_a_served_stage_lost_is_entered_by_no_peer(
    by: str, number: int, start: int
) -> None:
    """Said again and again, before there is a trainer, while the run stands still and while it goes on."""
    run = audit_run(stages=2, steps=3, microbatches_per_step=8)
    async with swarm(run) as s:
        await s.until_serving()
        liar = await member(s, 1)
        lie = {"generation": Generation(number, start, lost_stage=0, lost_version=3), "version": start}

        async def repeat() -> None:
            while True:
                with contextlib.suppress(SwarmError):
                    if by == "report":
                        await liar.send("s1p0", "report", report(s, 1, **lie), [b""])
                    else:
                        await liar.send("s0p0", "summary", summary(s, 1, **lie))
                await asyncio.sleep(0.3)

        lying = asyncio.create_task(repeat())
        await asyncio.sleep(20.0)
        s.add_trainer("trainer")
        await finishes(s)
        lying.cancel()
        assert {peer.core.generation for peer in s.peers.values()} == {Generation()}


async def test_a_generation_of_a_stage_that_there_is_not_is_entered_by_no_peer() -> None:
    """Nobody can disprove it: all of a stage were in it by one answer of the run's coordinator, refused what
    the others of it said then, and no step was taken any more.
    """
    run = admitting(audit_run(stages=2, steps=3, microbatches_per_step=4))
    async with swarm(run, replicas=3) as s:
        give_voice(s, *s.peers)
        await s.until_serving()
        handlers = s.network.transports["s0p0"].handlers
        honest, most_bytes = handlers["summary"]

        async def lie(request: Request) -> Answer:
            said = unpack((await honest(request)).header, RunStatus)
            made_up = Generation(said.generation.number, 0, lost_stage=run.S)
            return Answer(pack(msgspec.structs.replace(said, generation=made_up)))

        handlers["summary"] = lie, most_bytes
        await asyncio.sleep(20.0)
        s.add_trainer(TRAINER)
        await finishes(s)
        assert {peer.core.generation for peer in s.peers.values()} == {Generation()}


async def test_a_stage_that_claims_to_be_far_ahead_does_not_stop_the_run_coordinator() -> None:
    """It looks at the steps that are open, not at all between its own and the one that is claimed."""
    run = audit_run(stages=2, steps=10**9, microbatches_per_step=8)
    async with swarm(run) as s:
        await s.until_serving()
        liar = await member(s, 1)
        await asyncio.wait_for(liar.send("s0p0", "summary", summary(s, 1, version=10**9)), 5.0)


async def test_a_reduce_is_void_whatever_a_member_answers() -> None:
    network = CalmNetwork()
    run, plan = (
        "run",
        Plan(round_id("run", 0, 0, 0, ("a", "z"), (1, 2), (3, 3)), 0, ("a", "z"), (1, 2), (3, 3)),
    )
    unchecked: Any = SimpleNamespace(open=lambda *_: None)
    transport = network.join("a").transport
    mine = AllReduce(run, "a", transport, torch.float64, unchecked, lambda total: total)

    async def stale(request: Request) -> Answer:
        raise Stale("step 0 is over", version=7)

    network.join("z").transport.serve("part", stale, max_body_bytes=1000)
    with pytest.raises(RoundAborted, match="step 0 is over"):
        await mine.run(plan, 0, torch.ones(6, dtype=torch.float64))
    await network.close()


@pytest.mark.parametrize("begun", [False, True])
async def test_the_result_of_a_round_that_never_was_is_fetched_by_no_replica(begun: bool) -> None:
    """Told before there is any round, and while rounds go on."""
    async with swarm(stages=2) as s:
        await s.until_serving()
        liar = await member(s, 1)
        asked: list[str] = []

        async def give(request: Request) -> Answer:
            asked.append(request.peer)
            raise NotReady("it is not here", version=0)

        liar.end.transport.serve("held", give)
        if begun:
            s.add_trainer("trainer")

        async def repeat() -> None:
            while True:
                t = max(peer.core.version for peer in s.peers.values())
                held = Prepared("f" * 32, 1.0, "d" * 32)
                steps = (StepReport(t=t, prepared=held, frozen_for="f" * 32),)
                with contextlib.suppress(SwarmError):
                    await liar.send("s1p0", "report", report(s, 1, version=t, steps=steps), [b""])
                await asyncio.sleep(0.1)

        lying = asyncio.create_task(repeat())
        await asyncio.sleep(1.0)
        if not begun:
            s.add_trainer("trainer")
        await finishes(s)
        lying.cancel()
        assert not asked


# --- trainers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "handlers",
    some(
        ["none", "no work", "the run is over", "the run is far ahead"],
        quick=["none", "no work", "the run is over"],
    ),
)
async def test_a_record_at_stage_0_ends_no_trainer_and_does_not_hold_it_up(handlers: str) -> None:
    """Of two that answer in the order of their ids the liar is the first."""
    async with swarm(stages=2) as s:
        await s.until_serving()
        liar = s.add_stranger("a")
        if handlers == "no work":
            honest, most = s.network.peers["s0p0"].transport.handlers["watch"]
            liar.end.transport.serve("watch", honest, max_body_bytes=most)
        elif handlers != "none":
            last = s.run.steps if handlers == "the run is over" else s.run.steps - 1
            status = RunStatus(run=s.run.id, version=last, held_by_all=last)

            async def watch(request: Request) -> Answer:
                await asyncio.sleep(0.5)
                return Answer(pack(Watched(revision=1, version=last, status=status)))

            liar.end.transport.serve("watch", watch)
        record = PeerRecord(peer="a", run=s.run.id, stage=0, state="serving", version=0, max_inflight=8)
        await liar.end.directory.announce(record)
        await asyncio.sleep(2.0)
        trainer = s.add_trainer("trainer")
        await finishes(s)
        await asyncio.wait_for(asyncio.shield(s.tasks["trainer"]), 10.0)
        assert len(trainer.step_losses) == s.run.steps


# --- between stages -----------------------------------------------------------------------------------------


def answering(network: CalmNetwork, hops: dict[str, Hop]) -> tuple[NextStage, Counter[str]]:
    """A caller of stage 1, and how often its peers were asked, which say these hops."""
    asked, me = Counter(dict.fromkeys(hops, 0)), network.join("me")
    for name, hop in hops.items():

        async def answer(request: Request, hop: Hop = hop) -> Answer:
            asked[hop.peer] += 1
            await asyncio.sleep(0.01)
            return Answer(pack(WorkDone(loss=0.0, hops=(hop,))))

        network.join(name).transport.serve("work", answer)
    return NextStage(
        "run", 1, me.transport, me.directory, Router(), stages=2, on_fault=lambda fault: None
    ), asked


async def ask_often(following: NextStage, network: CalmNetwork, *there: str) -> None:
    """Forty microbatches, once these have said that they serve."""
    for name in there:
        record = PeerRecord(peer=name, run="run", stage=1, state="serving", version=0)
        await network.peers[name].directory.announce(record)
    how = WorkCall(body=(), max_answer_bytes=0, check=lambda *_: None, closed=lambda: None)
    for m in range(40):
        await following.call(Work(run="run", t=0, m=m, version=0), how)


@pytest.mark.parametrize("own_s", [math.nan, -1e9, math.inf])
async def test_a_time_that_cannot_be_true_draws_no_work_to_its_peer(own_s: float) -> None:
    network = CalmNetwork()
    told = {"a": 0.01, "z": own_s}
    hops = {name: Hop(stage=1, peer=name, own_s=own_s, compute_s=0.0) for name, own_s in told.items()}
    following, asked = answering(network, hops)
    await ask_often(following, network, *hops)
    assert min(asked.values()) >= 5
    await network.close()


async def test_who_is_there_first_and_lies_about_its_upload_leaves_work_to_all_that_follow() -> None:
    """The clocks of those began at its own, beyond which they did not move: one of them got it all."""
    network = CalmNetwork()
    names = [*"abcz"]
    hops = {name: Hop(stage=1, peer=name, own_s=0.01, compute_s=0.01) for name in names}
    hops["z"] = msgspec.structs.replace(hops["z"], upload_s=1e300)
    following, asked = answering(network, hops)
    await ask_often(following, network, "z")
    await ask_often(following, network, *"abc")
    assert min(asked[name] for name in "abc") >= 8
    await network.close()


async def test_an_answer_that_would_not_fit_when_it_is_passed_on_is_not_taken() -> None:
    """Else the stage before would keep an answer that it can never give, and the step would never end."""
    async with swarm(audit_run(stages=3, steps=2, microbatches_per_step=8), replicas=0) as s:
        for stage, name in enumerate(("s0p0", "s1" + "p" * 50, "s2p0")):
            s.add_peer(name, stage)
        await s.until_serving()
        handlers = s.network.peers["s2p0"].transport.handlers
        honest, most = handlers["work"]
        lies = 0

        async def lie(request: Request) -> Answer:
            nonlocal lies
            answer = await honest(request)
            lies += 1
            if lies > 3:
                return answer
            done = unpack(answer.header, WorkDone)
            room = MAX_HEADER_BYTES - len(answer.header) - 5
            (hop,) = done.hops
            long = msgspec.structs.replace(hop, peer=hop.peer + "s" * room)
            return Answer(pack(msgspec.structs.replace(done, hops=(long,))), answer.body)

        handlers["work"] = (lie, most)
        s.add_trainer("trainer")
        await finishes(s)
        assert lies > 3


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"deepest": 2}, "no stage 2"),
        ({"deepest": -2}, "no stage -2"),
        ({"attempt": -1}, "attempt -1"),
        ({"attempt": 2**63}, "attempt 9223372036854775808"),
    ],
)
async def test_work_that_no_trainer_asks_for_is_refused(changes: dict[str, int], text: str) -> None:
    async with swarm(stages=2, replicas=1) as s:
        await s.until_serving()
        stranger = s.add_stranger()
        work = Work(run=s.run.id, t=0, m=3, version=0, tensors=input_metas(s.run, 0))
        body: list[Buffer] = stranger.tokens(0, 3, s.batches)
        await stranger.send("s0p0", "work", work, body)
        with pytest.raises(Refused, match=text):
            await stranger.send("s0p0", "work", msgspec.structs.replace(work, **changes), body)
        s.add_trainer("trainer")
        await finishes(s)


# --- at the end ---------------------------------------------------------------------------------------------


async def test_a_brief_that_comes_while_a_peer_ends_does_not_keep_it() -> None:
    """It would start an all-reduce whose other members end as well, and wait for them."""
    async with swarm(stages=1) as s:
        s.add_trainer("trainer", window=2)
        replica, leaving, directive = s.peers["s0p0"], s.peers["s0p1"], None
        close = leaving.coordination.close

        async def interrupted() -> None:
            """What the coordinator says once more, in the middle of the end."""
            await close()
            assert directive is not None and directive.steps[0].plan is not None
            step = leaving.core.steps[0]
            step.failed_round = ""
            obey(leaving, directive)

        def end(*_: str) -> None:
            nonlocal directive
            directive = replica.coordination.directive
            for name in ("trainer", "s0p0", "s0p1"):
                s.tasks[name].cancel()

        leaving.coordination.close = interrupted  # type: ignore[method-assign]
        s.on_call("part", end)
        await s.until(lambda: directive is not None)
        done, _ = await asyncio.wait(s.tasks.values(), timeout=15.0, return_when=asyncio.ALL_COMPLETED)
        assert len(done) == 3
