"""Calls to the next stage: one of its peers answers in the end, whichever of them fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from peers.clock import now_s
from peers.ports import Answer, Buffer, NetworkPath
from peers.stage_calls import StageCalls
from swarm.errors import NotNow, PeerFault, Refused, Stale, SwarmError
from swarm.ids import Microbatch, PeerId
from swarm.policy.router import NoPeerForStage
from swarm.records import PeerRecord
from swarm.wire.messages import Work, WorkDone, with_latency

MAX_PAUSE_S = 1.0
"""However long a peer says that it wants to be left alone."""
Answered = tuple[PeerId, WorkDone, Answer]
"""By whom, and what."""


@dataclass(eq=False)
class NextStage(StageCalls):
    """The peers of a stage, as one callee."""

    _seen: Sequence[PeerRecord] | None = None
    _answered: dict[tuple[int, int], set[PeerId]] = field(default_factory=dict)
    """Which peers answered a microbatch of the last steps."""

    async def call(
        self,
        work: Work,
        body: Sequence[Buffer],
        *,
        max_answer_bytes: int,
        check: Callable[[PeerId, WorkDone, Answer], None],
        closed: Callable[[], SwarmError | None],
        addressed: Callable[[Work, PeerId], Work] = lambda work, to: work,
        in_vain: Collection[PeerId] = (),
        overtaken: PeerId | None = None,
    ) -> Answered:
        """Have `work` done by some peer of the stage.

        Args:
            check: raises BadAnswer for an answer that cannot be used.
            closed: why the work need not be done any more, if so; it is raised.
            addressed: the work as it is sent to a peer.
            in_vain: peers that are asked again only if no other can be.
            overtaken: another one than this, which has it and is late.

        Raises:
            Stale: the step is over, here, or for every peer there that can be asked.
            Refused: several peers refuse it; NotAdmitted: by the charter that one of them knows.
        """
        refusals: dict[PeerId, Refused] = {}
        busy: set[PeerId] = set()
        past: dict[PeerId, Stale] = {}
        vain = set(in_vain)
        holder: PeerId | None = None
        while (reason := closed()) is None:
            self._refresh_peers()
            try:
                if not overtaken and (work.attempt > 0 or work.deepest >= 0):
                    holder = await self._locate(work)
                away = {*refusals, *busy, *past, *vain, *([overtaken] if overtaken else [])}
                peer = holder if holder and holder not in away else self._choose(work, away)
            except NoPeerForStage as none:
                if past:
                    raise next(iter(past.values())) from None
                busy.clear()
                vain.clear()
                refusals.clear()  # the others may be gone by now
                await asyncio.sleep(min(1.0, max(0.05, none.retry_at - now_s())))
                await self.directory.refresh({self.stage})
                continue
            began = now_s()
            try:
                asked = self._work(work, peer, body, max_answer_bytes, check, addressed, begun=peer == holder)
                if overtaken:
                    return await asked
                again = partial(
                    self.call, msgspec.structs.replace(work, attempt=work.attempt + 1), body,
                    max_answer_bytes=max_answer_bytes, check=check, closed=closed, addressed=addressed,
                    in_vain=tuple(vain), overtaken=peer,
                )  # fmt: skip
                return await self.unless_late(peer, work.t, asked, again)
            except PeerFault as fault:
                self.lost(fault, t=work.t, since_s=began)
                work = msgspec.structs.replace(work, attempt=work.attempt + 1)
            except NotNow as later:
                busy.add(peer)
                self.limits.put_off(peer, t=work.t, since_s=began, now=now_s())
                if len(busy) >= len(self.router.peers(self.stage)):
                    await asyncio.sleep(min(MAX_PAUSE_S, later.retry_after_s))
                    busy.clear()
            except Stale as stale:
                past[peer] = stale  # one that took the step by itself; others may lack the microbatch
            except Refused as refused:
                refusals[peer] = refused
                if peer not in self.counted():
                    self.router.failed(peer, now=now_s())
                if by := await self.refusing(refusals):
                    refused = next((refusals[one] for one in sorted(by) if refusals[one].by_charter), refused)
                    refused.text = f"stage {self.stage} refuses {work.t, work.m}: {refused.text}"
                    raise refused from None
        raise reason

    async def _work(
        self, work: Work, peer: PeerId, body: Sequence[Buffer], max_answer_bytes: int,
        check: Callable[[PeerId, WorkDone, Answer], None], addressed: Callable[[Work, PeerId], Work], *,
        begun: bool,
    ) -> Answered:  # fmt: skip
        """Have one peer do `work`, as `call`."""
        began, onward = now_s(), addressed(msgspec.structs.replace(work, route=work.route[1:]), peer)
        done, answer = await self.ask(peer, onward, body, max_answer_bytes=max_answer_bytes, begun=begun)
        check(peer, done, answer)
        took_s = now_s() - began
        self.limits.answered(took_s, now=now_s())
        # A time that cannot be true (NaN, below zero) would draw all work to its peer, for ever.
        told = [hop.work_s for hop in done.hops if hop.peer == peer and 0.0 <= hop.own_s <= took_s]
        self.router.answered(
            self.stage, peer, told[0] if told else took_s, took_s, now=now_s(), share=1 / self.limits.callers
        )
        line = self.transport.lines.get(peer, NetworkPath())
        done = msgspec.structs.replace(done, hops=with_latency(done.hops, took_s, line.rtt_s))
        self._note_answered(work, peer)
        return peer, done, answer

    def _note_answered(self, work: Work, peer: PeerId) -> None:
        self._answered = {name: by for name, by in self._answered.items() if name[0] >= work.t - 1}
        self._answered.setdefault((work.t, work.m), set()).add(peer)

    def _in_vain(self, work: Work) -> set[PeerId]:
        """Peers that answered a microbatch which their stage lacks: lost there, or not counted."""
        return self._answered.get((work.t, work.m), set()) if work.deepest == self.stage else set()

    def is_deserted(self) -> bool:
        """Whether no peer of the stage can be asked now."""
        now = now_s()
        return all(self.router.backoff.in_backoff(p, now=now) for p in self.router.peers(self.stage))

    def _refresh_peers(self) -> None:
        self.limits.callers = max(1, len(self.directory.at(self.stage - 1)))
        records = self.directory.at(self.stage)
        if records is not self._seen:
            self._seen = records
            serving = [r.peer for r in records if r.state == "serving"]
            self.router.set_peers(self.stage, serving)

    def _choose(self, work: Work, exclude: set[PeerId]) -> PeerId:
        """The trainer's suggestion on the first attempt, if it has not failed here since it answered; else
        the next of this peer's fair queue.
        """
        now = now_s()
        in_vain, peers = self._in_vain(work), self.router.peers(self.stage)
        askable = {peer for peer in peers if not self.router.backoff.in_backoff(peer, now=now)}
        if not exclude | in_vain >= askable:  # none waits for a peer that rests
            exclude |= in_vain
        suggested = work.route[0] if work.route and work.attempt == 0 else None
        if suggested in askable - exclude and not self.router.backoff.is_failing(suggested):
            return suggested
        return self.router.route(self.stage, now=now, exclude=exclude, known=work.attempt > 0).peer

    async def _locate(self, work: Work) -> PeerId | None:
        """The peer that has `(t, m)` already or computes it, if any: asking it again costs nothing."""
        found = await self.holders(Microbatch(work.t, work.m))
        return next((peer for peer in found if peer not in self._in_vain(work)), None)
