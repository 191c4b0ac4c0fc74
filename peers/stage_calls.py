"""Calls that have the peers of a stage work: by a trainer, or by peers of the stage before."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar

from peers.clock import now_s
from peers.ports import Answer, Buffer, Directory, Transport
from peers.status_query import ASK_S, ask_all
from peers.waiting import let_go
from swarm.errors import NotNow, PeerFault, PeerSilent, Refused
from swarm.ids import Microbatch, PeerId, Stage
from swarm.policy.backoff import BUDGET_ROUNDS, FIRST_REST_S
from swarm.policy.router import Router
from swarm.policy.timeouts import CallLimits
from swarm.protocol.ledger import forget_before
from swarm.protocol.rounds import named_by_most
from swarm.wire.messages import AskStatus, Locate, Located, PeerStatus, Work, WorkDone, pack, unpack_answer

T = TypeVar("T")
IN_VAIN = "~"
"""In front of the name of a peer: its account in `Backoff` for steps in which answers of it did not count. It
rests for a minute at most: of two the other one alone says that they did not."""
MOMENT_S = 0.001
"""What is left after rounding may be too short for a clock to move."""
MAX_PAUSE_S = 1.0
"""However long a peer says that it wants to be left alone."""
LOCATE_S = 1.0
"""How long to ask which peer has a microbatch before it is recomputed."""
MAX_LOCATED = 16
"""Peers asked where a microbatch is. Missing a holder costs an undo, not correctness."""
MAX_REFUSALS = 3
"""So many peers that refuse the same microbatch, or all there are, are not all wrong about it: a trainer ends
by it, since the run diverged, or does not admit it."""


@dataclass(eq=False)
class StageCalls:
    """The calls of one peer to those of a stage.

    One that takes much longer than usual is made once more, to another peer: the first answer is taken. Both
    may have counted a microbatch then, as when a call has ended that was answered too late: the stage undoes
    one of them. If another one is quick, neither what is behind the late one is slow, nor this peer's line:
    so that one alone is charged.
    """

    run: str
    stage: Stage
    transport: Transport
    directory: Directory
    router: Router
    stages: int
    """Of the run."""
    on_fault: Callable[[PeerFault], None]
    trusted: Callable[[PeerId, Coroutine[Any, Any, Answer]], Awaitable[Answer]] = lambda _, call: call
    """Makes a call, and ends it when its peer is left out."""
    heard: Callable[[Sequence[PeerId]], Sequence[PeerId]] = lambda peers: peers
    """Those of some peers of the stage whose word counts."""
    opened_s: Callable[[int], float] = lambda t: 0.0
    """Since when there is something to answer in a step; infinity: not yet."""
    limits: CallLimits = field(init=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One peer at a time is overtaken: if all become slow, that makes them little slower."""
    _answered: dict[int, dict[int, set[PeerId]]] = field(default_factory=dict)
    """Which peers answered, of the last steps, by step and microbatch."""
    _vain_at: dict[PeerId, int] = field(default_factory=dict)
    """The last step of which each answered what its stage lacked then."""

    def __post_init__(self) -> None:
        self.limits = CallLimits(self.router, self.stage, self.stages)

    def counted(self) -> Sequence[PeerId]:
        """The peers whose word counts."""
        return self.heard([r.peer for r in self.directory.at(self.stage) if r.state == "serving"])

    async def ask(
        self, peer: PeerId, work: Work, body: Sequence[Buffer],
        check: Callable[[PeerId, WorkDone, Answer], None], *, max_answer_bytes: int = 0, begun: bool = False,
    ) -> tuple[WorkDone, Answer, float]:  # fmt: skip
        """What a peer answers to `work`, for which it has as long as is usual, and how long it took.

        What comes of it for that peer is noted here, also if it is asked since another one is late; which
        peer to ask next is for the caller to say. `check`: raises BadAnswer. `begun`: see `CallLimits`.
        """
        began, passes = now_s(), map(self.directory.at, range(self.stage, self.stages))
        try:
            with self.limits.call(peer, passes, t=work.t, begun=begun) as limit_s:
                calling = self.transport.call(
                    peer, "work", pack(work), body, max_answer_bytes=max_answer_bytes, deadline_s=limit_s
                )
                answer = await self.trusted(peer, calling)
            done = unpack_answer(peer, answer.header, WorkDone)
            check(peer, done, answer)
        except PeerFault as fault:
            self.limits.lost(fault.peer, t=work.t, since_s=began, now=now_s())
            self.fault(fault)
            raise
        except NotNow:  # until its step is open it is to wait
            since_s = max(began, self.opened_s(work.t))
            self.limits.put_off(peer, t=work.t, since_s=since_s, now=now_s())
            raise
        self.limits.answered(took_s := now_s() - began, now=now_s())
        self.note_answered(Microbatch(work.t, work.m), peer)
        return done, answer, took_s

    def fault(self, fault: PeerFault) -> None:
        """Note that a peer of the stage broke the protocol: it gets a backoff."""
        self.router.failed(fault.peer, now=now_s(), silent=fault.silent)
        self.on_fault(fault)

    async def holders(self, microbatch: Microbatch, *, lacking: bool = False) -> list[PeerId]:
        """Those that have `microbatch` or compute it, without those that their stage leaves out: what they
        compute is run again. `lacking`: it is said that the stage lacks it, perhaps by a liar: that counts
        against those that answered it if most others there leave them out.
        """
        now, (t, m), backoff = now_s(), microbatch, self.router.backoff
        peers = [peer for peer in self.router.answering(self.stage) if not backoff.in_backoff(peer, now=now)]
        where = Locate(run=self.run, t=t, m=m)
        told = await ask_all(
            self.transport, peers[:MAX_LOCATED], "locate", where, Located, deadline_s=LOCATE_S
        )
        said = {peer: told[peer].left_out for peer in self.heard(list(told))}
        if lacking:
            self.note_lacking(microbatch, named_by_most(said, least=1))
        named = named_by_most(said)
        for peer in named:
            backoff.charge(peer, t=t, since_s=now, now=now_s(), rounds=BUDGET_ROUNDS)
        return [peer for peer, answer in told.items() if answer.has and peer not in named]

    def note_answered(self, microbatch: Microbatch, peer: PeerId) -> None:
        """Remember that a peer answered a microbatch."""
        forget_before(microbatch.t - 1, self._answered)
        self._answered.setdefault(microbatch.t, {}).setdefault(microbatch.m, set()).add(peer)

    def answered_by(self, microbatch: Microbatch) -> set[PeerId]:
        return self._answered.get(microbatch.t, {}).get(microbatch.m, set())

    def note_lacking(self, microbatch: Microbatch, left_out: Set[PeerId]) -> None:
        """Note that the stage lacks a microbatch: answers of those that it leaves out did not count."""
        now, t, backoff = now_s(), microbatch.t, self.router.backoff
        for peer in left_out & self.answered_by(microbatch):
            if self._vain_at.get(peer) != t:  # with one sum all that is in it may be lost
                self._vain_at[peer] = t
                backoff.charge(IN_VAIN + peer, t=t, since_s=now, now=now, rounds=1, longest_s=FIRST_REST_S)

    def rather_not(self, lacking: Collection[PeerId] = (), *, but: Collection[PeerId] = ()) -> set[PeerId]:
        """The peers, `but` some, that are asked only if no other can be: those of which answers did not count
        in two steps lately, if another is known; and first those that answered what their stage is `lacking`.
        """
        backoff, now, peers = self.router.backoff, now_s(), set(self.router.peers(self.stage)).difference(but)
        peers = {peer for peer in peers if not backoff.in_backoff(peer, now=now)}
        vain = {peer for peer in peers if backoff.rests(IN_VAIN + peer, now=now)}
        if not any(self.router.knows(self.stage, peer) for peer in peers - vain):
            vain.clear()
        lacks = peers.intersection(lacking)
        return next((some for some in (vain | lacks, lacks) if some < peers), set())  # none of them rests

    async def refusing(self, refusals: Mapping[PeerId, Refused]) -> set[PeerId]:
        """The peers that refuse a microbatch, if they are enough to end a trainer; else none.

        If they seem enough they are asked where they serve: one that has moved refuses what comes to it by
        its old record. By the charter it refuses at each stage.
        """
        refusals, by = {**refusals}, set(refusals)  # hearing of others may clear what was noted

        def enough() -> bool:
            by.intersection_update(counted := self.counted())
            return len(by) >= min(MAX_REFUSALS, len(counted))

        if enough():
            await self.directory.refresh({self.stage})  # others may have come
            asked, question = sorted(p for p in by if not refusals[p].by_charter), AskStatus(run=self.run)
            told = await ask_all(self.transport, asked, "status", question, PeerStatus, deadline_s=ASK_S)
            by -= {peer for peer in asked if peer not in told or told[peer].stage != self.stage}
        return by if enough() else set()

    async def unless_late(
        self, peer: PeerId, t: int, asked: Coroutine[Any, Any, T],
        again: Callable[[], Coroutine[Any, Any, T]],
    ) -> T:  # fmt: skip
        """What `peer` was `asked` in step `t`, or the same of another one, `again`, if that is sooner."""
        if (limit_s := self.limits.late_after_s(peer, t=t)) == math.inf:
            return await asked
        began, first, second = now_s(), asyncio.ensure_future(asked), None

        def late_s() -> float:
            return now_s() - max(began, self.opened_s(t))

        async def overtake() -> T:
            since_s = now_s()
            found = await again()
            if not first.done() and self.limits.is_soon((now := now_s()) - since_s):
                # The second time in some steps it is taken for one that does not answer.
                silent = self.limits.overtaken(peer, t=t, since_s=now - late_s(), now=now)
                self.router.failed(peer, now=now, silent=silent)
                why = f"had not answered after {late_s():.1f} s, and another one had"
                self.on_fault(PeerSilent(peer, why))
            return found

        async def another() -> T:
            async with self._turn:
                if not self.router.backoff.is_failing(peer):
                    return await overtake()
            return await overtake()

        try:
            while not first.done() and (late := late_s()) < limit_s:
                await asyncio.wait({first}, timeout=max(MOMENT_S, limit_s - max(0.0, late)))
            if not first.done():
                second = asyncio.ensure_future(another())
                await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            if second is None or first.done() or second.exception():
                return await first
            return second.result()
        finally:
            let_go(*(task for task in (first, second) if task))
