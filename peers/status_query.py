"""Asking peers: one or several at once, for their status above all. Records lag, and outlive their peers."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

import msgspec

from peers.clock import now_s
from peers.ports import Transport
from swarm.errors import PeerFault, SwarmError
from swarm.ids import PeerId, Position
from swarm.manifest import Run
from swarm.protocol.rollback import check_position
from swarm.wire.evidence import MAX_SHOWN_BYTES, AskConvicted, Convicted
from swarm.wire.messages import AskStatus, LinkStatus, PeerStatus, pack, unpack_answer

ASK_S = 3.0
MAX_VOICES = 3
MAX_LINKS_TOLD = 64
"""In one status: 6 kB."""
LOOKED_S = 0.5

T = TypeVar("T")


class TrafficStatus:
    """The traffic with other peers, as a status tells it. Looked at now and then, however many ask: of 2,048
    lines that takes 10 ms."""

    links: tuple[LinkStatus, ...] = ()
    """The busiest."""
    bytes_in = bytes_out = 0

    def __init__(self, transport: Transport) -> None:
        self._transport, self._looked_at = transport, -math.inf

    def now(self) -> TrafficStatus:
        if now_s() - self._looked_at >= LOOKED_S:
            self._looked_at = now_s()
            links = [
                LinkStatus(
                    peer=peer, bytes_in=line.received_bytes, bytes_out=line.sent_bytes,
                    rtt_s=line.rtt_s, bandwidth_bps=line.bandwidth_bps, memory_bytes=line.memory_bytes,
                )
                for peer, line in self._transport.lines.items()
            ]  # fmt: skip
            links.sort(key=lambda link: (-link.bytes_in - link.bytes_out, link.peer))
            self.links = tuple(links[:MAX_LINKS_TOLD])
            self.bytes_in = sum(link.bytes_in for link in links)
            self.bytes_out = sum(link.bytes_out for link in links)
        return self


async def ask_all(
    transport: Transport, peers: Collection[PeerId], method: str, question: msgspec.Struct, kind: type[T], *,
    deadline_s: float, max_answer_bytes: int = 0,
    check: Callable[[PeerId, T], object] = lambda peer, said: None,
    on_fault: Callable[[PeerFault], None] = lambda fault: None,
) -> dict[PeerId, T]:  # fmt: skip
    """What those peers answer, in a header or a body, all asked at once but this one itself.

    Left out are those that give no answer, or one of which `check` raises a SwarmError; `on_fault` hears of
    the errors that are their faults.
    """
    header, peers = pack(question), [peer for peer in peers if peer != transport.peer_id]

    async def ask(peer: PeerId) -> T | None:
        try:
            answer = await transport.call(
                peer, method, header, max_answer_bytes=max_answer_bytes, deadline_s=deadline_s
            )
            said = unpack_answer(peer, answer.header, kind, answer.body)
            check(peer, said)
            return said
        except SwarmError as error:  # it may be leaving, say: a healthy peer without anything for us
            if isinstance(error, PeerFault):
                on_fault(error)
            return None

    answers = await asyncio.gather(*map(ask, peers))
    return {peer: said for peer, said in zip(peers, answers, strict=True) if said is not None}


async def ask_status(run: Run, transport: Transport, peers: Sequence[PeerId]) -> dict[PeerId, PeerStatus]:
    """The status of those peers, all asked at once. Silent ones are left out, and this one is not asked."""
    return await ask_all(
        transport, peers, "status", AskStatus(run=run.id), PeerStatus, deadline_s=ASK_S,
        check=lambda _, said: check_position(said.generation, said.version, run, what="a status"),
    )  # fmt: skip


async def ask_convicted(
    run: Run, transport: Transport, peers: Collection[PeerId], accused: PeerId, *, show: bool = False
) -> dict[PeerId, Convicted]:
    """Whether those peers have convicted one, and which others; `show`: and by which evidence."""
    question, most = AskConvicted(run=run.id, peer=accused, show=show), MAX_SHOWN_BYTES if show else 0
    return await ask_all(
        transport, peers, "convicted", question, Convicted, deadline_s=ASK_S, max_answer_bytes=most
    )


async def _told_by(
    run: Run, transport: Transport, stages: Iterable[Sequence[PeerId]], draw: object
) -> list[list[PeerStatus]]:
    """What up to `MAX_VOICES` replicas of each stage say, others for another `draw`."""
    dice = random.Random(f"{transport.peer_id} {draw}")
    asked = [dice.sample(peers, min(MAX_VOICES, len(peers))) for peers in stages]
    told = await ask_status(run, transport, [peer for peers in asked for peer in peers])
    return [[told[peer] for peer in peers if peer in told] for peers in asked]


async def all_have(
    run: Run, transport: Transport, stages: Iterable[Sequence[PeerId]], goal: Position
) -> bool:
    """Whether at least half of each stage, of those that answer, have come so far, in that generation."""
    for told in await _told_by(run, transport, stages, goal):
        reached = [goal <= said.position and said.generation == goal.generation for said in told]
        if not reached or 2 * sum(reached) < len(reached):
            return False
    return True


async def run_position(run: Run, transport: Transport, stages: Iterable[Sequence[PeerId]]) -> Position | None:
    """The furthest position that at least half of each stage's answers have reached; None: none came."""
    each = [[said.position for said in told] for told in await _told_by(run, transport, stages, now_s())]
    return min((sorted(of, reverse=True)[(len(of) - 1) // 2] for of in each if of), default=None)
