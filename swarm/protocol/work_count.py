"""The work of peers, as a trainer counts it for its vouchers. Pure.

Steps count by their numbers, upwards: one that the run takes again after a rollback counts nothing, and an
answer to a step that is older than the newest of that peer neither. So no peer has more steps than there are.

A trainer that is new goes on from the vouchers that the peers carry: one that says more steps than it counted
itself takes the place of its count. The steps up to the voucher's last one then count no more, so also of two
trainers that both saw a step it counts once.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.ids import Microbatch, PeerId
from swarm.protocol.voice import MAX_STEPS, MIN_MICROBATCHES, MIN_STEPS, RENEW_EVERY, VALID_STEPS, Worked
from swarm.records import Voucher


@dataclass(slots=True)
class _Work:
    steps: int = 0
    microbatches: int = 0
    newest: int = -1
    """The last step that counts."""
    of_newest: int = 0
    """Bitmap of its microbatches."""
    vouched: int = -1
    """`newest` of the last voucher."""
    said: int = 0
    """Its steps."""


class WorkCount:
    """Steps and microbatches that peers answered."""

    def __init__(self) -> None:
        self._of: dict[PeerId, _Work] = {}

    def wants(self, peer: PeerId, mb: Microbatch) -> bool:
        """Whether an answer to `mb` changes what `peer` gets: others need not be looked at."""
        work = self._of.get(peer)
        if work is None or mb.t > work.newest:
            return True
        few = work.microbatches < MIN_MICROBATCHES
        return few and mb.t == work.newest and not work.of_newest >> mb.m & 1

    def answered(self, peer: PeerId, mb: Microbatch) -> None:
        """Count an answer, once, however often it is told."""
        work = self._of.setdefault(peer, _Work())
        if mb.t > work.newest:
            work.steps, work.newest, work.of_newest = work.steps + 1, mb.t, 0
        if mb.t == work.newest and not work.of_newest >> mb.m & 1:
            work.microbatches += 1
            work.of_newest |= 1 << mb.m

    def shown(self, peer: PeerId, voucher: Voucher) -> None:
        """Go on from a voucher that a trainer of the manifest gave; its signature was checked."""
        work = self._of.setdefault(peer, _Work())
        work.said = max(work.said, voucher.steps)
        if voucher.steps <= work.steps:
            return
        work.steps = min(voucher.steps, MAX_STEPS)
        work.microbatches = max(work.microbatches, MIN_MICROBATCHES)
        if voucher.t > work.newest:
            work.newest, work.of_newest = voucher.t, 0
        work.vouched = max(work.vouched, voucher.t)

    def renew(self, version: int) -> list[Worked]:
        """What to vouch for when the run is at `version`: peers with work enough that worked since the last
        time.
        """
        self._of = {peer: work for peer, work in self._of.items() if version - work.newest <= VALID_STEPS}
        due = [
            Worked(peer, min(work.steps, MAX_STEPS), work.newest, work.said)
            for peer, work in sorted(self._of.items())
            if work.steps >= MIN_STEPS
            and work.microbatches >= MIN_MICROBATCHES
            and work.newest > work.vouched
        ]
        for worked in due:
            work = self._of[worked.peer]
            work.vouched, work.said = worked.t, worked.steps
        return due


def renewal(before: int, version: int) -> bool:
    """Whether vouchers are due now that the run came from one version to another."""
    return before // RENEW_EVERY < version // RENEW_EVERY
