"""Signed results, and what proves a commit: no single peer's word makes a run take a step. Pure.

Each replica signs the result that it holds, with its squared norm, and a commit carries such statements of
two replicas of each stage, or of the only one: docs/design.md, *The path of a step*. Only runs that name
trainers or founders sign: in others all words count alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence, Set

from msgspec.structs import replace

from swarm.errors import Refused, short
from swarm.floats import total_of
from swarm.ids import Generation, PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.ledger import forget_before
from swarm.protocol.messages import ReplicaReport, StageSummary
from swarm.protocol.rounds import PROOFS, Commit, FetchResult, Prepared, Proof
from swarm.protocol.statements import Signer, Statement, is_signed, sign
from swarm.protocol.voice import Electorate, heard, median, voice_of, weight
from swarm.records import PeerRecord, Voucher

KEPT_STEPS = 2


class HoldsResult(Statement, frozen=True, array_like=True):
    """That the signer holds the complete sum of a stage and step, which has this norm."""

    generation: Generation
    stage: Stage
    t: int
    round: str
    sqnorm: float
    digest: str


def _statement(generation: Generation, stage: Stage, t: int, prepared: Prepared) -> HoldsResult:
    return HoldsResult(generation, stage, t, prepared.round, prepared.sqnorm, prepared.digest)


def signed_report(report: ReplicaReport, signer: Signer, voucher: Voucher | None) -> ReplicaReport:
    """A report whose results carry the replica's signature, and what gives it voice."""

    def signed(t: int, prepared: Prepared) -> Prepared:
        statement = _statement(report.generation, report.stage, t, prepared)
        return replace(prepared, signature=sign(signer, report.run, statement), voucher=voucher)

    steps = (
        replace(step, prepared=signed(step.t, step.prepared)) if step.prepared is not None else step
        for step in report.steps
    )
    return replace(report, steps=tuple(steps))


def check_signed_report(report: ReplicaReport, peer: PeerId, signer: Signer) -> None:
    """Refuse a report with a result that its peer did not sign.

    Raises:
        Refused: with the peer, stage and step.
    """
    for step in report.steps:
        if step.prepared is not None:
            _check_signed(signer, report.run, report.generation, report.stage, step.t, peer, step.prepared)


def _check_signed(
    signer: Signer, run: str, generation: Generation, stage: Stage, t: int, peer: PeerId, prepared: Prepared
) -> None:
    statement = _statement(generation, stage, t, prepared)
    if not is_signed(signer, peer, run, statement, prepared.signature):
        raise Refused(f"peer {short(peer)} did not sign its result of step {t} of stage {stage}")


