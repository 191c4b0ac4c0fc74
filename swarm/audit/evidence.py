"""Whether evidence proves what it says: computed again from what the accused signed, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from swarm.audit.projection import coefficients, product, reduced_of
from swarm.digest import digest_of
from swarm.manifest import Run
from swarm.protocol.statements import Signer, is_signed
from swarm.protocol.sums import contributed, nth_digest, nth_sum, seed_of
from swarm.wire.buffers import Buffer
from swarm.wire.codec import chunk_digest
from swarm.wire.evidence import (
    Evidence,
    FalseContribution,
    WrongAnswer,
    WrongContribution,
    WrongProduct,
    WrongSum,
)


def proves(signer: Signer, run: Run, evidence: Evidence, body: Sequence[Buffer]) -> bool:
    """Whether the accused lied. Takes seconds for large chunks: not on the event loop."""
    if not run.adds_exactly or not evidence.is_signed(signer, run.id):
        return False
    match evidence:
        case WrongSum():
            return _wrong_sum(evidence, body, rounded=run.rounds_sums)
        case FalseContribution():
            return _false_contribution(signer, run, evidence)
        case WrongProduct():
            return _wrong_product(evidence, body)
        case WrongAnswer() | WrongContribution():
            return False  # that takes weights


def _wrong_sum(evidence: WrongSum, body: Sequence[Buffer], *, rounded: bool) -> bool:
    said = evidence.statement
    claimed = nth_digest(said.chunks, evidence.index)
    if not claimed or len(evidence.lists) != len(said.contributions):
        return False
    parts: list[torch.Tensor] = []
    left = list(body)
    for contribution, digests in zip(said.contributions, evidence.lists, strict=True):
        if digest_of(digests) != contribution.chunks:
            return False
        if not digests:
            continue
        part = numbers(left.pop(0)) if left else None
        if part is None or chunk_digest(part) != nth_digest(digests, evidence.index):
            return False
        parts.append(part)
    if left or not parts or len({part.numel() for part in parts}) != 1:
        return False
    return chunk_digest(reduced_of(parts, rounded=rounded)) != claimed


def _false_contribution(signer: Signer, run: Run, evidence: FalseContribution) -> bool:
    said = evidence.statement
    if not 0 <= evidence.place < len(said.contributions):
        return False
    named = said.contributions[evidence.place]
    statement = contributed(said.stage, said.t, said.round, evidence.accused, named)
    return not is_signed(signer, named.member, run.id, statement, named.signature)


def _wrong_product(evidence: WrongProduct, body: Sequence[Buffer]) -> bool:
    said, place, index = evidence.statement, evidence.place, evidence.index
    if not 0 <= place < min(len(said.contributions), len(said.sums)):
        return False
    claimed = nth_sum(said.sums[place], index)
    chunk = numbers(body[0]) if len(body) == 1 else None
    if claimed is None or chunk is None or digest_of(evidence.digests) != said.contributions[place]:
        return False
    if chunk_digest(chunk) != nth_digest(evidence.digests, index):
        return False
    return product(chunk, coefficients(seed_of(said.nonces), place, index, chunk.numel())) != claimed


def numbers(buffer: Buffer) -> torch.Tensor | None:
    """The fixed-point numbers of a chunk as they travel; None if they are none."""
    view = memoryview(buffer).cast("B")
    if view.nbytes == 0 or view.nbytes % 8:
        return None
    return torch.from_numpy(np.frombuffer(view, dtype="<i8").astype(np.int64))
