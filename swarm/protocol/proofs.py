"""Signed results, and what proves a commit: no single peer's word makes a run take a step. Pure.

Each replica signs the result that it holds, with its squared norm. A commit carries, for each stage, such
statements of two replicas, or of the only one that there is. Every replica checks them before it takes the
step: otherwise one peer that coordinates could end all others with an infinite norm, or make their steps
vanish with a huge one. Only runs that name trainers or founders sign: in others all words count alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from swarm.errors import Refused, short
from swarm.ids import Generation, PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.messages import ReplicaReport
from swarm.protocol.rounds import PROOFS, Commit, Prepared, Proof
from swarm.protocol.statements import Signer, Statement, is_signed, sign
from swarm.protocol.voice import heard, voice_of
from swarm.records import Voucher

ALIKE = 1e-6
"""Relative difference of two norms of one result: hosts add in another order."""


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


class CommitCheck:
    """Whether commits are proven, as one replica of `stage` sees it."""

    def __init__(self, run: Run, stage: Stage, signer: Signer) -> None:
        self._run, self._stage, self._signer = run, stage, signer
        self.needed = bool(run.admission.trainers or run.admission.founders)
        """Else commits need no proof."""
        self._excused: dict[int, set[PeerId]] = {}

    def excuse(self, t: int, peers: Iterable[PeerId]) -> None:
        """Note the peers that cannot say anything about step `t`: they are away, or not that far."""
        self._excused.setdefault(t, set()).update(peers)
        for old in [old for old in self._excused if old < t - PROOFS]:
            del self._excused[old]

    def lacking(
        self,
        commit: Commit,
        generation: Generation,
        there: Mapping[Stage, Mapping[PeerId, int]],
        mine: Prepared | None,
    ) -> list[PeerId]:
        """The peers whose word a commit lacks; of none if it is proven.

        `there`: the peers that serve each stage, with their voice; `mine`: the result of this replica.

        Raises:
            Refused: what proves it is false.
        """
        t, lacking, total = commit.t, list[PeerId](), 0.0
        if len(commit.proofs) != self._run.S:
            raise Refused(f"the commit of step {t} has proofs of {len(commit.proofs)} stages")
        for stage, proofs in enumerate(commit.proofs):
            total += self._norm(proofs, generation, stage, t, mine if stage == self._stage else None)
            said = {proof.peer for proof in proofs}
            serving = there.get(stage, {})
            others = [peer for peer in heard(serving, serving) if peer not in said]
            voiced = [p for p in proofs if serving.get(p.peer) or self._vouched(p, t)]
            counting = voiced or ([] if any(serving.values()) else proofs)
            unheard = [peer for peer in others if peer not in self._excused.get(t, ())]
            if not counting:
                raise Refused(
                    f"no peer with voice proves the norm of stage {stage} in the commit of step {t}"
                )
            if len(counting) < PROOFS:
                lacking += unheard
        if total != commit.total_sqnorm and not (math.isnan(total) and math.isnan(commit.total_sqnorm)):
            raise Refused(
                f"the commit of step {t} has the norm {commit.total_sqnorm}; its proofs add up to {total}"
            )
        return lacking

    def _norm(
        self, proofs: Sequence[Proof], generation: Generation, stage: Stage, t: int, mine: Prepared | None
    ) -> float:
        """The squared norm of a stage that all of its proofs state."""
        if not 1 <= len(proofs) <= PROOFS or len({proof.peer for proof in proofs}) < len(proofs):
            raise Refused(f"{len(proofs)} proofs of stage {stage} in the commit of step {t}")
        first = proofs[0].prepared
        for proof in proofs:
            _check_signed(self._signer, self._run.id, generation, stage, t, proof.peer, proof.prepared)
            if proof.prepared.round != first.round or not _alike(proof.prepared.sqnorm, first.sqnorm):
                raise Refused(f"the proofs of stage {stage} in the commit of step {t} are not of one result")
        if mine is not None and not _alike(mine.sqnorm, first.sqnorm):
            raise Refused(
                f"the commit of step {t} says that stage {stage} has the squared norm {first.sqnorm}; "
                f"this replica's result has {mine.sqnorm}"
            )
        return first.sqnorm

    def _vouched(self, proof: Proof, t: int) -> bool:
        voucher = proof.prepared.voucher
        return voice_of(proof.peer, voucher, self._run, self._signer, version=t) > 0


def _alike(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=ALIKE)
