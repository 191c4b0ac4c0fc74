"""A whole swarm in one event loop: real stage peers and trainers over the in-memory network, in virtual time.

Tests that use it are marked `virtual_time`; all that waits, waits as long as in earnest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from peers import fault_points
from peers.clock import now_s
from peers.events import AddedUp, Event, RoundAborted, Stepped
from peers.islands.directory import split_cell
from peers.owner.commands import Owner
from peers.ports import Answer, Buffer, Rank
from peers.sim.device import SimDevice
from peers.sim.dice import Dice
from peers.sim.loop import PROCESS, Killed
from peers.sim.setting import tree_of_zeros
from peers.stage.open_step import OpenStep
from peers.stage.pause import PausedPeer, PeerLife
from peers.stage.server import StagePeer
from peers.stage.settings import StageSettings
from peers.trainer import Trainer, TrainerSettings
from peers.transfer.leases import Snapshot
from swarm.data import prove_samples, sample_offsets, token_dtype
from swarm.manifest import Run, audit_run
from swarm.model.stage import StageCompute
from swarm.protocol.messages import Directive
from swarm.protocol.replica import follow
from swarm.wire.messages import pack, unpack
from tests.model.chain import weights_of
from tests.peers.network import CalmNetwork, End

JOB_S = 0.02
"""What a forward or backward takes, on average."""

LATENCY_S = 0.002
"""One way, of each call."""

E = TypeVar("E", bound=Event)
A = TypeVar("A")


class Zeros:
    """Data for the audit model, whose result does not depend on it."""

    def __init__(self, run: Run) -> None:
        self._shape = run.data.sequence_length + 1
        self._dtype = token_dtype(run.model.vocab_size)

    def batch(self, offsets: list[int]) -> np.ndarray:
        return np.zeros((len(offsets), self._shape), dtype=self._dtype)

    def prove(self, run: Run, offsets: list[int]) -> bytes:
        return prove_samples(run, tree_of_zeros(run.data.tokens), offsets)


When = Callable[[str], bool]


def always(_: str) -> bool:
    return True


@dataclass
class Swarm:
    """`peers[name]` serve, `trainers[name]` train; each in a task of its own."""

    run: Run
    network: CalmNetwork
    batches: Any
    dice: Dice = field(default_factory=lambda: Dice(1))
    peers: dict[str, StagePeer] = field(default_factory=dict)
    owners: dict[str, Owner] = field(default_factory=dict)
    trainers: dict[str, Trainer] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    orders: list[Callable[[str, str, str], bool]] = field(default_factory=list)
    points: list[Callable[[str, str], bool]] = field(default_factory=list)
    job_s: float = JOB_S

    def add_peer(self, name: str, stage: int, **settings: object) -> StagePeer:
        """`stage`: of a run of several islands the cell."""
        end = self.network.join(name)
        owner = self.owners[name] = Owner()
        settings.setdefault("started_at", now_s())

        def make(stage: int, kept: Snapshot | None) -> StagePeer:
            run, stage = split_cell(self.run, stage)
            peer = StagePeer(
                run, stage, StageCompute(run, stage), end.transport, end.directory,
                replace(StageSettings(max_inflight=8), **settings), self.events.append, kept=kept,
                device=SimDevice(self.dice, self.job_s),
            )  # fmt: skip
            self.peers[name] = peer
            return peer

        first = [end.process.context.run(make, stage, None)]

        async def build(stage: int, kept: Snapshot | None) -> StagePeer:
            return first.pop() if first else make(stage, kept)

        def hold(stage: int, kept: Snapshot | None) -> PausedPeer:
            self.peers.pop(name, None)
            first.clear()  # paused before it began: its methods are answered by another now
            asked = replace(StageSettings(), **settings)
            run, stage = split_cell(self.run, stage)
            return PausedPeer(run, stage, kept, end.transport, end.directory, asked, owner)

        names, emit = self.run.place, self.events.append
        life = PeerLife(stage, owner, build, hold, place=names, device="cpu", emit=emit)
        self.start(end, life.run())
        return first[0]

    def add_trainer(
        self,
        name: str,
        *,
        batches: object | None = None,
        window: int | None = 6,
        steps: int | None = None,
        held_out: Any = None,
        island: int = 0,
    ) -> Trainer:
        end = self.network.join(name)
        trainer = Trainer(
            self.run.island(island), batches or self.batches, end.transport, end.directory,
            TrainerSettings(window=window, steps=steps), self.events.append, held_out=held_out,
        )  # fmt: skip
        self.trainers[name] = trainer
        self.start(end, trainer.run())
        return trainer

    def start(self, end: End, main: Coroutine[Any, Any, None]) -> None:
        """Run `main` as the process that has this end of the network."""
        end.process.start(self.network.loop, main)
        assert end.process.main is not None
        self.tasks[end.peer_id] = end.process.main

    def add_stranger(self, name: str = "stranger") -> Stranger:
        """Somebody who only sends what a test makes up."""
        return Stranger(self.run, self.network.join(name))

    # -- faults -----------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """SIGKILL: it vanishes between two instructions. Its record stays for its usual 20 seconds."""
        self.network.kill(name)

    def kill_and_forget(self, *names: str) -> None:
        """SIGKILL, so long ago that their records are gone."""
        for name in names:
            self.kill(name)
            self.network.expire(name)

    def on_call(
        self,
        method: str,
        act: Callable[[str, str], None],
        *,
        nth: int = 1,
        to: str | None = None,
        by: str | None = None,
    ) -> None:
        """Do `act(caller, callee)` when the n-th such call from now on reaches its callee."""
        left = nth

        def order(caller: str, callee: str, called: str) -> bool:
            nonlocal left
            if called == method and to in (None, callee) and by in (None, caller) and caller != callee:
                left -= 1
                if left == 0:
                    act(caller, callee)
                    return True
            return False

        self.orders.append(order)

    def at_point(self, point: str, act: Callable[[str], None], *, nth: int = 1, when: When = always) -> None:
        """Do `act(name)` when the n-th peer of those that are meant passes a fault point."""
        left = nth

        def order(name: str, passed: str) -> bool:
            nonlocal left
            if passed == point and when(name):
                left -= 1
                if left == 0:
                    act(name)
                    return True
            return False

        self.points.append(order)

    def passed(self, point: str) -> None:
        """A process passes a fault point: if it is killed there, it is between two instructions."""
        process = PROCESS.get()
        if process is not None and process.name in self.peers:
            self.points[:] = [order for order in self.points if not order(process.name, point)]
            if not process.alive:
                raise Killed

    def delivered(self, caller: str, callee: str, method: str) -> None:
        self.orders[:] = [order for order in self.orders if not order(caller, callee, method)]

    # -- waiting ----------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], object], *, limit_s: float = 600.0) -> None:
        """Wait until `condition()` holds."""
        end = asyncio.get_running_loop().time() + limit_s
        while not condition():
            for name, task in self.tasks.items():
                if task.done() and not task.cancelled() and task.exception() is not None:
                    raise AssertionError(f"{name} failed") from task.exception()
            assert asyncio.get_running_loop().time() < end, self.story()
            await asyncio.sleep(0.02)

    async def until_serving(self) -> None:
        """Wait until every live peer has joined, and said so."""

        def serving() -> bool:
            records = self.network.records
            return all(name in records and records[name].state == "serving" for name, _ in self.live())

        await self.until(serving)

    async def until_version(self, version: int, *, limit_s: float = 600.0) -> None:
        """Wait until every live peer's weights are at `version`."""
        await self.until(lambda: all(p.core.version >= version for _, p in self.live()), limit_s=limit_s)

    async def until_finished(self, *, limit_s: float = 600.0) -> None:
        """Wait until every live peer has taken all steps."""
        await self.until(lambda: self.finished, limit_s=limit_s)

    async def until_next_step(self) -> None:
        """Wait until a live peer takes one more step; at the end of the run there is none to wait for."""
        took = len(self.seen(Stepped))
        await self.until(lambda: len(self.seen(Stepped)) > took or self.finished)

    # -- looking ----------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether every live peer has taken all steps."""
        return all(peer.core.version >= self.run.steps for _, peer in self.live())

    def live(self) -> list[tuple[str, StagePeer]]:
        return [
            (n, p) for n, p in self.peers.items() if not self.tasks[n].done() and not self.network.is_dead(n)
        ]

    def of_stage(self, stage: int) -> list[str]:
        """Names of the live peers of `stage`."""
        return [name for name, peer in self.live() if peer.stage == stage]

    def step(self, name: str, t: int = 0) -> OpenStep:
        """The open step `t` of a peer."""
        return self.peers[name].core.steps[t]

    def done(self, name: str, t: int = 0) -> int:
        """The bitmap of what is in a peer's sum of step `t`, if that is open."""
        step = self.peers[name].core.steps.get(t)
        return 0 if step is None else step.ledger.done

    def seen(self, kind: type[E]) -> list[E]:
        """The events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def undone(self) -> int:
        return sum(peer.core.undone for peer in self.peers.values())

    @property
    def replayed(self) -> int:
        return sum(trainer.replayed for trainer in self.trainers.values())

    def count_matrix(self) -> dict[str, torch.Tensor]:
        """Per live peer: how often each microbatch index counted, over all steps taken (audit model)."""
        return {name: -weights_of(peer.core.compute).popitem()[1] * self.run.M for name, peer in self.live()}

    async def counted(self, name: str) -> tuple[int, list[float]]:
        """A peer's version and its row of the count matrix, while the training goes on."""
        compute = self.peers[name].core.compute

        def count() -> tuple[int, list[float]]:
            return compute.version, (-weights_of(compute).popitem()[1] * self.run.M).tolist()

        return await self.peers[name].core.device.run(Rank.STEP, 0, count)  # between two jobs

    def assert_each_counted_once(self) -> None:
        """Every microbatch of every step is in the weights of every live peer, once."""
        counts = self.count_matrix()
        assert {peer.stage for _, peer in self.live()} == set(range(self.run.S))
        wrong = {name: row.tolist() for name, row in counts.items() if not (row == self.run.steps).all()}
        assert not wrong, f"{wrong}\n{self.story()}"
        for _, peer in self.live():
            assert (peer.core.ledger_counts.missing, peer.core.ledger_counts.duplicated) == (0, 0)
        told = {(e.stage, e.t): (e.missing, e.duplicated) for e in self.seen(AddedUp)}
        assert {(e.stage, e.t) for e in self.seen(Stepped)} <= told.keys(), self.story()
        assert set(told.values()) <= {(0, 0)}

    def story(self) -> str:
        """What happened, for a test that failed."""
        lines = [event.words() for event in self.events[-40:]]
        for name, peer in self.live():
            for t, step in peer.core.steps.items():
                ledger = step.ledger
                lines.append(
                    f"{name} v{peer.core.version} step {t}: done {ledger.done:b} "
                    f"doing {ledger.in_progress:b} "
                    f"frozen {ledger.frozen_for} {step.state.value} {step.prepared and step.prepared.round} "
                    f"failed {step.failed_round} chief {peer.coordination.coordinator(peer.stage)}"
                )
        return "\n".join(lines)

    def voids(self) -> list[str]:
        """Why rounds were void."""
        return [event.why for event in self.seen(RoundAborted)]


