"""Voice: whose word counts in a stage. Pure.

Identities cost nothing, so a peer's word counts by the work that it has done: by the *voucher* that it
carries in its record, a signed statement of a trainer that the manifest admits. Founders have voice from the
start, before the first vouchers they alone; in a run that names neither trainers nor founders all peers have
it. What voice decides, and how work is counted: docs/design.md, *Work that is counted*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from swarm.ids import Microbatch, PeerId, Position, Stage
from swarm.manifest import Run
from swarm.protocol.ledger import Bitmap
from swarm.protocol.statements import Signer, Statement, is_signed, sign
from swarm.records import PeerRecord, Voucher

RANK_STEPS = 20
"""Voice is compared in whole multiples of it where a lead of a few steps is to move nothing."""
FOUNDERS_VOICE = RANK_STEPS
MIN_STEPS = 10
"""Steps in which a peer answered before it has voice. Half of those between two vouchers: of a stage that was
there from the start no replica has voice before the others, which missed a step or two."""
MIN_MICROBATCHES = 25
"""That it answered in them."""
MAX_STEPS = 100
"""More count no more: a peer that came later has as much voice in the end."""
RENEW_EVERY = 20
"""Steps of the run. All peers get their vouchers then, so that those of a stage change together."""
KNOWN_AFTER_STEPS = 10
"""A voucher counts from so many steps later on, and until then the one before it: by then all have seen it,
and turn to another coordinator in the same step. Where each did so when it saw one, both had half of the
reports: most of a step was computed again, and once a run stood still for 35 s."""
VALID_STEPS = 200
"""A voucher counts for so many steps. A peer that is found lying, or stops working, gets no other."""
T = TypeVar("T", Position, int, float)


class Worked(Statement, frozen=True, array_like=True):
    """That `peer` answered in `steps` steps, the last of them `t`; the voucher before said `before`."""

    peer: PeerId
    steps: int
    t: int
    before: int = 0


def vouch(signer: Signer, run: str, worked: Worked) -> Voucher:
    return Voucher(signer.peer_id, worked.steps, worked.t, sign(signer, run, worked), worked.before)


def voice_of(peer: PeerId, voucher: Voucher | None, run: Run, signer: Signer, *, version: int) -> int:
    """How much the word of a peer counts: steps of work, at most `MAX_STEPS`; 0: not at all.

    `version`: where the run is, as far as the reader knows.
    """
    if voucher is None or voucher.trainer not in run.admission.trainers:
        return 0
    if voucher.steps < MIN_STEPS or version - voucher.t > VALID_STEPS:
        return 0
    worked = Worked(peer, voucher.steps, voucher.t, voucher.before)
    if not is_signed(signer, voucher.trainer, run.id, worked, voucher.signature):
        return 0
    return min(voucher.steps, MAX_STEPS)


def voices(run: Run, records: Iterable[PeerRecord], signer: Signer, *, version: int) -> dict[PeerId, int]:
    """The peers of a stage that have voice, and how much: founders, and those with a voucher.

    Empty: none has it, and the word of each counts alike. `records`: of the stage. A newcomer knows of no
    `version`, but trainers have been at least where they last vouched.
    """
    there = list(records)
    found = {
        r.peer: (r.voucher.t, min(voice, r.voucher.before) if _is_new(r.voucher, version) else voice)
        for r in there
        if r.voucher and (voice := voice_of(r.peer, r.voucher, run, signer, version=version))
    }
    newest = max((t for t, _ in found.values()), default=0)
    founders = {r.peer: FOUNDERS_VOICE for r in there if r.peer in run.admission.founders}
    vouched = {peer: steps for peer, (t, steps) in found.items() if steps and newest - t <= VALID_STEPS}
    return founders | {peer: max(steps, founders.get(peer, 0)) for peer, steps in vouched.items()}


def _is_new(voucher: Voucher, version: int) -> bool:
    """Whether some may not have seen a voucher yet. A reader before its last step has no idea of the time."""
    given = (voucher.t + RENEW_EVERY // 2) // RENEW_EVERY * RENEW_EVERY
    return voucher.t <= version < given + KNOWN_AFTER_STEPS


def heard(peers: Iterable[PeerId], voice: Mapping[PeerId, int]) -> list[PeerId]:
    """The peers whose word counts, of those that say something: all of them if none has voice."""
    said = list(peers)
    counted = [peer for peer in said if voice.get(peer)] if voice else []
    return counted or said


def weight(peer: PeerId, voice: Mapping[PeerId, int]) -> int:
    """How much a word of a peer that is heard counts."""
    return voice.get(peer, 1)


def median(said: Sequence[tuple[T, PeerId]], voice: Mapping[PeerId, int], *, high: bool) -> T:
    """The median of what peers say, each by its voice; of two the higher one, or the lower one."""
    ordered = sorted(said)
    half = sum(weight(peer, voice) for _, peer in ordered) / 2
    so_far = 0
    for value, peer in ordered:
        so_far += weight(peer, voice)
        if so_far > half or (so_far == half and not high):
            return value
    raise AssertionError("nothing was said")


class Electorate:
    """The peers with voice in each stage, remembered as long as its records are the same."""

    def __init__(self, run: Run, signer: Signer) -> None:
        self._run, self._signer = run, signer
        self._known: dict[Stage, tuple[Sequence[PeerRecord], int, dict[PeerId, int]]] = {}

    def of(self, stage: Stage, records: Sequence[PeerRecord], *, version: int) -> dict[PeerId, int]:
        """The peers with voice in a stage that has these records; see `voices`."""
        if not self._run.admission.named:
            return {}
        known = self._known.get(stage)
        if known is None or known[0] is not records or known[1] != version:
            found = voices(self._run, records, self._signer, version=version)
            known = self._known[stage] = (records, version, found)
        return known[2]


@dataclass(slots=True)
class _Work:
    steps: int = 0
    microbatches: int = 0
    stage: Stage = 0
    """At which it answered last."""
    newest: int = -1
    """The last step that counts."""
    of_newest: int = 0
    """Bitmap of its microbatches."""
    vouched: int = -1
    """`newest` of the last voucher."""
    said: int = 0
    """Its steps."""


class WorkCount:
    """The steps and microbatches that peers answered, as a trainer counts them for its vouchers.

    Steps count by their numbers, upwards, so no peer has more than there are. A voucher that says more steps
    than were counted takes the place of the count: docs/design.md, *Work that is counted*.
    """

    def __init__(self) -> None:
        self._of: dict[PeerId, _Work] = {}

    def wants(self, peer: PeerId, mb: Microbatch) -> bool:
        """Whether an answer to `mb` changes what `peer` gets: others need not be looked at."""
        work = self._of.get(peer)
        if work is None or mb.t > work.newest:
            return True
        few = work.microbatches < MIN_MICROBATCHES
        return few and mb.t == work.newest and not work.of_newest >> mb.m & 1

    def answered(self, peer: PeerId, mb: Microbatch, stage: Stage = 0) -> None:
        """Count an answer of a stage, once, however often it is told."""
        work = self._of.setdefault(peer, _Work())
        work.stage = stage
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

    def stage_of(self, peer: PeerId) -> Stage:
        """At which a peer answered what was counted last."""
        return self._of[peer].stage

    def renew(self, version: int) -> list[Worked]:
        """What to vouch for at `version`: peers with work enough that worked since the last time."""
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


class LastContributions:
    """To which steps the replicas of a stage contributed lately, as one of them saw it."""

    def __init__(self) -> None:
        self._last: dict[PeerId, int] = {}
        self._since: int | None = None
        """The first step that this replica added up."""

    def added_up(self, ledgers: Mapping[PeerId, Bitmap], t: int) -> None:
        """Note whose sums are in the result of step `t`. `ledgers`: of its round."""
        self._since = t if self._since is None else min(self._since, t)
        self._last |= {peer: t for peer, done in ledgers.items() if done}
        self._last = {peer: last for peer, last in self._last.items() if t - last <= VALID_STEPS}

    def last(self, peer: PeerId, *, version: int) -> int | None:
        """The last step that a peer contributed to, or the first known. None: nothing was added up lately."""
        if max(self._last.values(), default=-1) < version - MIN_STEPS:
            return None
        return self._last.get(peer, self._since)


def renewal(before: int, version: int) -> bool:
    """Whether vouchers are due now that the run came from one version to another."""
    return before // RENEW_EVERY < version // RENEW_EVERY
