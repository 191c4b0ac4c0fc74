"""Handoff: a replica that leaves gives its gradient sum to another, so that nothing of it is run again.

    leaving → taker   offer   these microbatches are in my sum     → those that you have too: I retract them
    leaving → taker   give    fetch it (`sum`, from me)            → all of it is here, kept aside
    leaving → taker   take    count these microbatches as yours    → added, in one job, with the ledger

From the offer on the sum is frozen, and reported as being computed. Whatever happens to the answer of `take`,
the leaving replica drops its sum: the microbatches are in the taker's ledger, or in none. What was handed off
is *inherited*. Why they never count twice, and whose sum is taken: docs/design.md, *Leaving*.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from peers import events
from peers.clock import now_s
from peers.fault_points import fault_point
from peers.ports import Answer, Rank, Request
from peers.stage.membership import announced
from peers.stage.open_step import OpenStep
from peers.stage.state import StageCore
from peers.transfer.client import DownloadFailed, Wanted, download
from peers.transfer.leases import Leases, Snapshot
from swarm.audit import is_audited
from swarm.errors import NotNow, NotReady, PeerFault, Refused, SwarmError
from swarm.ids import PeerId
from swarm.protocol.ledger import Bitmap, check_bitmap, members_of
from swarm.protocol.step import StepState
from swarm.wire.codec import to_host
from swarm.wire.messages import Ack, HandedSum, OfferedSum, pack, unpack, unpack_answer

CALL_S = 20.0
LEAST_BYTES_PER_S = 400_000
"""A sum that does not come so fast is given up: a line of 3 Mbit/s."""
CHECK_EVERY_S = 0.05
PAUSE_S = 1.5
"""Pause after a replica could not take a sum: longer than it takes until all have reported again."""
MAX_GIVERS = 2
"""Sums that are kept aside at once: each is as large as this peer's own."""


@dataclass(slots=True)
class _Aside:
    """A sum that another peer hands off to this one."""

    t: int
    done: Bitmap
    began: float
    vector: torch.Tensor | None = None
    """None: it is on its way."""


