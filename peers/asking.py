"""Asking peers how they are: records lag, and outlive who they speak of."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from peers.ports import Transport
from swarm.errors import BadAnswer, Refused, SwarmError
from swarm.ids import PeerId
from swarm.policy import claims
from swarm.policy.eras import check_standing
from swarm.records import PeerRecord
from swarm.run import Run
from swarm.wire.messages import AskStatus, PeerStatus, pack, unpack_answer

ASK_S = 3.0


async def ask_one(run: Run, transport: Transport, record: PeerRecord, *, deadline_s: float) -> PeerStatus:
    """What the peer of a record says of itself, made fit to be shown.

    Raises:
        PeerFault: it does not answer, or what it answers cannot be (BadAnswer).
        NotNow, Refused: its answer.
    """
    question = pack(AskStatus(run=run.id))
    answer = await transport.call(record.peer, "status", question, deadline_s=deadline_s)
    status = unpack_answer(record.peer, answer.header, PeerStatus)
    try:
        return claims.checked(status, record, run)
    except Refused as refused:
        raise BadAnswer(record.peer, f"answered with {refused.text}") from None


async def ask_status(run: Run, transport: Transport, peers: Sequence[PeerId]) -> dict[PeerId, PeerStatus]:
    """What those peers say of themselves, all asked at once. Who does not answer is left out."""
    question = pack(AskStatus(run=run.id))

    async def ask(peer: PeerId) -> PeerStatus | None:
        try:
            answer = await transport.call(peer, "status", question, deadline_s=ASK_S)
            status = unpack_answer(peer, answer.header, PeerStatus)
            check_standing(status.era, status.version, run, what="a status")
        except SwarmError:
            return None
        return status

    answers = await asyncio.gather(*map(ask, peers))
    return {peer: status for peer, status in zip(peers, answers, strict=True) if status is not None}
