"""Trails: what replicas sign of the steps that they took, so that these can be computed again afterwards.

Of each step: the digest of the stage's sum, the squared norm over all stages that it was taken with, and the
digest of the state that it left: of the weights, or of all of it where `realigns` says so. Where a digest was
not computed in time there are zeros.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from swarm.ids import PeerId, Stage
from swarm.protocol.statements import Signature, Statement
from swarm.records import Voucher

MAX_STEPS = 128
"""In one statement: its signatures and names are then a fifteenth of a transcript."""
_ROW = struct.Struct("<16sd16s")
ROW_BYTES = _ROW.size
_UNKNOWN = bytes(16)


class TookStep(NamedTuple):
    """One step. The digests are 32 hex digits, or empty."""

    sum: str
    total_sqnorm: float
    weights: str


Rows = Annotated[bytes, msgspec.Meta(max_length=MAX_STEPS * ROW_BYTES)]


class TookSteps(Statement, frozen=True, array_like=True):
    """That the signer took these steps of a stage, the first of them `start`, on a device of this kind."""

    stage: Stage
    start: int
    kind: Annotated[str, msgspec.Meta(max_length=64)]
    rows: Rows

    @property
    def end(self) -> int:
        """The version that the last of them left."""
        return self.start + len(self.rows) // ROW_BYTES


class Signed(msgspec.Struct, frozen=True, array_like=True):
    """A peer's signature of a trail, and what gave it voice."""

    peer: PeerId
    signature: Signature
    voucher: Voucher | None = None


Word: TypeAlias = tuple[TookSteps, Signed]
"""What one peer signs of steps."""


def weights_of(word: Word) -> str:
    """The digest of the state that the last of those steps left."""
    return unpack_rows(word[0].rows)[-1].weights


def pack_rows(steps: Iterable[TookStep]) -> bytes:
    """The bytes of steps: 40 of each."""
    return b"".join(
        _ROW.pack(bytes.fromhex(s.sum) or _UNKNOWN, s.total_sqnorm, bytes.fromhex(s.weights) or _UNKNOWN)
        for s in steps
    )


def unpack_rows(rows: bytes) -> list[TookStep]:
    """The steps in those bytes; a rest is left out."""
    whole = rows[: len(rows) - len(rows) % ROW_BYTES]
    return [TookStep(_hex(total), norm, _hex(weights)) for total, norm, weights in _ROW.iter_unpack(whole)]


def _hex(digest: bytes) -> str:
    return "" if digest == _UNKNOWN else digest.hex()
