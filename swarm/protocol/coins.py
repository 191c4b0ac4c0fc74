"""Private chance: no other peer can foresee it, and the same peer has it again when all is played again.

A number follows from a signature (Ed25519's are functions of key and text) that is never shown.
"""

from __future__ import annotations

import hashlib

from swarm.ids import Stage
from swarm.protocol.statements import Signer, Statement, sign

_RANGE = 1 << 256


class Toss(Statement, frozen=True, array_like=True):
    """What is decided by chance."""

    purpose: str
    stage: Stage
    t: int
    what: str


class Coin:
    """The number of one toss, uniform, private to the signer. 0.1 ms."""

    def __init__(self, signer: Signer, run: str, toss: Toss) -> None:
        self._number = int.from_bytes(hashlib.sha256(sign(signer, run, toss)).digest(), "big")

    def falls(self, share: float) -> bool:
        """Whether this is one of a share of all tosses."""
        return self._number < share * _RANGE

    def below(self, count: int) -> int:
        """A whole number, at least 0; any is as likely, also among those for which `falls` holds."""
        return int.from_bytes(hashlib.sha256(self._number.to_bytes(32, "big")).digest(), "big") % count
