"""Replicas compute again what others of their stage contributed to a step: all microbatches of one of them.

An answer that is true shows that a peer computed, not that it added; a sum that is true does not show what it
sent on, which is compared as well. Each replica believes only what it computed itself. The first to find a
lie tells the others, which look at the next contribution, and looks itself once more before it leaves the
liar out: left out sooner, it would have nothing to show to the others. Which ones to audit, and when:
docs/decisions/audits.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from peers.audit.convictions import Convictions
from peers.audit.kept import KeptWork, Shown
from peers.audit.sum_check import Chunks, SumCheck, any_chunk, chunk_digests
from peers.audit.sums import SumAudits
from peers.clock import now_s
from peers.ports import Rank, StageDevice
from peers.stage.state import StageCore
from peers.waiting import TaskKeeper, for_each, within
from swarm.audit import is_audited
from swarm.audit.answers import digest
from swarm.audit.contributions import Recount
from swarm.audit.evidence import numbers
from swarm.audit.screen import Screen
from swarm.digest import digest_of
from swarm.errors import Refused, SwarmError
from swarm.ids import Microbatch, PeerId
from swarm.protocol.ledger import members_of
from swarm.protocol.rounds import Plan
from swarm.protocol.statements import Coin, Toss
from swarm.protocol.sums import Projected
from swarm.wire.evidence import WrongContribution

SHARE = 0.005
"""Of all (replica, step) that are computed again by chance, by all auditors together."""
SHOW_S = 5.0
"""The round waits so long for the chunk that is compared."""
CHUNKS = 3
"""Of a doubted replica, one in a step, before it is no longer: devices of another kind have other bits."""
AT_ONCE = 4
"""Microbatches whose tensors are fetched at once."""


class Counted(NamedTuple):
    """What was found when the microbatches of a member were computed again."""

    bound: int
    """Of how many those count that signed what came in."""
    false: list[Microbatch]
    """Those of which something else was sent on."""
    kept_by: set[PeerId]
    """The replicas that showed them."""


async def count_again(
    kept: KeptWork, device: StageDevice, recount: Recount, members: Sequence[PeerId],
    microbatches: Sequence[Microbatch],
    saw: Callable[[Microbatch, Shown, Shown | None], None] = lambda mb, came, made: None,
) -> Counted:  # fmt: skip
    """Add microbatches as they are shown, each by the first of the `members` that keeps it, and compare what
    that one sent on.

    `saw`: told of each what came in, and what it made of that, if it is not the same to the bit.

    Raises:
        SwarmError: none shows one of them as its neighbours signed it.
    """
    false, kept_by = list[Microbatch](), set[PeerId]()

    async def again(mb: Microbatch) -> bool:
        (member, came), made = await _shown_by(kept, members, mb), None
        kept_by.add(member)
        counts = all(kept.voices.counts(*neighbour) for neighbour in kept.signed_by(member, mb, came))
        outputs = await device.run(Rank.COMPUTE, mb.t, recount.add, mb.m, came.forth, came.back, device.books)
        receipt = None if came.told.next is None else came.told.next.receipt
        if receipt is not None and digest(outputs) != receipt.inputs:
            made = await kept.of(member, mb, made=True)
            if digest(made.forth) != receipt.inputs:
                if counts:
                    raise Refused(f"it shows something else of {mb} than the next stage got")
                return False
            compared = mb.m, outputs, made.forth, came.forth
            if await device.run(Rank.COMPUTE, mb.t, recount.sent_other, *compared):
                false.append(mb)
        saw(mb, came, made)
        return counts

    return Counted(sum(await for_each(microbatches, again, AT_ONCE)), false, kept_by)


async def _shown_by(kept: KeptWork, members: Sequence[PeerId], mb: Microbatch) -> tuple[PeerId, Shown]:
    failures = list[SwarmError]()
    for member in members:
        try:
            return member, await kept.of(member, mb, made=False)
        except SwarmError as error:
            failures.append(error)
    raise failures[0]


def has_its_bits(recount: Recount, parts: Sequence[Chunks], said: Projected) -> bool:
    """Whether a sum that was made again is, to the bit, what a member signed."""
    total = recount.total()
    return tuple(digest_of(chunk_digests(total, part)) for part in parts) == said.contributions


class SignedContribution(NamedTuple):
    """What a member signed of its contribution to a step."""

    plan: Plan
    place: int
    """Of the member."""
    said: Projected
    signature: bytes

    @property
    def member(self) -> PeerId:
        return self.plan.members[self.place]

    @property
    def microbatches(self) -> list[Microbatch]:
        return [Microbatch(self.said.t, m) for m in members_of(self.plan.ledgers[self.place])]

    @property
    def accusation(self) -> WrongContribution:
        return WrongContribution(accused=self.member, statement=self.said, signature=self.signature)


class ContributionAudits:
    """This replica's part in the audits of what its stage adds."""

    def __init__(self, core: StageCore, convictions: Convictions, kept: KeptWork, sums: SumAudits) -> None:
        self._core, self._convictions, self._kept, self._sums = core, convictions, kept, sums
        self._screen = Screen()
        self._suspects: dict[PeerId, int] = {}
        """The step from which on each is looked at."""
        self._doubted: dict[PeerId, int] = {}
        """Found to lie by another replica, or by this one before; and how many more chunks are compared."""
        self._own: dict[PeerId, WrongContribution] = {}
        """What this one found, once."""
        self._tasks = TaskKeeper()
        self.audited = 0
        """Contributions that were computed again."""
        convictions.suspect = self._suspect
        if is_audited(core.run):
            sums.consider = self.consider

    def _suspect(self, peer: PeerId) -> None:
        if peer in self._own:  # the other one looks no more, and may have left it out
            self._convictions.found(self._own[peer], [])
        self._doubted[peer] = CHUNKS
        self.audit_next(peer)

    def audit_next(self, peer: PeerId) -> None:
        """Audit what `peer` contributes next."""
        self._suspects.setdefault(peer, 0)

    async def consider(self, check: SumCheck) -> None:
        """Audit a member of a round whose results fit, or none. Before the step is taken: its weights are
        copied here. Raises nothing that ends a round.
        """
        strange = self._screen.strangest(check.samples(), check.counts())
        chosen = self._choose(check, strange)
        if chosen is None or self._tasks:
            return
        place = check.plan.members.index(chosen)
        self._suspects.pop(chosen, None)
        part, index = any_chunk(check.parts, self._coin(check, f"chunk {chosen}"))
        try:
            _, body = await within(self._sums.shown(check, place, part, index), SHOW_S)
        except (SwarmError, asyncio.TimeoutError):
            self._charge(chosen, check.t)
            return
        chunk = numbers(body[0])
        assert chunk is not None  # `shown` compared its digest
        core = self._core
        try:
            compute = await core.device.run(Rank.STEP, check.t, core.compute.snapshot, check.t)
        except (SwarmError, RuntimeError):  # no memory for a copy
            return
        claim = SignedContribution(check.plan, place, *check.product_of(place))
        recount = Recount(compute, check.t, check.parts[part][index])
        self._tasks.create_task(self._audit(claim, check.parts, recount, chunk))

    def _choose(self, check: SumCheck, strange: PeerId | None) -> PeerId | None:
        others = [
            member
            for place, member in enumerate(check.plan.members)
            if member not in (self._core.me, *self._convictions.convicted) and check.contributes(place)
        ]
        suspects = [peer for peer in others if self._suspects.get(peer, check.t + 1) <= check.t]
        if suspects:
            return suspects[0]
        if strange in others:
            return strange
        share = SHARE / max(1, len(others))
        return next((peer for peer in others if self._coin(check, peer).falls(share)), None)

    def _coin(self, check: SumCheck, what: str) -> Coin:
        toss = Toss("contribution", self._core.stage, check.t, f"{check.plan.round} {what}")
        return Coin(self._core.transport.signer, self._core.run.id, toss)

    async def _audit(
        self, claim: SignedContribution, parts: Sequence[Chunks], recount: Recount, chunk: torch.Tensor
    ) -> None:
        """`chunk`: what the member contributed where the recount compares."""
        member, t, microbatches, core = claim.member, claim.said.t, claim.microbatches, self._core
        try:
            found = await count_again(self._kept, core.device, recount, [member], microbatches)
        except SwarmError:
            if core.version <= t + 1 and core.life == "serving":  # else it need not keep them any more
                self._charge(member, t)  # it is asked again in the next step, by all
                self._audit_again(claim)
            return
        self.audited += 1
        same, far = await asyncio.to_thread(
            lambda: (has_its_bits(recount, parts, claim.said), recount.is_far(chunk))
        )
        if found.false or (far and not same):
            self._found(claim)
        elif not same and self._doubted.get(member, 0):
            self._doubted[member] -= 1
            self._suspects[member] = t + 1
        elif 2 * found.bound > len(microbatches):
            self._screen.honest(member)
            self._doubted.pop(member, None)
            self._own.pop(member, None)

    def _found(self, claim: SignedContribution) -> None:
        if claim.member in self._doubted:
            self._convictions.found(claim.accusation, [])
        else:
            self._doubted[claim.member], self._own[claim.member] = CHUNKS, claim.accusation
            self._audit_again(claim)

    def _audit_again(self, claim: SignedContribution) -> None:
        """With the others, which have one round to hear of it."""
        self._suspects[claim.member] = self._core.version + 1
        self._convictions.pass_on(claim.accusation, [], to_all=False)

    def _charge(self, peer: PeerId, t: int) -> None:
        self._core.backoff.charge(peer, t=t, since_s=now_s(), now=now_s(), rounds=1)

    async def close(self) -> None:
        await self._tasks.close()
