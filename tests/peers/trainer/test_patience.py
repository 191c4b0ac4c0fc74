"""A peer that shows signs of life and never answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from peers.events import PeerLost
from peers.ports import Answer, Request
from swarm.errors import NotReady
from swarm.manifest import audit_run
from swarm.records import PeerRecord
from swarm.wire.messages import Work, unpack
from tests.peers.loops import Swarm, swarm
from tests.peers.tarpits import never_answered
from tests.seeds import some

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("stage", some([0, 1, 2], quick=[1]))
async def test_a_peer_that_never_answers_is_given_up_and_its_work_done_by_others(stage: int) -> None:
    async with swarm() as s:
        stuck = s.network.peers[f"s{stage}p1"].transport

        stuck.serve("work", never_answered, max_body_bytes=1 << 20)
        s.add_trainer("trainer")
        await s.until_version(s.run.steps, limit_s=5000.0)
        assert all((counts == s.run.steps).all() for counts in s.count_matrix().values())


async def add_silent(s: Swarm, name: str, stage: int) -> None:
    """An identity that takes work and never answers."""
    end = s.network.join(name)

    end.transport.serve("work", never_answered, max_body_bytes=1 << 20)
    await end.directory.announce(
        PeerRecord(
            peer=name, run=s.run.id, stage=stage, state="serving", version=0, max_inflight=8, since=1e12
        )
    )


@pytest.mark.slow
async def test_many_such_in_all_stages_cost_a_run_seconds() -> None:
    async with swarm(audit_run(stages=2, steps=1000, microbatches_per_step=8), job_s=0.08) as s:
        s.add_trainer("trainer")

        async def steps_within(lasts_s: float) -> int:
            before = s.peers["s0p0"].core.version
            await asyncio.sleep(lasts_s)
            return s.peers["s0p0"].core.version - before

        await s.until_version(8)
        usual = await steps_within(4.0)
        for number in range(20):
            await add_silent(s, f"z{number:03}", number % 2)
        assert await steps_within(20.0) > 2.5 * usual


async def test_of_a_route_one_at_most_has_never_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm(audit_run(stages=3, steps=60, microbatches_per_step=4)) as s:
        s.add_trainer("trainer")
        await s.until_version(2)
        for number in range(9):
            await add_silent(s, f"z{number:03}", number % 3)
        strangers, call = list[int](), s.network.call

        async def watched(caller: Any, peer: str, method: str, header: bytes, *rest: Any) -> Answer:
            if method == "work" and caller.peer_id == "trainer":
                strangers.append(sum(at[0] == "z" for at in (peer, *unpack(header, Work).route)))
            return await call(caller, peer, method, header, *rest)

        monkeypatch.setattr(s.network, "call", watched)
        await s.until_version(12)
        assert max(strangers) == 1


async def test_a_peer_twenty_times_slower_is_used_less_and_never_lost() -> None:
    """It takes part in reduces like the others, nor do they wait for it."""
    run = audit_run(stages=2, steps=8, microbatches_per_step=16)
    async with swarm(run) as s:
        s.job_s = 20 * s.job_s
        s.add_peer("slow", 1)
        await s.until_serving()
        s.add_trainer("trainer", window=8)
        await s.until_finished()
        s.assert_each_counted_once()
        assert not s.seen(PeerLost) and not s.voids(), s.story()
        computed = {name: s.peers[name].core.computed for name in s.of_stage(1)}
        mine = computed.pop("slow")
        assert 0 < mine < min(computed.values()) / 4, computed


async def test_no_microbatch_waits_for_one_of_stage_0_that_is_not_ready() -> None:
    """Its stage leaves it out for a minute, say."""
    async with swarm(audit_run(stages=1, steps=12, microbatches_per_step=4), replicas=2) as s:
        s.add_trainer("trainer")
        await s.until_version(2)

        async def not_ready(request: Request) -> Answer:
            raise NotReady("this peer's stage leaves it out for a while", version=2, retry_after_s=0.5)

        s.network.peers["s0p0"].transport.serve("work", not_ready, max_body_bytes=1 << 20)
        began_s = s.network.loop.now_s
        await s.until_version(6)
        assert s.network.loop.now_s - began_s < 1.0
