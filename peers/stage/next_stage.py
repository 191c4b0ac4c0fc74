"""Calls to the next stage: one of its peers answers in the end, whichever of them fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec

from peers.clock import now_s
from peers.overtaking import Overtaking
from peers.ports import Answer, Buffer, Directory, NetworkPath, Transport
from peers.status_query import holders, refusing
from swarm.errors import NotNow, PeerFault, Refused, Stale, SwarmError
from swarm.ids import Microbatch, PeerId, Stage
from swarm.policy.router import NoPeerForStage, Router
from swarm.policy.timeouts import CallLimits
from swarm.records import PeerRecord
from swarm.wire.messages import Work, WorkDone, pack, unpack_answer, with_latency

MAX_PAUSE_S = 1.0
"""However long a peer says that it wants to be left alone."""
Answered = tuple[PeerId, WorkDone, Answer]
"""By whom, and what."""


class NextStage:
    """The peers of stage `stage`, as one callee."""

    def __init__(
        self, run: str, stage: Stage, transport: Transport, directory: Directory, router: Router, *,
        stages: int, on_fault: Callable[[PeerFault], None],
        trusted: Callable[[PeerId, Coroutine[Any, Any, Answer]], Awaitable[Answer]] = lambda _, call: call,
        heard: Callable[[Sequence[PeerId]], Sequence[PeerId]] = lambda peers: peers,
    ) -> None:  # fmt: skip
        """`stages`: of the run. `trusted`: makes a call, and ends it when its peer is left out.
        `heard`: those of some peers of the stage whose word counts.
        """
        self.stage = stage
        self._run, self._transport, self._directory = run, transport, directory
        self._router, self._on_fault, self._trusted = router, on_fault, trusted
        self._stages, self._heard = stages, heard
        self._limits = CallLimits(router, stage, stages)
        self._seen: Sequence[PeerRecord] | None = None
        self._answered: dict[tuple[int, int], set[PeerId]] = {}
        """Which peers answered a microbatch of the last steps."""
        self._overtaking = Overtaking(router, stage, self._limits, on_fault)

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
                await self._directory.refresh({self.stage})
                continue
            began = now_s()
            try:
                asked = self._ask(work, peer, body, max_answer_bytes, check, addressed, begun=peer == holder)
                if overtaken:
                    return await asked
                again = partial(
                    self.call, msgspec.structs.replace(work, attempt=work.attempt + 1), body,
                    max_answer_bytes=max_answer_bytes, check=check, closed=closed, addressed=addressed,
                    in_vain=tuple(vain), overtaken=peer,
                )  # fmt: skip
                return await self._overtaking.unless_late(peer, work.t, asked, again)
            except PeerFault as fault:
                self._limits.lost(peer, t=work.t, since_s=began, now=now_s())
                self.fault(fault)
                work = msgspec.structs.replace(work, attempt=work.attempt + 1)
            except NotNow as later:
                busy.add(peer)
                self._limits.put_off(peer, t=work.t, since_s=began, now=now_s())
                if len(busy) >= len(self._router.peers(self.stage)):
                    await asyncio.sleep(min(MAX_PAUSE_S, later.retry_after_s))
                    busy.clear()
            except Stale as stale:
                past[peer] = stale  # one that took the step by itself; others may lack the microbatch
            except Refused as refused:
                refusals[peer] = refused
                counted = self._heard(self._router.peers(self.stage))
                if peer not in counted:
                    self._router.failed(peer, now=now_s())
                if by := await refusing(self._run, self._transport, self.stage, refusals, counted):
                    refused = next((refusals[one] for one in sorted(by) if refusals[one].by_charter), refused)
                    refused.text = f"stage {self.stage} refuses {work.t, work.m}: {refused.text}"
                    raise refused from None
        raise reason

    async def _ask(
        self, work: Work, peer: PeerId, body: Sequence[Buffer], max_answer_bytes: int,
        check: Callable[[PeerId, WorkDone, Answer], None], addressed: Callable[[Work, PeerId], Work], *,
        begun: bool,
    ) -> Answered:  # fmt: skip
        """Have one peer do `work`, as `call`."""
        onward = addressed(msgspec.structs.replace(work, route=work.route[1:]), peer)
        began, header = now_s(), pack(onward)
        passes = map(self._directory.at, range(self.stage, self._stages))
        with self._limits.call(peer, passes, t=work.t, begun=begun) as limit_s:
            calling = self._transport.call(
                peer, "work", header, body, max_answer_bytes=max_answer_bytes, deadline_s=limit_s
            )
            answer = await self._trusted(peer, calling)
        done = unpack_answer(peer, answer.header, WorkDone)
        check(peer, done, answer)
        took_s = now_s() - began
        self._limits.answered(took_s, now=now_s())
        # A time that cannot be true (NaN, below zero) would draw all work to its peer, for ever.
        told = [hop.work_s for hop in done.hops if hop.peer == peer and 0.0 <= hop.own_s <= took_s]
        self._router.answered(
            self.stage, peer, told[0] if told else took_s, took_s, now=now_s(), share=1 / self._limits.callers
        )
        line = self._transport.lines.get(peer, NetworkPath())
        done = msgspec.structs.replace(done, hops=with_latency(done.hops, took_s, line.rtt_s))
        self._note_answered(work, peer)
        return peer, done, answer

    def _note_answered(self, work: Work, peer: PeerId) -> None:
        self._answered = {name: by for name, by in self._answered.items() if name[0] >= work.t - 1}
        self._answered.setdefault((work.t, work.m), set()).add(peer)

    def _in_vain(self, work: Work) -> set[PeerId]:
        """Peers that answered a microbatch which their stage lacks: lost there, or not counted."""
        return self._answered.get((work.t, work.m), set()) if work.deepest == self.stage else set()

    def fault(self, fault: PeerFault) -> None:
        """Note that a peer of the stage broke the protocol: it gets a backoff."""
        self._router.failed(fault.peer, now=now_s(), silent=fault.silent)
        self._on_fault(fault)

    def is_deserted(self) -> bool:
        """Whether no peer of the stage can be asked now."""
        now = now_s()
        return all(self._router.backoff.in_backoff(p, now=now) for p in self._router.peers(self.stage))

    def _refresh_peers(self) -> None:
        self._limits.callers = max(1, len(self._directory.at(self.stage - 1)))
        records = self._directory.at(self.stage)
        if records is not self._seen:
            self._seen = records
            serving = [r.peer for r in records if r.state == "serving"]
            self._router.set_peers(self.stage, serving)

    def _choose(self, work: Work, exclude: set[PeerId]) -> PeerId:
        """The trainer's suggestion on the first attempt, if it has not failed here since it answered; else
        the next of this peer's fair queue.
        """
        now = now_s()
        in_vain, peers = self._in_vain(work), self._router.peers(self.stage)
        askable = {peer for peer in peers if not self._router.backoff.in_backoff(peer, now=now)}
        if not exclude | in_vain >= askable:  # none waits for a peer that rests
            exclude |= in_vain
        suggested = work.route[0] if work.route and work.attempt == 0 else None
        if suggested in askable - exclude and not self._router.backoff.is_failing(suggested):
            return suggested
        return self._router.route(self.stage, now=now, exclude=exclude, known=work.attempt > 0).peer

    async def _locate(self, work: Work) -> PeerId | None:
        """The peer that has `(t, m)` already or computes it, if any: asking it again costs nothing."""
        microbatch = Microbatch(work.t, work.m)
        found = await holders(
            self._run, self._transport, self._router, self.stage, microbatch, heard=self._heard
        )
        return next((peer for peer in found if peer not in self._in_vain(work)), None)
