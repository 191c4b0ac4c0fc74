"""Asking peers for their status: records lag, and outlive their peers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence

from peers.ports import Transport
from swarm.errors import SwarmError
from swarm.ids import PeerId
from swarm.manifest import Run
from swarm.protocol.rollback import check_position
from swarm.wire.messages import AskStatus, PeerStatus, pack, unpack_answer

ASK_S = 3.0
MAX_VOICES = 3


async def ask_status(run: Run, transport: Transport, peers: Sequence[PeerId]) -> dict[PeerId, PeerStatus]:
    """The status of those peers, all asked at once. Silent ones are left out, and this one is not asked."""
    question, peers = pack(AskStatus(run=run.id)), [peer for peer in peers if peer != transport.peer_id]

    async def ask(peer: PeerId) -> PeerStatus | None:
        try:
            answer = await transport.call(peer, "status", question, deadline_s=ASK_S)
            status = unpack_answer(peer, answer.header, PeerStatus)
            check_position(status.generation, status.version, run, what="a status")
        except SwarmError:
            return None
        return status

    answers = await asyncio.gather(*map(ask, peers))
    return {peer: status for peer, status in zip(peers, answers, strict=True) if status is not None}


async def all_have(run: Run, transport: Transport, stages: Iterable[Sequence[PeerId]], version: int) -> bool:
    """Whether a version is borne out: in no stage do most say that they have not reached it.

    `stages`: the replicas of each; up to `MAX_VOICES` of them are asked. A silent stage says nothing against
    it.
    """
    dice = random.Random(f"{transport.peer_id} {version}")
    asked = [dice.sample(peers, min(MAX_VOICES, len(peers))) for peers in stages]
    told = await ask_status(run, transport, [peer for peers in asked for peer in peers])
    for peers in asked:
        reached = [told[peer].version >= version for peer in peers if peer in told]
        if 2 * sum(reached) < len(reached):
            return False
    return True
