"""Runs whose manifest names trainers: simulated processes whose names have the form of peer ids."""

from __future__ import annotations

from dataclasses import replace

from swarm.digest import Digest
from swarm.ids import Microbatch, PeerId, Stage
from swarm.manifest import AdmissionSpec, Run
from swarm.protocol.statements import Signer
from swarm.wire.receipts import Answered, Receipt, give_receipt


def trainer_name(letter: str) -> str:
    """An id of the right form; `letter`: one of base58."""
    return "12D3KooW" + letter * 44


TRAINER, OTHER = trainer_name("t"), trainer_name("u")


def admitting(run: Run, *trainers: str) -> Run:
    """The run, with these trainers, or the usual two."""
    return replace(run, admission=AdmissionSpec(trainers=trainers or (TRAINER, OTHER)))


def half_receipt(
    signer: Signer, run: str, stage: Stage, mb: Microbatch, inputs: Digest, outputs: Digest, to: PeerId
) -> Receipt:
    """The receipt for what a peer sends on to another, before that is answered."""
    return give_receipt(signer, run, Answered(stage, *mb, inputs, outputs, b"", b"", 0.0, to))