@dataclass(frozen=True)
class Stranger:
    """Calls peers with whatever a test wants to see refused."""

    run: Run
    end: End

    async def send(
        self, peer: str, method: str, header: msgspec.Struct | bytes, body: list[Buffer] | None = None
    ) -> Answer:
        packed = header if isinstance(header, bytes) else pack(header)
        return await self.end.transport.call(peer, method, packed, body or [], max_answer_bytes=1 << 20)

    async def ask(
        self, peer: str, method: str, header: msgspec.Struct, kind: type[A], body: list[Buffer] | None = None
    ) -> A:
        return unpack((await self.send(peer, method, header, body)).header, kind)

    def tokens(self, t: int, m: int, batches: Any) -> list[Buffer]:
        """The body of a microbatch for stage 0."""
        return [memoryview(np.ascontiguousarray(batches.batch(sample_offsets(self.run, t, m)))).cast("B")]


def obey(peer: StagePeer, directive: Directive) -> None:
    """Have a peer do what a directive says, however old it is."""
    local = peer.coordination._local()  # type: ignore
    for action in follow(peer.core.me, local, directive, {c.t: c for c in directive.commits}, now=now_s()):
        peer.actions.act(action)


@asynccontextmanager
async def swarm(
    run: Run | None = None,
    *,
    stages: int = 3,
    replicas: int | Sequence[int] = 2,
    silence_s: float = 3.5,
    batches: object | None = None,
    seed: int = 1,
    job_s: float = JOB_S,
) -> AsyncIterator[Swarm]:
    """A swarm of `stages` × `replicas` (or so many of each), named `s<stage>p<replica>`, without trainers.

    `seed`: of how long jobs take.
    """
    network = CalmNetwork(silence_s=silence_s, latency_s=LATENCY_S)
    run = run or audit_run(stages=stages, steps=3, microbatches_per_step=8)
    built = Swarm(run, network, batches or Zeros(run), Dice(seed), job_s=job_s)
    network.on_deliver = built.delivered
    fault_points.on_point = built.passed
    try:
        for stage in range(built.run.cells):
            for replica in range(replicas if isinstance(replicas, int) else replicas[stage]):
                built.add_peer(f"s{stage}p{replica}", stage)
        yield built
    finally:
        fault_points.on_point = None
        await network.close()
        assert not network.loop.bugs, network.loop.bugs
