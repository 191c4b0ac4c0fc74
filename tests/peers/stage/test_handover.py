"""Who leaves hands its sum to a replica: nothing is run again, and nothing counts twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from peers.events import HandedOver, StageLost, Stepped
from peers.ports import Buffer
from peers.stage import handoff
from swarm.errors import NotNow, Refused
from swarm.manifest import CodecSpec, Run, audit_run
from swarm.protocol.ledger import Bitmap
from swarm.wire.messages import HandedSum, OfferedSum
from tests.peers.loops import Stranger, Swarm, swarm
from tests.seeds import some

pytestmark = pytest.mark.virtual_time


HANDOFF = ["offer", "give", "sum", "chunk", "take"]


def a_run(**more: int) -> Run:
    return audit_run(**{"stages": 3, "steps": 2, "microbatches_per_step": 24, **more})


async def half_a_step(built: Swarm, *, of: str, at_least: int = 2) -> None:
    """Stop training when a peer has some microbatches of step 0, and not all are done."""
    peer = built.peers[of]
    replicas = [replica for name, replica in built.live() if replica.stage == peer.stage and name != of]
    room, peer.microbatches.max_inflight = peer.microbatches.max_inflight, 0

    def turn(*_: str) -> None:
        """Its replicas had some; now it gets all. With two in flight, all but two of them were answered."""
        peer.microbatches.max_inflight = room
        for replica in replicas:
            replica.microbatches.max_inflight = 0
        built.on_call("work", lambda *_: trainer.leave(), to=of, nth=at_least + 2)

    for replica in replicas:
        built.on_call("work", turn, to=replica.core.me, nth=2)
    trainer = built.add_trainer("first", window=2)
    await built.tasks["first"]
    built.orders.clear()  # of several replicas one turned; another must not do it in what follows
    for replica in replicas:
        replica.microbatches.max_inflight = room
    await built.until(lambda: not any(peer.microbatches.inflight for _, peer in built.live()))


async def leaves(built: Swarm, name: str) -> None:
    built.peers[name].leave()
    await built.tasks[name]


ROUNDED = CodecSpec(forward="none", backward="none", reduce="rounded16")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("stage", "terms"),
    some(
        [(0, {}), (1, {}), (2, {}), (1, {"dtype": "float32"}), (2, {"dtype": "float32", "codec": ROUNDED})],
        quick=[(0, {}), (2, {"dtype": "float32", "codec": ROUNDED})],
    ),
)
async def test_a_sum_that_is_handed_over_is_not_run_again(stage: int, terms: dict[str, Any]) -> None:
    run = replace(a_run(), **terms)
    async with swarm(run) as built:
        await built.until_serving()
        name = f"s{stage}p0"  # also the coordinator of its stage
        await half_a_step(built, of=name)
        had, replicas = built.done(name), built.done(f"s{stage}p1")
        assert not had & replicas
        await leaves(built, name)
        assert built.done(f"s{stage}p1") & had == had
        (told,) = built.seen(HandedOver)
        assert (told.stage, told.t, told.microbatches) == (stage, 0, had.bit_count())
        built.add_trainer("second")
        await built.until_finished()
        built.assert_each_counted_once()
        assert sum(e.microbatches for e in built.seen(Stepped) if (e.stage, e.t) == (stage, 0)) == run.M


@pytest.mark.asyncio
async def test_the_mean_loss_of_a_step_knows_what_was_handed_over() -> None:
    async with swarm(a_run()) as built:
        await built.until_serving()
        await half_a_step(built, of="s2p0")
        step = built.step("s2p0")
        losses = {m: step.loss_of(m) for m in range(built.run.M) if step.ledger.done >> m & 1}
        await leaves(built, "s2p0")
        taken = built.step("s2p1")
        assert {m: taken.loss_of(m) for m in losses} == losses


@pytest.mark.asyncio
async def test_one_after_another_leaves_until_one_has_it_all() -> None:
    async with swarm(a_run(stages=2), replicas=3) as built:
        await built.until_serving()
        await half_a_step(built, of="s1p0")
        done = built.done("s1p0") | built.done("s1p1") | built.done("s1p2")
        await leaves(built, "s1p0")
        await leaves(built, "s1p1")
        assert built.done("s1p2") & done == done
        built.add_trainer("second")
        await built.until_finished()
        built.assert_each_counted_once()


@pytest.mark.asyncio
@pytest.mark.parametrize("method", some(HANDOFF, quick=["offer", "sum", "take"]))
async def test_a_mate_that_dies_while_it_takes_leaves_each_counted_once(method: str) -> None:
    async with swarm(a_run(stages=2), replicas=3) as built:
        await built.until_serving()
        await half_a_step(built, of="s1p0")
        built.on_call(method, lambda *ends: [built.kill(end) for end in ends if end != "s1p0"])
        await leaves(built, "s1p0")
        built.add_trainer("second")
        await built.until_finished()
        built.assert_each_counted_once()


@pytest.mark.asyncio
@pytest.mark.parametrize("method", some(HANDOFF, quick=["give", "chunk"]))
async def test_an_answer_that_is_lost_leaves_each_counted_once(method: str) -> None:
    async with swarm(a_run(stages=2)) as built:
        await built.until_serving()
        await half_a_step(built, of="s1p0")
        built.network.drop_answer("s1p0" if method in ("sum", "chunk") else "s1p1", method)
        await leaves(built, "s1p0")
        built.add_trainer("second")
        await built.until_finished()
        built.assert_each_counted_once()


@pytest.mark.asyncio
@pytest.mark.parametrize("method", some(HANDOFF, quick=["offer", "chunk"]))
async def test_a_peer_that_dies_while_it_gives_leaves_each_counted_once(method: str) -> None:
    async with swarm(a_run(stages=2)) as built:
        await built.until_serving()
        await half_a_step(built, of="s1p0")
        built.on_call(method, lambda *_: built.kill("s1p0"))
        built.peers["s1p0"].leave()
        built.add_trainer("second")
        await built.until_finished()
        built.assert_each_counted_once()


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
async def test_peers_that_leave_and_come_in_the_midst_of_training_lose_nothing(seed: int) -> None:
    run = a_run(stages=2, steps=20, microbatches_per_step=8)
    async with swarm(run) as built:
        await built.until_serving()
        built.add_trainer("trainer", window=4)
        for turn in range(3):
            await built.until_next_step()
            await built.until_serving()  # the one of the turn before: who leaves needs a replica
            await asyncio.sleep(0.003 * ((seed * 7 + turn * 3) % 10))
            stage = (seed + turn) % 2
            name = built.of_stage(stage)[seed % 2]
            built.add_peer(f"late{turn}", stage)
            await leaves(built, name)
        await built.until_finished()
        built.assert_each_counted_once()


@pytest.mark.asyncio
async def test_a_repeated_request_for_what_was_handed_over_is_answered_and_not_added() -> None:
    """A stage before it lost the microbatch: its replay needs the gradient, whose keeper has left."""
    async with swarm(a_run(stages=2)) as built:
        await built.until_serving()
        await half_a_step(built, of="s1p0")
        await leaves(built, "s1p0")
        built.kill("s0p0")
        built.kill("s0p1")
        built.add_peer("late", 0)
        built.add_trainer("second")
        await built.until_finished(limit_s=60)
        built.assert_each_counted_once()


@pytest.mark.asyncio
async def test_a_duplicate_of_what_was_handed_over_is_undone_where_that_can_be() -> None:
    async with swarm(a_run(stages=1, microbatches_per_step=60), replicas=3) as built:
        await built.until_serving()
        await half_a_step(built, of="s0p2")
        had = built.done("s0p2")
        await leaves(built, "s0p2")
        taker = next(n for n in ("s0p0", "s0p1") if built.step(n).ledger.inherited)
        other = "s0p1" if taker == "s0p0" else "s0p0"
        assert built.step(taker).ledger.inherited == had
        # A stale retry computes one of them at the other peer.
        m = had.bit_length() - 1
        client = built.add_stranger()
        from swarm.model.stage_io import input_metas
        from swarm.wire.messages import Work

        work = Work(run=built.run.id, t=0, m=m, version=0, tensors=input_metas(built.run, 0))
        await client.send(other, "work", work, client.tokens(0, m, built.batches))
        assert built.done(other) >> m & 1
        built.add_trainer("second")
        await built.until_finished()
        built.assert_each_counted_once()
        assert built.peers[other].core.undone >= 1  # the trainer may have raced for others too


async def a_taker(built: Swarm) -> Stranger:
    """Somebody who is announced at stage 0, so that it may hand over."""
    await built.until_serving()
    stranger = built.add_stranger("s0liar")
    records = built.network.records
    import msgspec

    await stranger.end.directory.announce(msgspec.structs.replace(records["s0p0"], peer="s0liar"))
    return stranger


@pytest.mark.asyncio
async def test_what_does_not_fit_is_refused_with_a_reason() -> None:
    async with swarm(a_run(stages=1), replicas=1) as built:
        liar, run = await a_taker(built), built.run
        done = Bitmap(0b11)

        async def refused(method: str, header: object, body: Sequence[Buffer], text: str) -> None:
            with pytest.raises((Refused, NotNow)) as error:
                await liar.send("s0p0", method, header, list(body))  # type: ignore[arg-type]
            assert text in error.value.text, error.value.text

        offer = HandedSum(run=run.id, t=0, done=done)
        await refused("offer", HandedSum(run="0" * 32, t=0, done=done), [], "this peer serves run")
        await refused("offer", HandedSum(run=run.id, t=3, done=done), [], "step 3 is not open here")
        beyond = "the ledger names a microbatch beyond 23"
        await refused("offer", HandedSum(run=run.id, t=0, done=Bitmap(1 << 40)), [], beyond)
        take = HandedSum(run=run.id, t=0, done=done)
        await refused("take", take, [], "has not come as a whole")
        answer = await liar.ask("s0p0", "offer", offer, OfferedSum)
        assert not answer.overlap
        give = HandedSum(run=run.id, t=0, done=done)
        await refused("give", give, [], "could not download the sum of step 0: peer s0liar: no such method")
        await refused("take", take, [], "has not come as a whole")
        await refused("sum", HandedSum(run=run.id, t=0, done=done), [], "no sum of step 0 is handed off here")
        assert built.done("s0p0") == 0


@pytest.mark.asyncio
async def test_a_stranger_hands_nothing_over() -> None:
    async with swarm(a_run(stages=1), replicas=1) as built:
        await built.until_serving()
        with pytest.raises(NotNow, match="is not announced at stage 0"):
            offer = HandedSum(run=built.run.id, t=0, done=Bitmap(1))
            await built.add_stranger().send("s0p0", "offer", offer)


@pytest.mark.asyncio
@pytest.mark.slow
async def test_with_the_ledger_forgotten_the_count_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of this file's tests: a taker that adds and forgets to write it down is found out."""

    def add(self: handoff.Handoff, step: object, total: torch.Tensor, done: int, losses: object) -> None:
        self._core.compute.sums.add_sum(step.t, total)  # type: ignore[attr-defined]

    monkeypatch.setattr(handoff.Handoff, "_add", add)
    async with swarm(a_run(stages=2)) as built:
        await built.until_serving()
        await half_a_step(built, of="s1p0")
        await leaves(built, "s1p0")
        built.add_trainer("second")
        await built.until_finished()
        with pytest.raises(AssertionError):
            built.assert_each_counted_once()


@pytest.mark.asyncio
async def test_two_that_leave_in_one_moment_do_not_take_the_newest_version_along() -> None:
    """The only replica that stays missed steps: it gets them before they are gone."""
    run = a_run(steps=6)
    async with swarm(run, replicas=0) as built:
        for name, stage in (("a", 0), ("b", 0), ("c", 0), ("d", 1), ("e", 2)):
            built.add_peer(name, stage)
        await built.until_serving()
        built.add_trainer("trainer")
        await built.until_version(2)
        built.network.stop("c")
        await built.tasks["trainer"]
        await built.until(lambda: all(built.peers[name].core.version == run.steps for name in "abde"))
        slow = built.peers["c"]
        assert slow.core.version < run.steps
        slow.core.changing = True  # as when a download takes its time
        built.network.go_on("c")
        for name in "ab":
            built.peers[name].leave()
        gone = {built.tasks["a"], built.tasks["b"]}
        assert not (await asyncio.wait(gone, timeout=1.0))[0]
        slow.core.changing = False
        await asyncio.gather(*gone)
        assert slow.core.version == run.steps
        assert not built.seen(StageLost)
