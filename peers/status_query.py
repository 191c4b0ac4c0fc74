"""Asking peers: one or several at once, for their status above all. Records lag, and outlive their peers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from peers.clock import now_s
from peers.ports import Transport
from swarm.errors import PeerFault, Refused, SwarmError
from swarm.ids import Microbatch, PeerId, Position, Stage
from swarm.manifest import Run
from swarm.policy.backoff import BUDGET_ROUNDS
from swarm.policy.router import Router
from swarm.protocol.rollback import check_position
from swarm.protocol.rounds import named_by_most
from swarm.wire.evidence import MAX_SHOWN_BYTES, AskConvicted, Convicted
from swarm.wire.messages import AskStatus, Locate, Located, PeerStatus, pack, unpack_answer

ASK_S = 3.0
MAX_VOICES = 3
LOCATE_S = 1.0
"""How long to ask which peer has a microbatch before it is recomputed."""
MAX_LOCATED = 16
"""Peers asked where a microbatch is. Missing a holder costs an undo, not correctness."""
MAX_REFUSALS = 3
"""So many peers that refuse the same microbatch, or all there are, are not all wrong about it: a trainer ends
by it, since the run diverged, or does not admit it."""

T = TypeVar("T")


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


async def refusing(
    run: str,
    transport: Transport,
    stage: Stage,
    refusals: Mapping[PeerId, Refused],
    counted: Collection[PeerId],
) -> set[PeerId]:
    """The peers of a stage that refuse a microbatch, if they are enough to end a trainer; else none.

    `counted`: those of the stage whose word counts. If they seem enough they are asked where they serve: one
    that has moved refuses what comes to it by its old record. By the charter it refuses at each stage.
    """

    def enough(by: set[PeerId]) -> bool:
        return len(by) >= MAX_REFUSALS or by.issuperset(counted)

    by = set(refusals).intersection(counted)
    if enough(by):
        asked = sorted(peer for peer in by if not refusals[peer].by_charter)
        told = await ask_all(transport, asked, "status", AskStatus(run=run), PeerStatus, deadline_s=ASK_S)
        by -= {peer for peer in asked if peer not in told or told[peer].stage != stage}
    return by if enough(by) else set()


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
    """Whether a position is borne out: at least half of each stage, of those that answer, have reached it."""
    for told in await _told_by(run, transport, stages, goal):
        reached = [said.position >= goal for said in told]
        if not reached or 2 * sum(reached) < len(reached):
            return False
    return True


async def run_position(run: Run, transport: Transport, stages: Iterable[Sequence[PeerId]]) -> Position | None:
    """The furthest position that at least half of each stage have reached, of those that answer; None: of
    which none does.
    """
    each = [[said.position for said in told] for told in await _told_by(run, transport, stages, now_s())]
    return min((sorted(of, reverse=True)[(len(of) - 1) // 2] for of in each if of), default=None)


async def holders(
    run: str, transport: Transport, router: Router, stage: Stage, microbatch: Microbatch, *,
    heard: Callable[[Sequence[PeerId]], Sequence[PeerId]],
) -> list[PeerId]:  # fmt: skip
    """Those peers of a stage that have `microbatch` or compute it, without those that their stage leaves out:
    what they compute is run again. `heard`: those of some peers of the stage whose word on that counts.
    """
    now, (t, m) = now_s(), microbatch
    peers = [peer for peer in router.answering(stage) if not router.backoff.in_backoff(peer, now=now)]
    told = await ask_all(
        transport, peers[:MAX_LOCATED], "locate", Locate(run=run, t=t, m=m), Located, deadline_s=LOCATE_S
    )
    named = named_by_most({peer: told[peer].left_out for peer in heard(list(told))})
    for peer in named:
        router.backoff.charge(peer, t=t, since_s=now, now=now_s(), rounds=BUDGET_ROUNDS)
    return [peer for peer, answer in told.items() if answer.has and peer not in named]
