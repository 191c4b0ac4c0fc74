"""Peers that hold a run up: their bodies trickle, or they answer late."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from peers.clock import now_s
from peers.ports import Answer, Buffer, Request
from peers.sim.dice import Dice
from peers.sim.lines import Lines, Sent
from peers.stage.server import StagePeer
from swarm.ids import PeerId
from swarm.wire.messages import Part, Work, WorkDone, pack, unpack
from tests.peers.loops import Swarm


async def never_answered(request: Request) -> Answer:
    """A handler that takes a call, and that is all."""
    await request.accept()
    return await asyncio.get_running_loop().create_future()


def answer_some(
    s: Swarm, name: PeerId, times: int, *, again: bool = False, always: Callable[[], bool] = lambda: False
) -> None:
    """One answers each caller's work so many times, and then no more; `again`: not the next one, and so on.
    `always`: whether it still answers all.
    """
    handlers, left = s.network.peers[name].transport.handlers, dict[PeerId, int]()
    honest, most = handlers["work"]

    async def work(request: Request) -> Answer:
        if always():
            return await honest(request)
        left[request.peer] = left.get(request.peer, times) - 1
        if left[request.peer] >= 0:
            return await honest(request)
        if again:
            left[request.peer] = times
        return await never_answered(request)

    handlers["work"] = (work, most)


def answer_one_late(s: Swarm, name: PeerId, by_s: float, *, first: bool = False) -> None:
    """One answers one call of each step so much later: that of the caller that lost least so far. `first`: it
    waits, and then computes.
    """
    handlers, lost, steps = s.network.peers[name].transport.handlers, Counter[PeerId](), set[int]()
    honest, most = handlers["work"]

    async def work(request: Request) -> Answer:
        t = unpack(request.header, Work, s.run.id).t
        lost[request.peer] += 0
        late = t not in steps and lost[request.peer] == min(lost.values())
        if late:
            steps.add(t)
            lost[request.peer] += 1
            await request.accept()
        await asyncio.sleep(by_s if late and first else 0.0)
        answer = await honest(request)
        await asyncio.sleep(by_s if late and not first else 0.0)
        return answer

    handlers["work"] = (work, most)


class Trickle(NamedTuple):
    """A request whose body comes a byte a second."""

    peer: PeerId
    header: bytes
    body_sizes: Sequence[int]

    async def accept(self) -> Sequence[Buffer]:
        await asyncio.sleep(1e6)
        raise AssertionError("nobody waits for so long")


def send_no_part(peer: StagePeer) -> None:
    """A member of rounds that gives owners nothing, for ever."""

    async def never(*_: object) -> Answer:
        return await asyncio.get_running_loop().create_future()

    peer.actions._all_reduce._call_until_ready = never  # type: ignore[method-assign]


def begin_rounds_late(peer: StagePeer, by_s: float) -> None:
    """It gives its contribution to each round so late."""
    begins_s, call = dict[str, float](), peer.all_reduce._call_until_ready

    async def late(owner: PeerId, part: Part, *more: Any) -> Answer:
        at_s = begins_s.setdefault(part.round, now_s() + by_s)
        await asyncio.sleep(max(0.0, at_s - now_s()))
        return await call(owner, part, *more)

    peer.all_reduce._call_until_ready = late  # type: ignore[method-assign]


def answer_parts_late(s: Swarm, owner: PeerId, by_s: float, *, to: Collection[PeerId] = ()) -> None:
    """It answers what it owns of each round so late; `to`: those, or all."""
    handlers = s.network.peers[owner].transport.handlers
    answer, most = handlers["part"]

    async def late(request: Request) -> Answer:
        answered = await answer(request)
        await asyncio.sleep(by_s if request.peer in to or not to else 0.0)
        return answered

    handlers["part"] = late, most


def coordinate_late(s: Swarm, name: PeerId, by_s: float) -> None:
    """It answers all that it is told as a coordinator so late, and so late it tells what it finds."""
    handlers, messages = s.network.peers[name].transport.handlers, s.peers[name].coordination._messages
    send = messages._send

    async def tell_late(key: tuple[PeerId, str], message: Any) -> None:
        if key[1] in ("directive", "run"):
            await asyncio.sleep(by_s)
        await send(key, message)

    for method in ("report", "summary"):

        async def answer_late(request: Request, answer: Any = handlers[method][0]) -> Answer:
            answered = await answer(request)
            await asyncio.sleep(by_s)
            return answered

        handlers[method] = answer_late, handlers[method][1]
    messages._send = tell_late


def check_late(peer: StagePeer, by_s: float) -> None:
    """It keeps its nonce of each round for so long, and with that its products."""
    audits = peer.all_reduce._audits
    assert audits is not None
    verify = audits.verify

    async def late(*what: Any) -> None:
        await asyncio.sleep(by_s)
        await verify(*what)

    audits.verify = late  # type: ignore[method-assign]


class TrickleLines(Lines):
    """Bodies of some peers come at a byte a second."""

    def __init__(self, of: Lines, slow: Collection[PeerId]) -> None:
        super().__init__(of.least_s, of.most_s, of.bytes_per_s)
        self._slow = slow

    def lasts_s(self, sent: Sent, dice: Dice) -> float:
        body_bytes = sent.size_bytes if sent.source in self._slow and sent.since_s is not None else 0
        return super().lasts_s(sent, dice) + body_bytes


class SharedTrickle(Lines):
    """All bodies of some peers take turns on a line of 250 bytes a second, as if they were `TIMES` as large:
    those of the audit model are then as large as a small decoder's. What they report goes at once.
    """

    TIMES, BYTES_PER_S = 4096, 250.0

    def __init__(self, of: Lines, slow: Collection[PeerId]) -> None:
        super().__init__(of.least_s, of.most_s, of.bytes_per_s)
        self._free_s = dict.fromkeys(slow, 0.0)
        self.at_once = set[tuple[PeerId, PeerId, float | None]]()

    def lasts_s(self, sent: Sent, dice: Dice) -> float:
        lasts_s = super().lasts_s(sent, dice)
        if sent.since_s is None or (sent.source, sent.destination, sent.since_s) in self.at_once:
            return lasts_s
        return lasts_s + self.waits_s(sent.source, sent.size_bytes, sent.now_s)

    def waits_s(self, source: PeerId, size_bytes: int, now_s: float) -> float:
        """How long a body that is sent now is on its way."""
        if source not in self._free_s:
            return 0.0
        free_s = max(self._free_s[source], now_s) + size_bytes * self.TIMES / self.BYTES_PER_S
        self._free_s[source] = free_s
        return free_s - now_s


def trickle_in_all(s: Swarm, slow: Collection[PeerId]) -> None:
    """What they send comes at 250 bytes a second, all bodies together."""
    network = s.network
    lines = network.lines = network.calm = SharedTrickle(network.calm, slow)
    answer = network._answer

    def later(call: Any, outcome: Any) -> None:
        size = sum(memoryview(b).nbytes for b in outcome.body) if isinstance(outcome, Answer) else 0
        if call.callee.peer_id in slow and size:
            waits_s = lines.waits_s(call.callee.peer_id, size, network.loop.now_s)
            network.loop.call_later(waits_s, answer, call, outcome)
        else:
            answer(call, outcome)

    network._answer = later  # type: ignore[method-assign]
    for name in slow:
        transport = network.peers[name].transport
        call = transport.call

        async def noted(
            peer: PeerId, method: str, *what: Any, name: str = name, call: Any = call, **more: Any
        ):
            if method not in ("work", "part", "held"):
                lines.at_once.add((name, peer, network.loop.now_s))
            return await call(peer, method, *what, **more)

        transport.call = noted  # type: ignore[method-assign]


def trickle(s: Swarm, slow: Collection[PeerId]) -> None:
    """Each body that they send comes at a byte a second: of calls, and of answers."""
    network = s.network
    network.lines = network.calm = TrickleLines(network.calm, slow)
    answer = network._answer

    def later(call: Any, outcome: Any) -> None:
        size = sum(memoryview(b).nbytes for b in outcome.body) if isinstance(outcome, Answer) else 0
        if call.callee.peer_id in slow and size:
            network.loop.call_later(float(size), answer, call, outcome)
        else:
            answer(call, outcome)

    network._answer = later  # type: ignore[method-assign]


def answer_late(
    s: Swarm, slow: Mapping[PeerId, StagePeer], by_s: float, *, blamed: int | None = None
) -> None:
    """They answer work truly, each time so much later.

    `blamed`: whom they say that it waited for: 0 for themselves, 1 for the next stage, if there is one. None:
    nobody, so that it looks like a slow line.
    """
    for name, peer in slow.items():

        async def slowly(request: Request, peer: StagePeer = peer) -> Answer:
            answer = await peer.microbatches._serve_work(request)  # type: ignore
            await asyncio.sleep(by_s)
            if blamed is None:
                return answer
            done = unpack(answer.header, WorkDone)
            hops = list(done.hops)
            at = min(blamed, len(hops) - 1)
            hops[at] = replace(hops[at], own_s=hops[at].own_s + by_s)
            return Answer(pack(replace(done, hops=tuple(hops))), answer.body)

        s.network.peers[name].transport.serve("work", slowly, max_body_bytes=1 << 24)