class Belief:
    """What a replica of `stage` believes of results and commits, from what it sees of the directory."""

    def __init__(self, run: Run, stage: Stage, signer: Signer) -> None:
        self._run, self._stage, self._signer = run, stage, signer
        self._electorate = Electorate(run, signer)
        self.needs_proof = run.admission.named
        """Else all words count alike."""
        self._peers: Mapping[Stage, Sequence[PeerRecord]] = {}
        self._version = 0
        self._excused: dict[int, set[PeerId]] = {}
        self._idle: dict[int, set[PeerId]] = {}
        """Those of them that are there, and could take part in the step, when they were asked last."""
        self._served: dict[int, set[tuple[Stage, PeerId]]] = {}
        """By step whose result this replica holds: the peers that served each stage when it had that, or
        the one before. The step was done without those that came later."""
        self._served_last = set[tuple[Stage, PeerId]]()
        """When this replica last had a result."""
        self.lacking: dict[int, tuple[PeerId, ...]] = {}
        """The peers whose word was lacking, by step, since this was last emptied."""

    def observe(self, peers: Mapping[Stage, Sequence[PeerRecord]], version: int) -> None:
        """Take in what the directory says, and this replica's version."""
        self._peers, self._version = peers, version

    def voice(self, stage: Stage) -> Mapping[PeerId, int]:
        """The peers with voice in a stage, and how much."""
        if not self.needs_proof:
            return {}
        return self._electorate.of(stage, self._peers.get(stage, ()), version=self._version)

    def holds(self, steps: Iterable[int]) -> set[int]:
        """Note of which steps this replica holds the result; returns those that are new. Peers that had
        nothing of them were perhaps asked before there was anything: they are asked again.
        """
        held = set(steps)
        new = held - self._served.keys()
        self._served = {t: served for t, served in self._served.items() if t in held}
        for t in new:
            self._excused.pop(t, None)
            served = {(stage, peer) for stage in self._peers for peer in self._serving(stage)}
            self._served[t], self._served_last = served | self._served_last, served
        return new

    def _serving(self, stage: Stage) -> list[PeerId]:
        return [record.peer for record in self._peers.get(stage, ()) if record.state == "serving"]

    def past(self, version: int, *, number: int) -> set[PeerId]:
        """One peer, or none, that says it is past a version, those with voice first; another by each number.
        It knows the commits up to there, which a run coordinator that came since does perhaps not believe.
        """
        there, voice = self._others()
        counting = sorted(heard([r.peer for r in there if r.version > version], voice))
        return {counting[number % len(counting)]} if counting else set()

    def borne_out(self) -> int:
        """The furthest version that most of the others of some stage, by voice, say that they have."""
        said = [0]
        for stage, records in self._peers.items():
            at = {record.peer: record.version for record in records if record.state == "serving"}
            at |= {self._signer.peer_id: self._version} if stage == self._stage else {}
            if counted := heard(at, voice := self.voice(stage)):
                said.append(median([(at[peer], peer) for peer in counted], voice, high=False))
        return max(said)

    def is_passed(self, version: int) -> bool:
        """Whether most of the others, by voice, say that they are past a version, and half of those of this
        stage, which may hold back a step that all others have taken.
        """
        there, voice = self._others()

        def share(records: Sequence[PeerRecord]) -> float:
            at = {record.peer: record.version for record in records}
            weights = {peer: weight(peer, voice) for peer in heard(at, voice)}
            past = sum(weights[peer] for peer in weights if at[peer] > version)
            return past / sum(weights.values()) if past else 0.0

        return share(there) > 0.5 and share([one for one in there if one.stage == self._stage]) >= 0.5

    def _others(self) -> tuple[list[PeerRecord], dict[PeerId, int]]:
        """All others that serve, of any stage, and the voice of each."""
        there = [r for records in self._peers.values() for r in records if r.state == "serving"]
        voice = {peer: said for stage in self._peers for peer, said in self.voice(stage).items()}
        return [r for r in there if r.peer != self._signer.peer_id], voice

    def excuse(self, t: int, peers: Iterable[PeerId], idle: Set[PeerId], able: Set[PeerId]) -> None:
        """Do without the word of peers on step `t`: they are away, not that far, or have nothing of it. Not
        without that of those that are `able`, which have something.

        `idle`: of those that were asked, the ones that are there, and that far. Two of a stage are not
        done without: else one that coordinates, and has them retract all, takes the step alone.
        """
        self._excused[t] = self._excused.get(t, set()).union(peers) - able
        self._idle[t] = self._idle.get(t, set()).difference(peers, able) | idle
        forget_before(t - KEPT_STEPS, self._excused, self._idle)

    def goes_without_again(self) -> bool:
        """Whether the word is lacking of those only that the last `KEPT_STEPS` steps were done without, and
        they have not been asked of this step: one that was a moment behind is not done without again.
        """
        return any(
            t not in self._excused
            and all(self._excused.get(t - ago, set()).issuperset(peers) for ago in range(1, KEPT_STEPS + 1))
            for t, peers in self.lacking.items()
        )

    def commit(
        self, commit: Commit, generation: Generation, mine: Prepared | None, *, is_told: bool = True
    ) -> bool:
        """Whether a commit is proven. `mine`: the result that this replica holds of its step. `is_told`: some
        have perhaps taken the step by it; else this replica finds it, and by what is true now.
        """
        try:
            self.check_commit(commit, generation, mine)
            own = is_told and mine is not None and proves(commit, self._stage, mine)
            served = self._served.get(commit.t) if is_told else None
            lacking = list[PeerId]()
            for stage, proofs in enumerate(commit.proofs):
                of_own = own and stage == self._stage
                lacking += self._silent(proofs, stage, commit.t, own=of_own, served=served)
            if not is_told:
                if self._took_back(commit.proofs[self._stage], mine):
                    return False
                for stage, proofs in enumerate(commit.proofs):
                    lacking += self._coming(proofs, stage, commit.t)
        except Refused:
            return False
        if lacking:
            self.lacking[commit.t] = tuple(lacking)
        return not lacking

    def result(self, fetch: FetchResult, generation: Generation, t: int) -> bool:
        """Whether a result that this replica did not find itself is what its stage found: two peers say so,
        or the only one whose word counts.
        """
        try:
            self._norm(fetch.proofs, generation, self._stage, t)
            silent = self._silent(fetch.proofs, self._stage, t, excused=set())
            return fetch.proofs[0].prepared.round == fetch.round and not silent
        except Refused:
            return False

    def ready(self, summary: StageSummary, since: int) -> int:
        """The last step, from `since` on, for which a summary proves that its stage is ready; -1: none."""
        proven = [-1]
        for step in summary.steps:
            with contextlib.suppress(Refused):
                self._norm(step.proofs, summary.generation, summary.stage, step.t)
                if step.ready and step.t >= since and not self._silent(step.proofs, summary.stage, step.t):
                    proven.append(step.t)
        return max(proven)

    def check_commit(self, commit: Commit, generation: Generation, mine: Prepared | None) -> None:
        """Check the signatures and norms of a commit. Raises Refused: what proves it is false."""
        t = commit.t
        if len(commit.proofs) != self._run.S:
            raise Refused(f"the commit of step {t} has proofs of {len(commit.proofs)} stages")
        norms = [self._norm(proofs, generation, stage, t) for stage, proofs in enumerate(commit.proofs)]
        peers = [proof.peer for proofs in commit.proofs for proof in proofs]
        if len(set(peers)) < len(peers):
            raise Refused(f"the commit of step {t} has proofs of one peer twice: it serves one stage")
        if mine is not None and mine.sqnorm != norms[self._stage]:
            said = f"stage {self._stage} has the squared norm {norms[self._stage]}"
            raise Refused(f"the commit of step {t}: {said}; this replica's result has {mine.sqnorm}")
        if (total := total_of(norms)) != commit.total_sqnorm:
            said = commit.total_sqnorm
            raise Refused(f"the commit of step {t} has the norm {said}; its proofs add up to {total}")

    def _norm(self, proofs: Sequence[Proof], generation: Generation, stage: Stage, t: int) -> float:
        """The squared norm of a stage that all of its proofs state."""
        if not 1 <= len(proofs) <= PROOFS or len({proof.peer for proof in proofs}) < len(proofs):
            raise Refused(f"{len(proofs)} proofs of stage {stage} in the commit of step {t}")
        first = proofs[0].prepared
        for proof in proofs:
            _check_signed(self._signer, self._run.id, generation, stage, t, proof.peer, proof.prepared)
            if proof.prepared.content != first.content:
                raise Refused(f"the proofs of stage {stage} in the commit of step {t} are not of one result")
        return first.sqnorm

    def _silent(
        self, proofs: Sequence[Proof], stage: Stage, t: int, excused: Set[PeerId] | None = None, *,
        own: bool = False, served: Set[tuple[Stage, PeerId]] | None = None,
    ) -> list[PeerId]:  # fmt: skip
        """The peers of a stage whose word is lacking: none, if enough have given theirs. `excused`: whose is
        not; None: this replica's, and that of those without which commits are believed. `own`: this replica,
        of that stage, has found the same. `served`: peers that could have been heard; None: those of now.

        Raises:
            Refused: no peer did whose word counts.
        """
        if own and self._signer.peer_id in [proof.peer for proof in proofs]:
            return []  # what this replica holds, and said, it need not hear from others
        voice, there = self.voice(stage), self._serving(stage)
        counting = [p for p in proofs if voice.get(p.peer) or self._vouched(p, t)]
        if not counting and not (own and self._signer.peer_id in voice):
            if served is not None:
                there = [peer for peer in there if (stage, peer) in served]
            if any(peer in voice for peer in there):
                what = f"the norm of stage {stage} in the commit of step {t}"
                raise Refused(f"no peer with voice proves {what}")
        if len((voice and counting) or proofs) >= PROOFS:  # a voucher that is new gives no voice yet
            return []
        if excused is None:
            idle = [peer for peer in heard(there, voice) if peer in self._idle.get(t, ())]
            away = self._excused.get(t, set()).difference(idle if len(idle) >= PROOFS else ())
            excused = away | {self._signer.peer_id}
        by = {proof.peer for proof in proofs}  # perhaps one with voice that leaves: then no stranger lacks
        return [peer for peer in heard([*there, *by], voice) if peer not in by | excused]

    def _took_back(self, proofs: Sequence[Proof], mine: Prepared | None) -> bool:
        """Whether this replica has given up the result of its stage that it once said it has: a summary of
        when it still coordinated may have its word.
        """
        said = [proof.prepared.content for proof in proofs if proof.peer == self._signer.peer_id]
        return bool(said) and (mine is None or mine.content not in said)

    def _coming(self, proofs: Sequence[Proof], stage: Stage, t: int) -> list[PeerId]:
        """The peers with voice of a stage of which none proves its norm that perhaps serve by now: others may
        have seen them before they had their own results.
        """
        voice = self.voice(stage)
        if any(voice.get(proof.peer) or self._vouched(proof, t) for proof in proofs):
            return []
        done_without = self._excused.get(t, set()) | {self._signer.peer_id}
        coming = (r.peer for r in self._peers.get(stage, ()) if r.state in ("joining", "paused"))
        return [peer for peer in coming if peer in voice and peer not in done_without]

    def _vouched(self, proof: Proof, t: int) -> bool:
        return voice_of(proof.peer, proof.prepared.voucher, self._run, self._signer, version=t) > 0


def proves(commit: Commit, stage: Stage, held: Prepared) -> bool:
    """Whether a gradient is the one that a commit is about; commits without proofs are about any."""
    return not commit.proofs or commit.proofs[stage][0].prepared.digest == held.digest
