"""A member that leaves gives its gradient sum to a mate, so that nothing of it is run again.

    leaving → mate   offer   these microbatches are in my sum         → those that you have too: I undo them
    leaving → mate   give    the sum, chunk by chunk                  → kept aside
    leaving → mate   take    all is there, this is its digest         → added, in one job, with the ledger

From the offer on the sum is frozen, and reported as being computed: nobody counts it, nobody runs it again.
Whatever happens to the answer of `take`, the leaving member drops its sum: the microbatches are in the mate's
ledger, or in nobody's, and then they are lacking and run again. They can never count twice.

What was handed over cannot be undone (its boundary tensors stay behind), so ledgers call it fixed: of a
duplicate the other one is undone. A repeated request for it is computed again and not added.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import torch

from peers import events
from peers.core import StageCore
from peers.device_thread import Rank
from peers.faultpoints import fault_point
from peers.ports import Answer, Directory, Request, Transport
from peers.reduce import CHUNK_ELEMENTS, checksum, read_part, vector_digest
from peers.roll import Roll
from peers.steps import OpenStep
from swarm.errors import NotNow, PeerFault, Refused, SwarmError
from swarm.ids import PeerId
from swarm.policy.ledger import members_of, read_bitmap, to_bytes
from swarm.wire.codec import encode
from swarm.wire.messages import (
    Ack,
    GiveSum,
    OfferedSum,
    OfferSum,
    TakeSum,
    check_run,
    pack,
    unpack,
    unpack_answer,
)

CALL_S = 20.0
"""Limit for one chunk of 8 MB."""
LOOK_S = 0.05
PAUSE_S = 1.5
"""After a mate could not take a sum: longer than it takes until everybody has reported again."""
MOST_GIVERS = 2
"""Sums that are kept aside at once: each is as large as our own."""


@dataclass(slots=True)
class _Aside:
    """A sum on its way to us."""

    t: int
    vector: torch.Tensor
    missing: set[int]
    """Chunks that have not come, by their start."""
    began: float


class HandOver:
    """Both sides of it. `undo` takes microbatches out of our own sum of a step."""

    def __init__(
        self,
        core: StageCore,
        transport: Transport,
        directory: Directory,
        roll: Roll,
        undo: Callable[[OpenStep, int], Awaitable[None]],
    ) -> None:
        self._core, self._transport, self._directory, self._roll = core, transport, directory, roll
        self._undo = undo
        self._aside: dict[PeerId, _Aside] = {}
        transport.serve("offer", self._serve_offer)
        transport.serve("give", self._serve_give, max_body_bytes=CHUNK_ELEMENTS * 8)
        transport.serve("take", self._serve_take, max_body_bytes=8 * core.run.M)

    # -- giving -----------------------------------------------------------------------------------

    async def give_all(self, *, limit_s: float) -> None:
        """Give the sums of all open steps away, as far as mates take them. Then nothing of ours counts."""
        until = time.monotonic() + limit_s
        for t in sorted(self._core.steps):
            step = self._core.steps.get(t)
            if step is not None:
                await self._give_step(step, until)

    async def _give_step(self, step: OpenStep, until: float) -> None:
        """One step: if it is being averaged, that is waited for; it may be over then."""
        dead: set[PeerId] = set()
        while time.monotonic() < until and not step.over and step.ledger.done:
            mates = [mate for mate in self._mates() if mate not in dead]
            if not mates:
                return
            if step.held is not None or step.reducing or step.ledger.frozen_for is not None:
                await asyncio.sleep(LOOK_S)
                continue
            step.handing = True
            self._core.news.urgent()
            try:
                if await self._give(step, mates[0]):
                    return
            except PeerFault:
                dead.add(mates[0])
                continue
            except SwarmError:
                pass  # its step is being averaged, or it is leaving as well
            finally:
                step.handing = False
                self._core.news.urgent()
            # We count again. If the others are about to average, they have to hear that, and we their plan.
            await asyncio.sleep(PAUSE_S)

    def _mates(self) -> list[PeerId]:
        """Who could take a sum, the least loaded first."""
        mates = self._core.mates(self._directory.at(self._core.stage))
        return [r.peer for r in sorted(mates, key=lambda r: (r.load, r.peer))]

    async def _give(self, step: OpenStep, mate: PeerId) -> bool:
        """True if the mate has it, or may have it. Raises if it certainly has not."""
        core, m = self._core, self._core.run.M
        done = step.ledger.done
        offer = OfferSum(run=core.run.id, era=core.era, t=step.t, done=to_bytes(done, m))
        answer = await self._transport.call(mate, "offer", pack(offer), deadline_s=CALL_S)
        overlap = read_bitmap(unpack_answer(mate, answer.header, OfferedSum).overlap, m)
        if overlap:
            await self._undo(step, overlap & done)
        total, done, losses = await core.device.run(Rank.STEP, step.t, self._freeze, step)
        try:
            for start in range(0, core.compute.numel, CHUNK_ELEMENTS):
                meta, body = encode(total[start : start + CHUNK_ELEMENTS], "none", name="a gradient sum")
                numel = min(CHUNK_ELEMENTS, core.compute.numel - start)
                chunk = GiveSum(
                    run=core.run.id, t=step.t, start=start, numel=numel, crc=checksum(body), tensors=(meta,)
                )
                await self._transport.call(mate, "give", pack(chunk), body, deadline_s=CALL_S)
            fault_point("handing")
            digest = await asyncio.to_thread(vector_digest, total)
            take = TakeSum(run=core.run.id, era=core.era, t=step.t, done=to_bytes(done, m), digest=digest)
            body = [struct.pack(f"<{len(losses)}d", *losses)] if core.is_last else []
            with contextlib.suppress(PeerFault):  # it may have it: it counts there, else it is run again
                await self._transport.call(mate, "take", pack(take), body, deadline_s=CALL_S)
        except SwarmError:
            await core.device.run(Rank.STEP, step.t, step.ledger.thaw)
            raise
        await core.device.run(Rank.STEP, step.t, core.drop_sum, step)
        given = done.bit_count()
        core.emit(events.HandedOver(stage=core.stage, t=step.t, microbatches=given, to=mate))
        return True

    def _freeze(self, step: OpenStep) -> tuple[torch.Tensor, int, list[float]]:
        """On the device thread: nothing enters the sum from here on."""
        if step.over or step.ledger.frozen_for is not None:
            raise NotNow("the step is being averaged")
        step.ledger.freeze("handing over")
        total = self._core.compute.sum(step.t)
        losses = [step.loss_of(m) for m in members_of(step.ledger.done)]
        return total.cpu() if total.is_cuda else total, step.ledger.done, losses

    # -- taking -----------------------------------------------------------------------------------

    async def _serve_offer(self, request: Request) -> Answer:
        offer = unpack(request.header, OfferSum)
        step = await self._step_for(request, offer.run, offer.t)
        done = read_bitmap(offer.done, self._core.run.M)
        if offer.era != self._core.era:
            raise NotNow("this peer is in another era")
        if step.held is not None or step.ledger.frozen_for is not None or step.handing:
            raise NotNow("the step is being averaged here")
        now = time.monotonic()
        for giver in [g for g, aside in self._aside.items() if now - aside.began > 4 * CALL_S]:
            del self._aside[giver]
        if len(self._aside) >= MOST_GIVERS and request.peer not in self._aside:
            raise NotNow("others are handing over to this peer")
        core = self._core
        self._aside[request.peer] = _Aside(
            offer.t,
            torch.empty(core.compute.numel, dtype=core.compute.sum_dtype),
            set(range(0, core.compute.numel, CHUNK_ELEMENTS)),
            now,
        )
        return Answer(pack(OfferedSum(overlap=to_bytes(done & step.ledger.done, core.run.M))))

    async def _serve_give(self, request: Request) -> Answer:
        give = unpack(request.header, GiveSum)
        await self._step_for(request, give.run, give.t)
        aside = self._aside.get(request.peer)
        numel = self._core.compute.numel
        if (
            aside is None
            or aside.t != give.t
            or give.start not in aside.missing
            or give.numel != min(CHUNK_ELEMENTS, numel - give.start)
            or sum(request.body_sizes) != give.numel * aside.vector.element_size()
        ):
            raise Refused(f"elements from {give.start} of step {give.t} are not a chunk that was offered")
        body = await request.accept()
        aside.vector[give.start : give.start + give.numel] = read_part(
            request.peer, give.tensors, give.crc, body, give.numel, "none", aside.vector.dtype, error=Refused
        )
        aside.missing.discard(give.start)
        return Answer(pack(Ack()))

    async def _serve_take(self, request: Request) -> Answer:
        take = unpack(request.header, TakeSum)
        core = self._core
        step = await self._step_for(request, take.run, take.t)
        done = read_bitmap(take.done, core.run.M)
        aside = self._aside.get(request.peer)
        if aside is None or aside.t != take.t or aside.missing:
            raise Refused(f"the sum of step {take.t} has not come as a whole")
        due = [8 * done.bit_count()] if core.is_last else []
        if list(request.body_sizes) != due:
            raise Refused(
                f"losses of {list(request.body_sizes)[:4]} bytes do not fit the ledger; {due} are due"
            )
        body = await request.accept()
        losses = struct.unpack(f"<{done.bit_count()}d", body[0]) if core.is_last else ()
        if not all(-1e30 < loss < 1e30 for loss in losses):
            raise Refused("a loss that is not finite was handed over")
        if await asyncio.to_thread(vector_digest, aside.vector) != take.digest:
            raise Refused("the sum that was handed over does not fit its digest")
        if take.era != core.era:
            raise NotNow("this peer is in another era")
        await core.device.run(Rank.STEP, take.t, self._add, step, aside, done, losses)
        self._aside.pop(request.peer, None)
        core.news.urgent()
        return Answer(pack(Ack()))

    def _add(self, step: OpenStep, aside: _Aside, done: int, losses: Sequence[float]) -> None:
        """On the device thread: the sum and the ledger, or neither."""
        ledger = step.ledger
        if step.over or step.held is not None or ledger.frozen_for is not None or step.handing:
            raise NotNow("the step is being averaged here")
        if ledger.done & done:
            raise NotNow("some of it was computed here meanwhile")
        self._core.compute.add_to_sum(step.t, aside.vector)
        ledger.take_over(done)
        step.losses.update(zip(members_of(done), losses, strict=False))

    async def _step_for(self, request: Request, run: str, t: int) -> OpenStep:
        check_run(run, self._core.run.id)
        await self._roll.require(request.peer, self._core.stage)
        step = self._core.steps.get(t)
        if step is None or not self._core.joined:
            raise NotNow(f"step {t} is not open here")
        return step
