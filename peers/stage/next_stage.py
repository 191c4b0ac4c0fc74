"""Calls to the next stage: one of its peers answers in the end, whichever of them fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import msgspec

from peers.clock import now_s
from peers.ports import Answer, Buffer, NetworkPath
from peers.stage_calls import MAX_PAUSE_S, StageCalls
from swarm.errors import NotNow, PeerFault, Refused, Stale, SwarmError
from swarm.ids import Microbatch, PeerId
from swarm.policy.router import NoPeerForStage
from swarm.records import PeerRecord
from swarm.wire.messages import Work, WorkDone, with_latency

Answered = tuple[PeerId, WorkDone, Answer]
"""The peer that answered, and what."""
Said: TypeAlias = dict[PeerId, SwarmError | None]
"""Those that are asked for a microbatch again only if no other can be, and why: what each said; None: that
its answer did not count, or is late."""


@dataclass(frozen=True, kw_only=True)
class WorkCall:
    """What goes with a microbatch to whichever peer of the stage does it, and which answers are taken."""

    body: Sequence[Buffer]
    max_answer_bytes: int
    check: Callable[[PeerId, WorkDone, Answer], None]
    """Raises BadAnswer for an answer that cannot be used."""
    closed: Callable[[], SwarmError | None]
    """Why the work need not be done any more, if so; it is raised."""
    addressed: Callable[[Work, PeerId], Work] = lambda work, to: work
    """The work as it is sent to a peer."""


@dataclass(eq=False)
class NextStage(StageCalls):
    """The peers of a stage, as one callee."""

    _seen: Sequence[PeerRecord] | None = None

    async def call(
        self, work: Work, how: WorkCall, *, in_vain: Collection[PeerId] = (), overtaken: PeerId = ""
    ) -> Answered:
        """Have `work` done by some peer of the stage.

        Args:
            in_vain: peers that are asked again only if no other can be.
            overtaken: another one than this, which has it and is late; empty: none is.

        Raises:
            Stale: the step is over, here, or for every peer there that can be asked.
            Refused: several peers refuse it; NotAdmitted: by the charter that one of them knows.
        """
        said: Said = dict.fromkeys((overtaken, *in_vain))
        while (reason := how.closed()) is None:
            self._refresh_peers()
            try:
                peer, begun = await self._next_peer(work, said, overtaken)
            except NoPeerForStage as none:
                if over := [why for why in said.values() if isinstance(why, Stale)]:
                    raise over[0] from None
                said = dict.fromkeys((overtaken,))  # those that refuse may be gone by now
                await asyncio.sleep(min(1.0, max(0.05, none.retry_at - now_s())))
                await self.directory.refresh({self.stage})
                continue
            asked = self._work(work, peer, how, begun=begun)
            again = msgspec.structs.replace(work, attempt=work.attempt + 1)
            try:
                if overtaken:
                    return await asked
                vain = [one for one, why in said.items() if why is None]
                other = partial(self.call, again, how, in_vain=vain, overtaken=peer)
                return await self.unless_late(peer, work.t, asked, other)
            except PeerFault:
                work = again
            except (NotNow, Stale, Refused) as no:  # one alone may have taken the step: others lack it
                said[peer] = no.with_traceback(None)  # that would keep all that is sent
                busy = [one for one, why in said.items() if isinstance(why, NotNow)]
                if isinstance(no, NotNow) and len(busy) >= len(self.router.peers(self.stage)):
                    await asyncio.sleep(min(MAX_PAUSE_S, no.retry_after_s))
                    said = {one: why for one, why in said.items() if one not in busy}
                elif isinstance(no, Refused):
                    await self._check_refusals(work, peer, said)
        raise reason

    async def _next_peer(self, work: Work, said: Said, overtaken: PeerId) -> tuple[PeerId, bool]:
        """The peer to ask, and whether it has or computes the microbatch already. Raises NoPeerForStage."""
        if not overtaken and (work.attempt > 0 or work.deepest >= 0):
            found = await self.holders(Microbatch(work.t, work.m), lacking=work.deepest == self.stage)
            holder = next((peer for peer in found if peer not in self._in_vain(work)), None)
            if holder and holder not in said:
                return holder, True
        return self._choose(work, set(said)), False

    async def _check_refusals(self, work: Work, peer: PeerId, said: Said) -> None:
        """Return, now that `peer` refuses a microbatch too, if too few do. Raises Refused: the stage does."""
        if peer not in self.counted():
            self.router.failed(peer, now=now_s())
        refusals = {one: why for one, why in said.items() if isinstance(why, Refused)}
        if found := [refusals[one] for one in sorted(await self.refusing(refusals))]:
            why = min(found, key=lambda why: not why.by_charter)
            why.text = f"stage {self.stage} refuses {work.t, work.m}: {why.text}"
            raise why from None

    async def _work(self, work: Work, peer: PeerId, how: WorkCall, *, begun: bool) -> Answered:
        """Have one peer do `work`, which it may have `begun`."""
        onward = how.addressed(msgspec.structs.replace(work, route=work.route[1:]), peer)
        done, answer, took_s = await self.ask(
            peer, onward, how.body, how.check, max_answer_bytes=how.max_answer_bytes, begun=begun
        )
        # A time that cannot be true (NaN, below zero, ages) would draw all work to one peer, for ever.
        told = [hop.work_s for hop in done.hops if hop.peer == peer and 0.0 <= hop.own_s <= took_s]
        work_s = min([*told[:1], took_s])
        self.router.answered(self.stage, peer, work_s, took_s, now=now_s(), share=1 / self.limits.callers)
        line = self.transport.lines.get(peer, NetworkPath())
        done = msgspec.structs.replace(done, hops=with_latency(done.hops, took_s, line.rtt_s))
        return peer, done, answer

    def _in_vain(self, work: Work) -> set[PeerId]:
        """Peers that answered a microbatch which their stage lacks: lost there, or not counted."""
        return self.answered_by(Microbatch(work.t, work.m)) if work.deepest == self.stage else set()

    def is_deserted(self) -> bool:
        """Whether no peer of the stage can be asked now."""
        now = now_s()
        return all(self.router.backoff.in_backoff(p, now=now) for p in self.router.peers(self.stage))

    def _refresh_peers(self) -> None:
        self.limits.callers = max(1, len(self.directory.at(self.stage - 1)))
        records = self.directory.at(self.stage)
        if records is not self._seen:
            self._seen = records
            self.router.set_peers(self.stage, [r.peer for r in records if r.state == "serving"])

    def _choose(self, work: Work, exclude: set[PeerId]) -> PeerId:
        """At first the trainer's suggestion, unless it failed since it answered; else of the fair queue."""
        now, peers, backoff = now_s(), self.router.peers(self.stage), self.router.backoff
        exclude |= self.rather_not(self._in_vain(work), but=exclude)
        suggested = work.route[0] if work.route and work.attempt == 0 else None
        resting = {peer for peer in peers if backoff.in_backoff(peer, now=now) or backoff.is_failing(peer)}
        if suggested in set(peers) - resting - exclude:
            return suggested
        return self.router.route(self.stage, now=now, exclude=exclude, known=work.attempt > 0).peer
