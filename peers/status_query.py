"""Asking peers for their status: records lag, and outlive their peers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from peers.ports import Directory, Transport
from swarm.errors import BadAnswer, PeerGone, Refused, SwarmError
from swarm.ids import PeerId
from swarm.manifest import Run
from swarm.monitoring import validation
from swarm.protocol.rollback import check_position
from swarm.records import PeerRecord
from swarm.wire.messages import AskStatus, PeerStatus, pack, unpack_answer

ASK_S = 3.0


async def ask_one(
    run: Run,
    transport: Transport,
    record: PeerRecord,
    *,
    deadline_s: float,
    directory: Directory | None = None,
) -> PeerStatus | None:
    """What the peer of a record says of itself, made fit to be shown; None if it is still joining, or left.

    `directory`: asked, when the peer cannot be reached, whether it said that it leaves.

    Raises:
        PeerFault: it does not answer, or what it answers cannot be (BadAnswer).
        NotNow, Refused: its answer.
    """
    question = pack(AskStatus(run=run.id))
    try:
        answer = await transport.call(record.peer, "status", question, deadline_s=deadline_s)
    except Refused:
        if record.state in ("choosing", "joining"):
            return None  # it announces itself before it serves any method
        raise
    except PeerGone:
        if directory is None:
            raise
        # A peer that left says so in the directory, which may not have told us yet.
        await directory.refresh((record.stage,))
        now = directory.find(record.peer)
        if now is None or now.state == "left":
            return None
        raise
    status = unpack_answer(record.peer, answer.header, PeerStatus)
    try:
        return validation.checked(status, record, run)
    except Refused as refused:
        raise BadAnswer(record.peer, f"answered with {refused.text}") from None


async def ask_status(run: Run, transport: Transport, peers: Sequence[PeerId]) -> dict[PeerId, PeerStatus]:
    """The status of those peers, all asked at once. Silent ones are left out."""
    question = pack(AskStatus(run=run.id))

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
