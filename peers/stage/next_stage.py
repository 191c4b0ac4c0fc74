"""Calls to the next stage: one of its peers answers in the end, whichever of them fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from peers.clock import now_s
from peers.ports import Answer, Buffer, Directory, Transport
from swarm.errors import Busy, NotNow, PeerFault, Refused, Stale, SwarmError
from swarm.ids import PeerId, Stage
from swarm.policy.router import NoPeerForStage, Router
from swarm.policy.timeouts import AdaptiveTimeout
from swarm.records import PeerRecord
from swarm.wire.messages import Locate, Located, Work, WorkDone, pack, unpack_answer, with_latency

LOCATE_S = 1.0
"""How long to ask which peer has a microbatch before it is recomputed."""
MAX_ASKED = 16
"""Peers asked where a microbatch is. Missing a holder costs an undo, not correctness."""
MAX_REFUSALS = 2
"""So many peers that refuse the same microbatch are not all wrong about it."""


class NextStage:
    """The peers of stage `stage`, as one callee."""

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        directory: Directory,
        router: Router,
        *,
        on_fault: Callable[[PeerFault], None],
    ) -> None:
        self.stage = stage
        self._transport, self._directory = transport, directory
        self._router, self._on_fault = router, on_fault
        self.timeout = AdaptiveTimeout()
        self._seen: Sequence[PeerRecord] | None = None

    async def call(
        self,
        work: Work,
        body: Sequence[Buffer],
        *,
        max_answer_bytes: int,
        check: Callable[[PeerId, WorkDone, Answer], None],
        closed: Callable[[], SwarmError | None],
    ) -> tuple[PeerId, WorkDone, Answer]:
        """Have `work` done by some peer of the stage.

        Args:
            check: raises BadAnswer for an answer that cannot be used.
            closed: why the work need not be done any more, if so; it is raised.

        Raises:
            Stale: the step is over, here or there.
            Refused: several peers refuse it.
        """
        refusals: list[PeerId] = []
        busy: set[PeerId] = set()
        holder: PeerId | None = None
        while (reason := closed()) is None:
            self._refresh_peers()
            try:
                if work.attempt > 0 or work.deepest >= 0:
                    holder = await self._locate(work)
                peer = holder if holder and holder not in refusals else self._choose(work, {*refusals, *busy})
            except NoPeerForStage as none:
                busy.clear()
                await asyncio.sleep(min(1.0, max(0.05, none.retry_at - now_s())))
                await self._directory.refresh({self.stage})
                continue
            began = now_s()
            try:
                answer = await self._transport.call(
                    peer, "work", pack(work), body, max_answer_bytes=max_answer_bytes,
                    deadline_s=self.timeout.limit_s,
                )  # fmt: skip
                done = unpack_answer(peer, answer.header, WorkDone)
                check(peer, done, answer)
            except PeerFault as fault:
                self.fault(fault)
                work = msgspec.structs.replace(work, attempt=work.attempt + 1)
            except NotNow as later:
                busy.add(peer)
                if not isinstance(later, Busy) or len(busy) >= len(self._router.peers(self.stage)):
                    await asyncio.sleep(later.retry_after_s)
                    busy.clear()
            except Refused as refused:
                refusals.append(peer)
                if len(refusals) >= MAX_REFUSALS or len(self._router.peers(self.stage)) <= len(refusals):
                    raise Refused(f"stage {self.stage} refuses {work.t, work.m}: {refused.text}") from None
            else:
                took_s = now_s() - began
                self.timeout.answered(took_s)
                hop = next((hop for hop in done.hops if hop.peer == peer), None)
                # A time that cannot be true (NaN, below zero) would draw all work to its peer, for ever.
                if hop is not None and 0.0 <= hop.own_s <= took_s:
                    self._router.answered(self.stage, peer, hop.own_s, hop.work_s)
                else:
                    self._router.answered(self.stage, peer, took_s)
                done = msgspec.structs.replace(done, hops=with_latency(done.hops, took_s))
                return peer, done, answer
        raise reason

    def fault(self, fault: PeerFault) -> None:
        """Note that a peer of the stage broke the protocol: it gets a backoff."""
        self._router.failed(fault.peer, now=now_s(), silent=fault.silent)
        self._on_fault(fault)

    def is_deserted(self) -> bool:
        """Whether no peer of the stage can be asked now."""
        now = now_s()
        return all(self._router.backoff.in_backoff(p, now=now) for p in self._router.peers(self.stage))

    def _refresh_peers(self) -> None:
        records = self._directory.at(self.stage)
        if records is not self._seen:
            self._seen = records
            serving = [r.peer for r in records if r.state == "serving"]
            self._router.set_peers(self.stage, serving)

    def _choose(self, work: Work, exclude: set[PeerId]) -> PeerId:
        """The trainer's suggestion on the first attempt; else the next of this peer's fair queue."""
        now = now_s()
        suggested = work.route[0] if work.route and work.attempt == 0 else None
        known = suggested in self._router.peers(self.stage) and suggested not in exclude
        if suggested is not None and known and not self._router.backoff.in_backoff(suggested, now=now):
            return suggested
        return self._router.route(self.stage, now=now, exclude=exclude).peer

    async def _locate(self, work: Work) -> PeerId | None:
        """The peer that has `(t, m)` already or computes it, if any: asking it again costs nothing."""
        now = now_s()
        peers = [p for p in self._router.peers(self.stage) if not self._router.backoff.in_backoff(p, now=now)]
        question = pack(Locate(run=work.run, t=work.t, m=work.m))

        async def ask(peer: PeerId) -> PeerId | None:
            try:
                answer = await self._transport.call(peer, "locate", question, deadline_s=LOCATE_S)
                return peer if unpack_answer(peer, answer.header, Located).has else None
            except (PeerFault, NotNow, Stale, Refused):
                return None

        answers = await asyncio.gather(*(ask(peer) for peer in peers[:MAX_ASKED]))
        return next((peer for peer in answers if peer is not None), None)
