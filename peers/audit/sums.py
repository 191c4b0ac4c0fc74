"""The check of a stage's sums: nonces and products are exchanged when all results are there.

A liar is found by the chunk that does not fit, which is computed again from what its members signed.

A round that fails here changes nothing, as any round that fails. A peer that is shown to lie is left out of
the next one, and its microbatches run again. Why this suffices: docs/decisions/audits.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch

from peers.audit.convictions import Convictions
from peers.audit.sum_check import Chunks, SumCheck, any_chunk
from peers.ports import Answer, Buffer, Request, Transport
from peers.waiting import fail, happens, pulse
from swarm.audit.evidence import numbers, proves
from swarm.digest import digest_of
from swarm.errors import BadAnswer, NotReady, PeerFault, Refused, SwarmError, short
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.rounds import Plan
from swarm.protocol.statements import Coin, Toss
from swarm.protocol.sums import are_checked, nth_digest
from swarm.wire.codec import bytes_of, chunk_digest
from swarm.wire.evidence import (
    AskProducts,
    Evidence,
    FalseContribution,
    Products,
    Projecting,
    Reveal,
    Revealed,
    ShowChunk,
    ShownChunk,
    WrongProduct,
    WrongSum,
)
from swarm.wire.messages import pack, say, unpack, unpack_answer

SHOW_S = 60.0
"""Limit for an answer to a question about a round that is over."""
HOLDS_S = 1.0
"""A member that has not said its products yet answers after this what it knows, and is asked again."""
PAUSE_S = 0.25
"""Between an answer and the next question to a member, while something is lacking."""
MAX_SHOWN_BYTES = 48 << 10
"""Of products in one answer, whose header has its limit; what is lacking then is asked for again."""
OPENS_S = 5.0
"""A member may have all results before another has heard of the round."""
SPOT_CHECKS = 0.02
"""Share of the rounds in which a member computes one chunk again though it fits: lies within the rounding of
results are found by nothing else."""
KEPT_ROUNDS = 3


class Withheld(SwarmError):
    """Members did not say in time what the check of a round needs."""

    def __init__(self, check: SumCheck) -> None:
        unknown = [member for member in check.plan.members if member not in check.nonces]
        lacking = [] if unknown else [*check.lacking()]
        self.nonces = unknown if len(unknown) < max(2, len(check.plan.members) - 1) else []
        """Those that keep their nonce, though they have all results; not all, which perhaps lack some."""
        self.products = lacking
        """Those that know all nonces, and do not say their products."""
        names = ", ".join(map(short, unknown or lacking))
        super().__init__(f"the {'nonces' if unknown else 'products'} of {names} did not come in time")


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
        if not are_checked(self._run):
            return None
        check = SumCheck(self._run.id, self._stage, self._transport.signer, plan, t, parts, total)
        self._checks.pop(plan.round, None)
        self._checks[plan.round] = check
        while len(self._checks) > KEPT_ROUNDS:
            self.close(self._checks.pop(next(iter(self._checks))))
        pulse(self._opened)
        return check

    def close(self, check: SumCheck) -> None:
        """The round ended here: what is not known by now will not be. In any state, also twice."""
        fail(check.projected, NotReady("the round is void here", version=check.t))

    async def verify(
        self, check: SumCheck, reduced: torch.Tensor, limit_s: float, gave_all: Callable[[], None]
    ) -> None:
        """Return if `reduced` is the sum of what all members contributed. `gave_all` is called before this
        member says its products: without them no other has the result.

        Raises:
            Withheld: a member did not say within `limit_s` what it has to.
            SwarmError: `reduced` is not that. A member that was shown to lie is left out from now on.
        """
        check.limit_s, me = limit_s, self._transport.peer_id
        check.agree()
        if (forger := check.forger()) is not None:
            raise self._accuse_forger(check, forger)
        check.reveal()
        heard = asyncio.ensure_future(happens(check.heard, limit_s))
        work = [self._ask_until_heard(check, other) for other in check.plan.members if other != me]
        work.append(self._project(check, reduced, gave_all))
        tasks = [asyncio.ensure_future(one) for one in work]
        running: set[asyncio.Future[Any]] = {heard, *tasks}
        try:
            while not heard.done():
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            if not heard.result():
                raise Withheld(check)
        finally:
            for task in (heard, *tasks):
                task.cancel()
        await self._compare(check, reduced)

    async def finish(self, round_name: str, sources: Sequence[PeerId]) -> torch.Tensor:
        """The result of a round that failed here after this member had said its products, once `sources`,
        which say that they have it, have shown what the other members signed, and that fits.

        Raises:
            PeerFault: one of them did not show it. If it answered, the round is forgotten.
            SwarmError: the result is not true, or cannot be checked here any more: it is forgotten.
        """
        check = self._checks.get(round_name)
        if check is None or check.unchecked is None:
            raise NotReady(f"nothing is left of round {round_name[:8]!r} here", version=-1)
        reduced = check.unchecked
        try:
            for source in [peer for peer in sources if peer in check.plan.members]:
                await self._ask_source(check, source)
            if check.lacking():
                raise NotReady("no member of the round has its result", version=-1)
            await self._compare(check, reduced)
        except SwarmError as error:
            if not (isinstance(error, PeerFault) and error.silent):
                check.unchecked = None
            raise
        return reduced

    async def _ask_source(self, check: SumCheck, source: PeerId) -> None:
        """Take what all members signed of their products from one that says that it has the result.

        Raises:
            PeerFault: it does not show that.
        """
        try:
            while lacking := check.lacking():
                await self._ask(check, source)
                if check.lacking() == lacking:
                    raise BadAnswer(source, "does not show how it has the result")
        except NotReady as not_ready:
            raise BadAnswer(source, f"does not show how it has the result: {not_ready.text}") from None

    async def _ask_until_heard(self, check: SumCheck, member: PeerId) -> None:
        """Exchange nonces and products with a member until all are here: from it, or from others."""
        while not check.heard.is_set():
            try:
                await self._ask(check, member)
            except NotReady as not_ready:
                if not_ready.version >= 0:  # if that is a lie, the others shall not lack this one's products
                    await asyncio.wait([check.projected])
                    raise BadAnswer(member, f"says that {not_ready.text}") from None
            except PeerFault:
                pass  # others may know what it signed
            await happens(check.heard, PAUSE_S)

    async def _ask(self, check: SumCheck, member: PeerId) -> None:
        lacking = tuple(other for other in check.lacking() if other not in (member, self._transport.peer_id))
        reveal = Reveal(
            run=self._run.id, round=check.plan.round, nonces=check.known_nonces(),
            lacking=lacking if check.unsealed.is_set() else (),
        )  # fmt: skip
        answer = await self._transport.call(member, "reveal", pack(reveal), deadline_s=check.limit_s)
        told = unpack_answer(member, answer.header, Revealed)
        check.unseal(member, told.nonces)
        for other, said in told.said.items() if check.unsealed.is_set() else ():
            if other in check.lacking():
                check.hear(other, said, by=member)

    async def _compare(self, check: SumCheck, reduced: torch.Tensor) -> None:
        """Return if `reduced` fits all products, which were heard."""
        self._told_t = check.t
        pulse(self._told)
        for place, index in await asyncio.to_thread(check.doubtful, reduced):
            check.unchecked = None
            if await self._dispute(check, reduced, place, index):
                owner = check.plan.members[place]
                raise Refused(f"the part of {owner} is not the sum of what its members say that they sent")
        toss = Toss("spot check", self._stage, check.t, check.plan.round)
        coin = Coin(self._transport.signer, self._run.id, toss)
        if coin.falls(SPOT_CHECKS) and await self._spot_check(check, reduced, coin):
            raise Refused("a chunk is not the sum of what its members sent")
        if self.consider is not None:
            await self.consider(check)
        check.unchecked = None

    async def _spot_check(self, check: SumCheck, reduced: torch.Tensor, coin: Coin) -> bool:
        """Compute any chunk again; whether a peer was shown to lie."""
        try:
            return await self._dispute(check, reduced, *any_chunk(check.parts, coin))
        except BadAnswer:
            raise
        except PeerFault:
            return False  # of a member that is gone nothing is needed: the result fits

    async def _project(self, check: SumCheck, reduced: torch.Tensor, gave_all: Callable[[], None]) -> None:
        """Say this member's products once all nonces are here."""
        await check.unsealed.wait()
        told = await asyncio.to_thread(check.project, check.known_nonces())
        if not check.projected.done():
            check.unchecked = reduced
            gave_all()
            check.note(self._transport.peer_id, told)
            check.projected.set_result(None)

    async def _serve_reveal(self, request: Request) -> Answer:
        reveal = unpack(request.header, Reveal, self._run.id)
        if reveal.round not in self._checks:
            await happens(self._opened, OPENS_S)
        check = self._checks.get(reveal.round)
        if check is None or request.peer not in check.plan.members:
            raise NotReady(f"round {reveal.round[:8]!r} is not open here", version=-1)
        check.unseal(request.peer, reveal.nonces)
        await asyncio.wait([check.projected], timeout=HOLDS_S)
        if check.projected.done():
            check.projected.result()  # or it is void here
        said, room = dict[PeerId, Projecting](), MAX_SHOWN_BYTES
        for member in (self._transport.peer_id, *reveal.lacking):
            told = check.told_of(member)
            if told is not None and (room := room - len(pack(told))) >= 0:
                said[member] = told
        return Answer(pack(Revealed(nonces=check.known_nonces(), said=said)))

    # -- disputes -----------------------------------------------------------------------------------

    async def _dispute(self, check: SumCheck, reduced: torch.Tensor, place: int, index: int) -> bool:
        """Compute a chunk again; whether a peer was shown to lie. If none, the result is right.

        Raises:
            PeerFault: a member does not show what it sent, or an owner did not sign it.
        """
        start, numel = check.parts[place][index]
        came = await asyncio.to_thread(chunk_digest, reduced[start : start + numel])
        if came != nth_digest(check.reduced[place][0].chunks, index):
            raise BadAnswer(check.plan.members[place], "sent a result that it did not sign")
        shown = [await self.shown(check, member, place, index) for member in range(len(check.plan.members))]
        # All that may be wrong with it, the owner's result first.
        reduced_as, signature = check.reduced[place]
        wrong_sum = WrongSum(
            accused=check.plan.members[place], statement=reduced_as, signature=signature, index=index,
            lists=tuple(digests for digests, _ in shown),
        )  # fmt: skip
        whole = [buffer for _, body in shown for buffer in body]
        accusations: list[tuple[Evidence, list[Buffer]]] = [(wrong_sum, whole)]
        for member, (digests, body) in enumerate(shown):
            projected, signature = check.product_of(member)
            wrong_product = WrongProduct(
                accused=check.plan.members[member], statement=projected, signature=signature,
                place=place, index=index, digests=digests,
            )  # fmt: skip
            accusations.append((wrong_product, body))
        for evidence, body in accusations:
            if await asyncio.to_thread(proves, self._transport.signer, self._run, evidence, body):
                self._convictions.found(evidence, body)
                return True
        return False

    async def shown(self, check: SumCheck, member: int, place: int, index: int) -> tuple[bytes, list[Buffer]]:
        """What a member contributed to a chunk: the digests of all chunks of that part, and the bytes."""
        name, said = check.plan.members[member], check.reduced[place][0].contributions[member]
        numel = check.parts[place][index][1]
        if name == self._transport.peer_id:
            digests, body = self._show(check, place, index)
        else:
            ask = ShowChunk(run=self._run.id, round=check.plan.round, place=place, index=index)
            answer = await self._transport.call(
                name, "show", pack(ask), max_answer_bytes=8 * numel, deadline_s=min(SHOW_S, check.limit_s)
            )
            digests, body = unpack_answer(name, answer.header, ShownChunk).digests, list(answer.body)
        chunk = numbers(body[0]) if len(body) == 1 else None
        fits = not digests and not body
        if check.contributes(member):
            fits = chunk is not None and len(chunk) == numel
            fits = fits and chunk_digest(chunk) == nth_digest(digests, index)
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

    def _accuse_forger(self, check: SumCheck, place: int) -> PeerFault:
        """This member did not sign the contribution that an owner names as its own."""
        (reduced, signature), owner = check.reduced[place], check.plan.members[place]
        me = check.plan.members.index(self._transport.peer_id)
        evidence = FalseContribution(accused=owner, statement=reduced, signature=signature, place=me)
        if proves(self._transport.signer, self._run, evidence, []):
            self._convictions.found(evidence, [])
        return BadAnswer(owner, "names a contribution that this peer did not send")