class Handoff:
    """Both sides of a handoff."""

    def __init__(self, core: StageCore, leases: Leases) -> None:
        self._core, self._transport, self._leases = core, core.transport, leases
        self._giving: dict[tuple[int, int], torch.Tensor] = {}
        """By step and ledger: a request that comes late is not for what the sum is by then."""
        self._aside: dict[PeerId, _Aside] = {}
        self._transport.serve("offer", self._serve_offer)
        self._transport.serve("give", self._serve_give)
        self._transport.serve("sum", self._serve_sum)
        self._transport.serve("take", self._serve_take, max_body_bytes=8 * core.run.M)

    # -- giving -----------------------------------------------------------------------------------

    async def give_all(self, *, limit_s: float) -> None:
        """Give the sums of all open steps away, as far as replicas take them. Then nothing here counts."""
        until = now_s() + limit_s
        for t in sorted(self._core.steps):
            step = self._core.steps.get(t)
            if step is not None:
                await self._give_step(step, until)

    async def _give_step(self, step: OpenStep, until: float) -> None:
        """One step: if it is being averaged, that is waited for; it may be over then."""
        dead: set[PeerId] = set()
        while now_s() < until and not step.over and step.ledger.done:
            replicas = [replica for replica in self._takers() if replica not in dead]
            if not replicas:
                return
            if step.state is not StepState.OPEN or step.ledger.frozen_for is not None:
                await asyncio.sleep(CHECK_EVERY_S)
                continue
            step.hand_over()
            self._core.report_trigger.urgent()
            try:
                if await self._give(step, replicas[0]):
                    return
            except PeerFault:
                dead.add(replicas[0])
                continue
            except Refused as refused:
                lost = events.count(step.ledger.done.bit_count(), "microbatch")
                text = f"run again by others: {lost} of step {step.t}, since {refused.text}"
                self._core.emit(events.Note(text=text))
                return
            except SwarmError:
                pass  # its step is being averaged, or it is leaving as well
            finally:
                step.keep()
                self._core.report_trigger.urgent()
            # This sum counts again. If the others are about to average, they have to hear of it.
            await asyncio.sleep(PAUSE_S)

    def _takers(self) -> list[PeerId]:
        """The replicas that could take a sum: those with voice first, then the least loaded."""
        voice, there = self._core.voice(), announced(self._core)
        return [r.peer for r in sorted(there, key=lambda r: (r.peer not in voice, r.load, r.peer))]

    async def _give(self, step: OpenStep, replica: PeerId) -> bool:
        """Hand a sum off to `replica`. True if it has it, or may have it; raises if it certainly has not."""
        core = self._core
        done = step.ledger.done
        offer = HandedSum(run=core.run.id, generation=core.generation, t=step.t, done=Bitmap(done))
        answer = await self._transport.call(replica, "offer", pack(offer), deadline_s=CALL_S)
        overlap = unpack_answer(replica, answer.header, OfferedSum).overlap
        check_bitmap(overlap, core.run.microbatches(step.t))
        if overlap:
            await core.retract(step, overlap & done)
        total, done, losses = await core.device.run(Rank.STEP, step.t, self._freeze, step)
        self._giving[step.t, done] = total
        try:
            handed = pack(replace(offer, done=Bitmap(done)))
            limit_s = CALL_S + total.nbytes / LEAST_BYTES_PER_S
            await self._transport.call(replica, "give", handed, deadline_s=limit_s)
            fault_point("handing")
            body = [struct.pack(f"<{len(losses)}d", *losses)] if core.is_last else []
            with contextlib.suppress(PeerFault):  # it may have it: it counts there, else it is run again
                await self._transport.call(replica, "take", handed, body, deadline_s=CALL_S)
        except SwarmError:
            await core.device.run(Rank.STEP, step.t, step.ledger.thaw)
            raise
        finally:
            del self._giving[step.t, done]
        await core.device.run(Rank.STEP, step.t, core.drop_sum, step)
        given = done.bit_count()
        core.emit(events.HandedOver(stage=core.stage, t=step.t, microbatches=given, to=replica))
        return True

    def _freeze(self, step: OpenStep) -> tuple[torch.Tensor, int, list[float]]:
        """In a job of rank STEP: nothing enters the sum from here on."""
        if step.over or step.ledger.frozen_for is not None:
            raise NotNow("the step is being averaged")
        step.ledger.freeze("handing over")
        total = self._core.compute.sums.of(step.t).view(-1)  # a new object: no lease of before is of this
        losses = [step.loss_of(m) for m in members_of(step.ledger.done)]
        return to_host(total), step.ledger.done, losses

    async def _serve_sum(self, request: Request) -> Answer:
        wanted = unpack(request.header, HandedSum, self._core.run.id)
        await self._core.membership.require(request.peer, self._core.stage)
        total = self._giving.get((wanted.t, wanted.done))
        if total is None:
            raise NotReady(f"no sum of step {wanted.t} is handed off here", version=self._core.version)
        content = Snapshot(version=wanted.t, tensors={"sum": total})
        return await self._leases.lend(request.peer, "sum", None, content, total)

    # -- taking -----------------------------------------------------------------------------------

    async def _serve_offer(self, request: Request) -> Answer:
        offer = unpack(request.header, HandedSum, self._core.run.id)
        step = await self._step_for(request, offer.t)
        check_bitmap(offer.done, self._core.run.microbatches(offer.t))
        if offer.generation != self._core.generation:
            raise NotNow("this peer is in another generation")
        if step.state is not StepState.OPEN or step.ledger.frozen_for is not None:
            raise NotNow("the step is being averaged here")
        return Answer(pack(OfferedSum(overlap=Bitmap(offer.done & step.ledger.done))))

    async def _serve_give(self, request: Request) -> Answer:
        core, giver = self._core, request.peer
        give = unpack(request.header, HandedSum, core.run.id)
        await self._step_for(request, give.t)
        like = {"sum": torch.empty(core.compute.numel, dtype=core.compute.sums.dtype, device="meta")}
        wanted = Wanted(name=f"the sum of step {give.t}", method="sum", question=give, like=like)
        now, longest_s = now_s(), 2 * CALL_S + like["sum"].nbytes / LEAST_BYTES_PER_S
        for old in [g for g, aside in self._aside.items() if now - aside.began > longest_s]:
            del self._aside[old]
        if len(self._aside) >= MAX_GIVERS and giver not in self._aside:
            raise NotNow("others are handing off to this peer")
        aside = self._aside[giver] = _Aside(give.t, give.done, now)
        try:
            aside.vector = (await download(self._transport, wanted, [giver])).tensors["sum"]
        except DownloadFailed as failed:
            self._aside.pop(giver, None)
            raise NotNow(failed.text) from None
        return Answer(pack(Ack()))

    async def _serve_take(self, request: Request) -> Answer:
        core = self._core
        take = unpack(request.header, HandedSum, core.run.id)
        step, done = await self._step_for(request, take.t), take.done
        check_bitmap(done, core.run.microbatches(take.t))
        aside = self._aside.get(request.peer)
        if aside is None or (aside.t, aside.done) != (take.t, done) or aside.vector is None:
            raise Refused(f"the sum of step {take.t} has not come as a whole")
        due = [8 * done.bit_count()] if core.is_last else []
        if list(request.body_sizes) != due:
            raise Refused(
                f"losses of {list(request.body_sizes)[:4]} bytes do not fit the ledger; {due} are due"
            )
        body = await request.accept()
        losses = struct.unpack(f"<{done.bit_count()}d", body[0]) if core.is_last else ()
        if not all(-1e30 < loss < 1e30 for loss in losses):
            raise Refused("a loss that is not finite was handed off")
        if take.generation != core.generation:
            raise NotNow("this peer is in another generation")
        await core.device.run(Rank.STEP, take.t, self._add, step, aside.vector, done, losses)
        self._aside.pop(request.peer, None)
        core.report_trigger.urgent()
        return Answer(pack(Ack()))

    def _add(self, step: OpenStep, total: torch.Tensor, done: int, losses: Sequence[float]) -> None:
        """In a job of rank STEP: the sum and the ledger, or neither."""
        ledger = step.ledger
        if step.state is not StepState.OPEN or ledger.frozen_for is not None:
            raise NotNow("the step is being averaged here")
        if ledger.done & done:
            raise NotNow("some of it was computed here meanwhile")
        self._core.compute.sums.add_sum(step.t, total)
        ledger.take_over(done)
        step.losses.update(zip(members_of(done), losses, strict=False))

    async def _step_for(self, request: Request, t: int) -> OpenStep:
        """The step that a peer hands its sum of to this one.

        Raises:
            NotNow: the peer is no replica.
            Refused: nobody could see later what the sum was made of; or its peer has no voice, and nobody saw
                that it computed what it gives.
        """
        if is_audited(self._core.run) and self._core.run.adds_exactly:
            raise Refused("a sum that another peer made is not taken where contributions are audited")
        await self._core.membership.require(request.peer, self._core.stage)
        if (voice := self._core.voice()) and request.peer not in voice:
            raise Refused("the sum of a peer without voice is not taken: no trainer has vouched for it yet")
        step = self._core.steps.get(t)
        if step is None or not self._core.joined:
            raise NotNow(f"step {t} is not open here")
        return step
