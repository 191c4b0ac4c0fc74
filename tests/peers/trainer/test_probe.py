"""Those that fell silent are asked whether they are back; nobody finds out with real work."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from peers.clock import now_s
from peers.liveness_probe import Prober
from peers.ports import Answer
from swarm.manifest import audit_run
from swarm.policy.backoff import Backoff
from swarm.records import PeerRecord
from tests.peers.loops import swarm
from tests.peers.network import CalmNetwork

pytestmark = pytest.mark.virtual_time

RUN = "f" * 32


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("never came true")


@pytest_asyncio.fixture
async def network() -> AsyncIterator[CalmNetwork]:
    network = CalmNetwork(silence_s=0.05)
    for name in ("me", "other"):
        peer = network.join(name)
        await peer.directory.announce(PeerRecord(peer=name, run=RUN, stage=0, state="serving", version=0))
    yield network
    await network.close()


@contextlib.asynccontextmanager
async def probing(network: CalmNetwork, backoff: Backoff) -> AsyncIterator[None]:
    me = network.peers["me"]
    running = asyncio.create_task(Prober(RUN, me.transport, me.directory, backoff).run())
    yield
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    left = [task for task in asyncio.all_tasks() if "Prober" in repr(task)]
    assert not left


async def test_a_stopped_peer_rests_until_it_continues(network: CalmNetwork) -> None:
    backoff = Backoff(first_s=0.001, probed=True)
    network.stop("other")
    backoff.failed("other", now=0.0, silent=True)
    asked = []
    network.on_deliver = lambda caller, callee, method: asked.append((caller, callee, method))
    async with probing(network, backoff):
        await asyncio.sleep(0.3)
        assert backoff.in_backoff("other", now=1e9)
        network.go_on("other")
        await until(lambda: not backoff.in_backoff("other", now=1e9))
        assert set(asked) == {("me", "other", "locate")}, "a refusal (nothing serves it here) is an answer"


async def test_one_that_stays_silent_is_asked_less_and_less(network: CalmNetwork) -> None:
    backoff, asked = Backoff(probed=True), list[float]()
    network.stop("other")
    backoff.failed("other", now=0.0, silent=True)
    call = network.peers["me"].transport.call

    async def noted(*given: Any, **options: Any) -> Answer:
        asked.append(now_s())
        return await call(*given, **options)

    network.peers["me"].transport.call = noted  # type: ignore[method-assign]
    async with probing(network, backoff):
        for _ in range(20):
            network.announce(PeerRecord(peer="other", run=RUN, stage=0, state="serving", version=0))
            await asyncio.sleep(10.0)
    gaps = [round(after - before, 1) for before, after in itertools.pairwise(asked)]
    assert gaps[:6] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0] and set(gaps[6:]) == {16.0}


async def test_nobody_is_asked_who_is_announced_no_more(network: CalmNetwork) -> None:
    backoff = Backoff(probed=True)
    network.kill("other")
    network.expire("other")
    backoff.failed("other", now=0.0, silent=True)
    async with probing(network, backoff):
        await until(lambda: not backoff.silent())


async def test_after_a_cut_heals_the_peers_behind_it_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rests that only end by themselves they would be idle for up to 30 s."""
    monkeypatch.setattr(
        Backoff.__init__, "__kwdefaults__", {"first_s": 30.0, "longest_s": 30.0, "probed": False}
    )
    async with swarm(audit_run(stages=3, steps=10_000, microbatches_per_step=8), job_s=0.2) as s:
        s.add_trainer("trainer")
        await s.until_version(1)
        cut = ["s0p1", "s1p1", "s2p1"]
        s.network.cut(cut, [p for p in s.network.peers if p not in cut])

        def version() -> int:
            return max(peer.core.version for peer in s.peers.values())

        cut_at = version()
        await s.until(lambda: version() >= cut_at + 4)
        behind = {name: s.peers[name].core.version for name in cut}
        assert max(behind.values()) < version()
        s.network.heal()
        healed = version()
        computed = {name: s.peers[name].core.computed for name in cut}
        await s.until(lambda: all(s.peers[name].core.version > healed for name in cut))
        await s.until(lambda: all(s.peers[name].core.computed > computed[name] for name in cut))
        for name, _ in s.live():
            version_of, counts = await s.counted(name)
            assert counts == [version_of] * s.run.M


async def newcomer_joins(shunning: Callable[[Backoff, str], object]) -> None:
    """Though it shuns all replicas of its stage as it comes."""
    async with swarm(audit_run(stages=2, steps=4, microbatches_per_step=4)) as s:
        await s.until_serving()
        s.add_trainer("trainer", steps=2)
        await s.until_version(2)
        newcomer = s.add_peer("newcomer", 1)
        for name in ("s1p0", "s1p1"):
            shunning(newcomer.core.backoff, name)
        await s.until(lambda: newcomer.core.joined, limit_s=30.0)
        assert newcomer.core.version == 2


async def test_a_newcomer_asks_silent_replicas_again_before_it_has_joined() -> None:
    """It came while a line was cut, say. It had waited for ever for those that it found silent then."""
    await newcomer_joins(lambda backoff, name: backoff.failed(name, now=now_s(), silent=True))


async def test_a_state_is_taken_from_replicas_that_rest_where_there_are_no_others() -> None:
    """One that they had cost too much took their stage for lost, and a finished run went back to 0."""
    await newcomer_joins(
        lambda backoff, name: backoff.charge(name, t=0, since_s=now_s(), now=now_s(), rounds=2)
    )
