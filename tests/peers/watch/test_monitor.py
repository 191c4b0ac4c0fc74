"""The monitor: sees everybody, asks rarely, and takes no harm from what it hears."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from peers.ports import Answer, Request
from peers.watch import monitor
from peers.watch.monitor import Monitor, WatchPace
from swarm.errors import PeerGone
from swarm.manifest import AdmissionSpec, IslandsSpec, Run, demo_run
from swarm.monitoring.aggregator import Aggregator
from swarm.monitoring.health import Observation, PeerHealth, SwarmHealth
from swarm.records import NO_STAGE, PeerRecord
from swarm.wire.messages import AskStatus, LedgerCounts, PastStep, PeerStatus, pack, unpack
from tests.peers.network import CalmNetwork
from tests.peers.sybils import admitting, voucher

pytestmark = pytest.mark.virtual_time

RUN = demo_run(stages=2, steps=40)


FOUNDER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
FOUNDED = replace(RUN, admission=AdmissionSpec(founders=(FOUNDER,)))


def record(peer: str, stage: int) -> PeerRecord:
    return PeerRecord(peer=peer, run=RUN.id, stage=stage, state="serving", version=3, speed=1.5)


def status(peer: str, stage: int) -> PeerStatus:
    return PeerStatus(
        peer=peer, stage=stage, version=4, state="serving", device="cpu", done=5, inflight=2, max_inflight=4,
        speed=2.25, computed=70, coordinator=peer, audit=LedgerCounts(), since=0.0,
        past=(PastStep(version=4, took_s=1.0, loss=3.25),),
    )  # fmt: skip


class Scene:
    """Peers that answer, a monitor that looks at them, and what it sees."""

    def __init__(self, network: CalmNetwork, run: Run = RUN) -> None:
        self.network, self.run = network, run
        self.asked: Counter[str] = Counter()
        self.looks: list[Observation] = []
        self.refused: dict[str, int] = {}
        self._observer = Aggregator(RUN)
        self._news = asyncio.Event()
        self.watcher = network.join("watcher")
        self.waiting = self.most_waiting = 0
        """Questions under way, now and at most."""

    async def add(self, name: str, stage: int, said: bytes | None = None) -> None:
        peer = self.network.join(name)

        async def answer(request: Request) -> Answer:
            self.asked[name] += 1
            return Answer(pack(status(name, stage)) if said is None else said)

        peer.transport.serve("status", answer)
        await peer.directory.announce(record(name, stage))

    def take(self, look: Observation) -> None:
        self.looks.append(look)
        self._observer.observe(look)
        self._news.set()

    @property
    def health(self) -> SwarmHealth:
        return self._observer.health(now=self.looks[-1].at)

    def peer(self, name: str) -> PeerHealth:
        return next(peer for peer in self.health.peers if peer.peer == name)

    @contextlib.asynccontextmanager
    async def watched(self, **settings: float) -> AsyncIterator[None]:
        pace = WatchPace(observe_every_s=0.01, peer_every_s=0.03, silent_every_s=0.05, ask_s=0.5)
        watcher = self.watcher
        call = watcher.transport.call

        async def counted(*asked: Any, **how: Any) -> Answer:
            self.waiting += 1
            self.most_waiting = max(self.waiting, self.most_waiting)
            try:
                return await call(*asked, **how)
            finally:
                self.waiting -= 1

        watcher.transport.call = counted  # type: ignore[method-assign]
        looking = Monitor(
            self.run,
            watcher.transport,
            watcher.directory,
            self.take,
            refused=lambda: self.refused,
            pace=pace._replace(**settings),
        )
        task = asyncio.create_task(looking.run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def until(self, condition: Callable[[], object]) -> None:
        while not self.looks or not condition():
            self._news.clear()
            await self._news.wait()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    network = CalmNetwork(silence_s=0.05)
    scene = Scene(network)
    for name, stage in (("peer-a", 0), ("peer-b", 0), ("peer-c", 1)):
        await scene.add(name, stage)
    yield scene
    await network.close()


async def test_everybody_is_seen_and_asked(scene: Scene) -> None:
    async with scene.watched():
        await scene.until(lambda: all(peer.answered for peer in scene.health.peers))
    assert [(peer.peer, peer.version) for peer in scene.health.peers] == [
        ("peer-a", 4),
        ("peer-b", 4),
        ("peer-c", 4),
    ]
    assert (scene.health.version, scene.health.loss) == (4, 3.25)
    assert [record.peer for record in scene.looks[0].records] == ["peer-a", "peer-b", "peer-c"]
    assert not any(look.records or look.gone for look in scene.looks[1:])


async def test_no_peer_is_asked_more_often_than_it_should_be(scene: Scene) -> None:
    async with scene.watched(peer_every_s=3600.0):
        await scene.until(lambda: len(scene.looks) > 30)
    assert scene.asked == {"peer-a": 1, "peer-b": 1, "peer-c": 1}


async def test_of_many_peers_a_few_are_asked_per_look_and_all_have_their_turn(scene: Scene) -> None:
    for i in range(100):
        await scene.add(f"p{i:03d}", i % 2)
    async with scene.watched(peer_every_s=0.0):
        await scene.until(lambda: len(scene.asked) == 103)
    assert max(len(look.statuses) for look in scene.looks) <= monitor.MAX_ASKED_EACH
    assert len(scene.looks) >= 103 // monitor.MAX_ASKED_EACH
    assert max(scene.asked.values()) <= 2


async def test_the_word_of_those_that_worked_for_any_island_counts() -> None:
    """Trainers vouch for them under the id of their island."""
    network = CalmNetwork(silence_s=0.05)
    run = admitting(replace(RUN, islands=IslandsSpec(count=2, local_steps=3)))
    for cell in range(run.cells):
        for name in (f"worker {cell}", f"stranger {cell}"):
            said = msgspec.structs.replace(record(name, cell), run=run.id)
            if name[0] == "w":
                said = msgspec.structs.replace(said, voucher=voucher(run.island(cell // run.S), name))
            await network.join(name).directory.announce(said)
    watcher = network.join("watcher")
    look = await Monitor(run, watcher.transport, watcher.directory).once(calls=False)
    assert look.voice == {f"worker {cell}": 30 for cell in range(4)}
    await network.close()


async def test_of_a_crowd_those_whose_word_counts_are_asked_first() -> None:
    """At once nobody is asked in vain: each question takes files, of which a program may open 1024."""
    network = CalmNetwork(silence_s=0.05)
    scene = Scene(network, FOUNDED)
    for i in range(monitor.MAX_ASKED_ONCE):
        await scene.add(f"a-stranger-{i}", i % 2)
    await scene.add(FOUNDER, 0)
    look = await Monitor(FOUNDED, scene.watcher.transport, scene.watcher.directory).once()
    assert len(look.records) == monitor.MAX_ASKED_ONCE + 1
    assert scene.asked[FOUNDER] and scene.asked.total() == monitor.MAX_ASKED_ONCE
    scene.asked.clear()
    async with scene.watched(peer_every_s=0.0):
        await scene.until(lambda: scene.asked[FOUNDER] >= 5)
        assert 10 <= len(scene.asked) < 100, "the others have their turn, too"
    await network.close()


async def test_those_that_hang_hold_nobody_up_and_are_few_at_a_time(scene: Scene) -> None:
    hung = monitor.MAX_ASKED + 8
    for i in range(hung):
        await scene.add(f"hung{i:02d}", 1)
        scene.network.stop(f"hung{i:02d}")
    async with scene.watched():
        await scene.until(lambda: sum(bool(peer.why) for peer in scene.health.peers) == hung)
        await scene.until(lambda: all(scene.peer(f"peer-{name}").answered for name in "abc"))
    assert scene.most_waiting == monitor.MAX_ASKED


async def test_a_dead_peer_is_named_and_leaves_with_its_record(scene: Scene) -> None:
    async with scene.watched():
        await scene.until(lambda: scene.health.stages[0].serving == 2)
        scene.network.kill("peer-b")
        await scene.until(lambda: any(peer.why for peer in scene.health.peers))
        assert "stage 0 has one peer left" in [alert.text for alert in scene.health.alerts]
        scene.network.expire("peer-b")
        await scene.until(lambda: len(list(scene.health.peers)) == 2)
    assert scene.health.happenings[-1].kind == "lost"


async def test_a_look_tells_only_what_is_new(scene: Scene) -> None:
    async with scene.watched(peer_every_s=3600.0):
        await scene.until(lambda: len(scene.looks) > 20)
        scene.refused = {"a record with a wrong signature": 2}
        await scene.until(lambda: scene.health.refused)
    quiet = scene.looks[15]
    assert (quiet.statuses, quiet.silent, quiet.refused) == ((), {}, None)
    assert [look.refused for look in scene.looks if look.refused] == [scene.refused]


async def test_a_refusal_that_quotes_a_stranger_cannot_steer_the_terminal(scene: Scene) -> None:
    async with scene.watched():
        scene.refused = {"a manifest that cannot be used: \x1b[2J = 3: unknown key": 1}
        await scene.until(lambda: scene.health.refused)
    assert scene.health.refused == {"a manifest that cannot be used: ?[2J = 3: unknown key": 1}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"\xff", "malformed PeerStatus header"),
        (b"\x81\xa4peer\xc3", "malformed PeerStatus header"),
        (pack(status("peer-a", 1)), "answered with a status in the name of 'peer-a'"),
        (
            pack(msgspec.structs.replace(status("liar", 1), speed=float("nan"))),
            "impossible number: speed nan",
        ),
        (pack(msgspec.structs.replace(status("liar", 1), version=1 << 40)), "a status of version"),
    ],
)
async def test_nonsense_is_shown_as_such_and_crashes_nothing(scene: Scene, said: bytes, why: str) -> None:
    await scene.add("liar", 1, said)
    async with scene.watched():
        await scene.until(lambda: scene.peer("liar").why)
        assert why in scene.peer("liar").why
        before = scene.asked["liar"]
        await scene.until(lambda: scene.asked["liar"] > before)  # it may have come to its senses
    assert scene.peer("peer-a").answered


async def test_a_run_that_nobody_serves_is_looked_at_too() -> None:
    network = CalmNetwork(silence_s=0.05)
    scene = Scene(network)
    async with scene.watched():
        await scene.until(lambda: len(scene.looks) > 2)
    assert scene.health.alerts[0].text == "stage 0 has no peer: the run waits until one joins"
    await network.close()


async def test_a_peer_that_is_just_joining_and_serves_nothing_yet_is_no_silent_one(scene: Scene) -> None:
    newcomer = scene.network.join("peer-d")
    joining = msgspec.structs.replace(record("peer-d", 1), state="joining")
    await newcomer.directory.announce(joining)
    async with scene.watched():
        await scene.until(lambda: scene.asked["peer-a"] > 3)
        assert (scene.peer("peer-d").state, scene.peer("peer-d").why) == ("joining", "")


async def test_a_peer_that_cannot_be_reached_because_it_left_is_no_silent_one(scene: Scene) -> None:
    """The directory tells it when it is asked again."""
    watcher, late = scene.watcher, record("peer-d", 1)
    for state in ("left", "serving"):
        told = Told(watcher.directory, {late.peer: state})
        asked = Monitor(RUN, watcher.transport, told, pace=WatchPace(ask_s=0.5)).status_of(late)  # type: ignore
        if state == "left":
            assert await asked is None
        else:
            with pytest.raises(PeerGone):
                await asked


class Told:
    """A directory that learns what it is asked for by `refresh` only."""

    def __init__(self, directory: Any, states: dict[str, Any]) -> None:
        self._directory, self._states, self._asked = directory, states, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._directory, name)

    async def refresh(self, stages: Any = None) -> None:
        self._asked = True

    def find(self, peer: str) -> PeerRecord | None:
        state = self._states[peer] if self._asked else "serving"
        return msgspec.structs.replace(record(peer, 1), state=state)


async def test_a_peer_is_asked_for_the_steps_that_it_has_not_told_of() -> None:
    network, asked = CalmNetwork(), list[int]()
    peer, watcher = network.join("a"), network.join("watcher")
    told = tuple(PastStep(version=version, took_s=1.0, loss=2.0) for version in (2, 3, 4))

    async def answer(request: Request) -> Answer:
        asked.append(after := unpack(request.header, AskStatus).after)
        later = tuple(step for step in told if step.version > after >= 0)
        return Answer(pack(msgspec.structs.replace(status("a", 0), past=later)))

    peer.transport.serve("status", answer)
    await peer.directory.announce(record("a", 0))
    looks: list[Observation] = []
    watching = asyncio.create_task(
        Monitor(
            RUN, watcher.transport, watcher.directory, looks.append, pace=WatchPace(peer_every_s=0.0)
        ).run()
    )
    await asyncio.sleep(5.5)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert asked[0] == 0 and set(asked[1:]) == {4}
    assert [step.version for look in looks for one in look.statuses for step in one.past] == [2, 3, 4]
    await network.close()


async def test_trainers_that_give_data_are_no_peers_to_be_asked_nor_shown(scene: Scene) -> None:
    trainer = scene.network.join("trainer")
    feeding = PeerRecord(peer="trainer", run=RUN.id, stage=NO_STAGE, state="feeding", version=0)
    await trainer.directory.announce(feeding)
    async with scene.watched():
        await scene.until(lambda: min(scene.asked[name] for name in ("peer-a", "peer-b", "peer-c")) > 2)
    assert "trainer" not in {record.peer for look in scene.looks for record in look.records}
    assert not any("trainer" in look.silent for look in scene.looks) and not scene.health.keepers
