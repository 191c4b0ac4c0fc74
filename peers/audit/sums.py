"""The check of a stage's sums: nonces and products are exchanged when all results are there.

A liar is found by the chunk that does not fit, which is computed again from what its members signed.

A round that fails here changes nothing, as any round that fails. A peer that is shown to lie is left out of
the next one, and its microbatches run again. Why this suffices: docs/decisions/audits.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import torch

from peers.audit.convictions import Convictions
from peers.audit.sum_check import Chunks, SumCheck, any_chunk
from peers.ports import Answer, Buffer, Request, Transport
from peers.waiting import happens, pulse
from swarm.audit.evidence import numbers, proves
from swarm.digest import digest_of
from swarm.errors import BadAnswer, NotReady, PeerFault, PeerSilent, Refused
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.rounds import Plan
from swarm.protocol.statements import Coin, Toss
from swarm.protocol.sums import nth_digest
from swarm.wire.codec import bytes_of, chunk_digest
from swarm.wire.evidence import (
    AskProducts,
    Evidence,
    FalseContribution,
    Products,
    Projecting,
    Reveal,
    ShowChunk,
    ShownChunk,
    WrongProduct,
    WrongSum,
)
from swarm.wire.messages import pack, say, unpack, unpack_answer

REVEAL_S = 60.0
"""Limit for the exchange of nonces: members end their parts within moments of each other, or fail."""
OPENS_S = 5.0
"""A member may have all results before another has heard of the round."""
SPOT_CHECKS = 0.02
"""Share of the rounds in which a member computes one chunk again though it fits: lies within the rounding of
results are found by nothing else."""
KEPT_ROUNDS = 3


class SumAudits:
    """This peer's part in the checks of its stage's rounds."""

    def __init__(self, run: Run, stage: Stage, transport: Transport, convictions: Convictions) -> None:
        self._run, self._stage, self._transport, self._convictions = run, stage, transport, convictions
        self._checks: dict[str, SumCheck] = {}
        """Of this round and the last ones: other members may still ask."""
        self._opened = asyncio.Event()
        self._told, self._told_t = asyncio.Event(), -1
        """Set when products were told, and the step of the last."""
        self.consider: Callable[[SumCheck], Awaitable[None]] | None = None
        """Awaited with each round whose results fit."""
        transport.serve("reveal", self._serve_reveal)
        transport.serve("show", self._serve_show)
        transport.serve("products", self._serve_products)

    # -- one round (peers.stage.all_reduce) ---------------------------------------------------------

    def open(self, plan: Plan, t: int, parts: Sequence[Chunks], total: torch.Tensor) -> SumCheck | None:
        """The check of a round; None in a run whose sums are not exact, or that names no trainers.

        Raises:
            Refused: a member was shown to lie.
        """
        liars = self._convictions.barred.intersection(plan.members)
        if liars:
            raise Refused(f"{min(liars)}, a member of this round, was shown to lie")
        if not (self._run.adds_exactly and self._run.admission.trainers):
            return None  # those who trust each other save a round trip a step
        check = SumCheck(self._run.id, self._stage, self._transport.signer, plan, t, parts, total)
        self._checks.pop(plan.round, None)
        self._checks[plan.round] = check
        while len(self._checks) > KEPT_ROUNDS:
            self.close(self._checks.pop(next(iter(self._checks))))
        pulse(self._opened)
        return check

    def close(self, check: SumCheck) -> None:
        """The round ended here: what is not known by now will not be. In any state, also twice."""
        if not check.projected.done():
            check.projected.set_exception(NotReady("the round is void here", version=check.t))
            check.projected.exception()

    async def verify(self, check: SumCheck, reduced: torch.Tensor) -> None:
        """Return if `reduced` is the sum of what all members contributed.

        Raises:
            SwarmError: it is not, or a member did not take part in the check. Who was shown to lie is left
            out from now on.
        """
        check.agree()
        forged = check.forged()
        if forged is not None:
            raise self._accuse_forger(check, *forged)
        nonce = check.reveal()
        others = [member for member in check.plan.members if member != self._transport.peer_id]
        tasks = [asyncio.ensure_future(self._exchange(check, other, nonce)) for other in others]
        own = asyncio.ensure_future(self._project(check))
        try:
            nonces, *told = await asyncio.gather(own, *tasks)
        finally:
            for task in (own, *tasks):
                task.cancel()
        for member, products in zip(others, told, strict=True):
            check.hear(member, products, nonces)
        self._told_t = check.t
        pulse(self._told)
        wrong = await asyncio.to_thread(check.mismatch, reduced)
        if wrong is not None:
            await self._dispute(check, reduced, *wrong)
            owner = check.plan.members[wrong[0]]
            raise Refused(f"the part of {owner} is not the sum of what its members say that they sent")
        toss = Toss("spot check", self._stage, check.t, check.plan.round)
        coin = Coin(self._transport.signer, self._run.id, toss)
        if coin.falls(SPOT_CHECKS) and await self._spot_check(check, reduced, coin):
            raise Refused("a chunk is not the sum of what its members sent")
        if self.consider is not None:
            await self.consider(check)

    async def _spot_check(self, check: SumCheck, reduced: torch.Tensor, coin: Coin) -> bool:
        """Compute any chunk again; whether a peer was shown to lie."""
        try:
            return await self._dispute(check, reduced, *any_chunk(check.parts, coin))
        except BadAnswer:
            raise
        except PeerFault:
            return False  # of a member that is gone nothing is needed: the result fits

    async def _project(self, check: SumCheck) -> tuple[bytes, ...]:
        """Tell this member's products once all nonces are here; returns those."""
        if not await happens(check.unsealed, REVEAL_S):
            silent = min(set(check.plan.members) - check.nonces.keys())
            raise PeerSilent(silent, "did not reveal its nonce")
        nonces = check.ordered_nonces()
        told = await asyncio.to_thread(check.project, nonces)
        if not check.projected.done():
            check.projected.set_result(told)
        return nonces

    async def _exchange(self, check: SumCheck, member: PeerId, nonce: bytes) -> Projecting:
        reveal = Reveal(run=self._run.id, round=check.plan.round, nonce=nonce)
        answer = await self._transport.call(member, "reveal", pack(reveal), deadline_s=REVEAL_S)
        return unpack_answer(member, answer.header, Projecting)

    async def _serve_reveal(self, request: Request) -> Answer:
        reveal = unpack(request.header, Reveal, self._run.id)
        if reveal.round not in self._checks:
            await happens(self._opened, OPENS_S)
        check = self._checks.get(reveal.round)
        if check is None or request.peer not in check.plan.members:
            raise NotReady(f"round {reveal.round[:8]!r} is not open here", version=-1)
        check.unseal(request.peer, reveal.nonce)
        return Answer(pack(await asyncio.shield(check.projected)))

    # -- disputes -----------------------------------------------------------------------------------

    async def _dispute(self, check: SumCheck, reduced: torch.Tensor, place: int, index: int) -> bool:
        """Compute a chunk again; whether a peer was shown to lie.

        Raises:
            PeerFault: a member does not show what it sent, or an owner did not sign it.
        """
        start, numel = check.parts[place][index]
        came = await asyncio.to_thread(chunk_digest, reduced[start : start + numel])
        if came != nth_digest(check.reduced[place][0].chunks, index):
            raise BadAnswer(check.plan.members[place], "sent a result that it did not sign")
        shown = [await self.shown(check, member, place, index) for member in range(len(check.plan.members))]
        for evidence, body in self._accusations(check, place, index, shown):
            if await asyncio.to_thread(proves, self._transport.signer, self._run, evidence, body):
                self._found(evidence, body)
                return True
        return False

    def _accusations(
        self, check: SumCheck, place: int, index: int, shown: Sequence[tuple[bytes, list[Buffer]]]
    ) -> list[tuple[Evidence, list[Buffer]]]:
        """All that may be wrong with a chunk, the owner's result first."""
        reduced, signature = check.reduced[place]
        wrong_sum = WrongSum(
            accused=check.plan.members[place], statement=reduced, signature=signature, index=index,
            lists=tuple(digests for digests, _ in shown),
        )  # fmt: skip
        found: list[tuple[Evidence, list[Buffer]]] = [(wrong_sum, [b for _, body in shown for b in body])]
        for member, (digests, body) in enumerate(shown):
            projected, signature = check.product_of(member)
            wrong_product = WrongProduct(
                accused=check.plan.members[member], statement=projected, signature=signature,
                place=place, index=index, digests=digests,
            )  # fmt: skip
            found.append((wrong_product, body))
        return found

    async def shown(self, check: SumCheck, member: int, place: int, index: int) -> tuple[bytes, list[Buffer]]:
        """What a member contributed to a chunk: the digests of all chunks of that part, and the bytes."""
        name, said = check.plan.members[member], check.reduced[place][0].contributions[member]
        if name == self._transport.peer_id:
            digests, body = self._show(check, place, index)
        else:
            ask = ShowChunk(run=self._run.id, round=check.plan.round, place=place, index=index)
            most = 8 * check.parts[place][index][1]
            answer = await self._transport.call(
                name, "show", pack(ask), max_answer_bytes=most, deadline_s=REVEAL_S
            )
            digests, body = unpack_answer(name, answer.header, ShownChunk).digests, list(answer.body)
        chunk = numbers(body[0]) if len(body) == 1 else None
        fits = not digests and not body and not check.contributes(member)
        if chunk is not None:
            fits = chunk_digest(chunk) == nth_digest(digests, index)
        if not fits or digest_of(digests) != said.chunks:
            raise BadAnswer(name, "does not show the contribution that it sent")
        return digests, body

    def _show(self, check: SumCheck, place: int, index: int) -> tuple[bytes, list[Buffer]]:
        me = check.plan.members.index(self._transport.peer_id)
        if not check.contributes(me):
            return b"", []
        return check.digests[place], [bytes(bytes_of(check.chunk(place, index)))]

    async def _serve_show(self, request: Request) -> Answer:
        ask = unpack(request.header, ShowChunk, self._run.id)
        check = self._checks.get(ask.round)
        if check is None or request.peer not in check.plan.members or not check.unsealed.is_set():
            raise NotReady(f"no results of round {ask.round[:8]!r} are disputed here", version=-1)
        if not 0 <= ask.place < len(check.parts) or not 0 <= ask.index < len(check.parts[ask.place]):
            raise Refused(f"there is no chunk {ask.index} of part {ask.place} in this round")
        digests, body = self._show(check, ask.place, ask.index)
        return Answer(pack(ShownChunk(digests=digests)), body)

    async def _serve_products(self, request: Request) -> Answer:
        ask = unpack(request.header, AskProducts, self._run.id)
        if not self._run.admission.may_audit(request.peer):
            raise Refused("the owner of a run audits it, and the trainers that its manifest names")
        if self._told_t < ask.t:
            await happens(self._told, OPENS_S)
        for check in reversed(self._checks.values()):
            if check.t == ask.t and (said := check.told_of(ask.member)) is not None:
                return Answer(*say(Products(plan=check.plan, said=said)))
        raise NotReady(f"no products of step {ask.t} are known here", version=-1)

    def _accuse_forger(self, check: SumCheck, place: int, member: int) -> PeerFault:
        """This member did not sign the contribution that an owner names as its own."""
        reduced, signature = check.reduced[place]
        owner = check.plan.members[place]
        evidence = FalseContribution(accused=owner, statement=reduced, signature=signature, place=member)
        if proves(self._transport.signer, self._run, evidence, []):
            self._found(evidence, [])
        return BadAnswer(owner, "names a contribution that this peer did not send")

    def _found(self, evidence: Evidence, body: list[Buffer]) -> None:
        if self._convictions.convict(evidence):
            self._convictions.pass_on(evidence, body)
