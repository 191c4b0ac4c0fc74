"""What counts, once each: the microbatches of one step that are in one peer's gradient sum.

Pure: no clock, no tensors. A ledger is a bitmap with three rules (invariant I1):

- a microbatch is claimed before it is computed, and a second claim is told so;
- it enters the sum at most once, and never while the sum is frozen for a reduce;
- a sum that cannot be trusted any more is dropped together with its ledger.

Bitmaps are Python integers: bit `m` stands for microbatch `(t, m)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from swarm.errors import Refused


class Claim(Enum):
    """What to do with a request for `(t, m)`."""

    NEW = "new"
    """Nobody here has it: compute it."""
    DOING = "doing"
    """Being computed here: wait for that answer."""
    DONE = "done"
    """In the sum: answer from memory, add nothing."""


class Ledger:
    """The microbatches of step `t` that this peer has in its sum, or is computing."""

    def __init__(self, t: int, microbatches: int) -> None:
        self.t = t
        self.microbatches = microbatches
        self.done = 0
        self.doing = 0
        self.fixed = 0
        """Of `done`, what was taken over from a member that left: it cannot be subtracted again."""
        self.frozen_for: str | None = None
        """Id of the reduce round that the sum is promised to."""

    def claim(self, m: int) -> Claim:
        """Ask to compute `m`; the caller computes it only on `NEW`."""
        self._check(m)
        if self.done >> m & 1:
            return Claim.DONE
        if self.doing >> m & 1:
            return Claim.DOING
        self.doing |= 1 << m
        return Claim.NEW

    def release(self, m: int) -> None:
        """The computation of `m` ended, whether or not it entered the sum."""
        self.doing &= ~(1 << m)

    def may_add(self, m: int) -> bool:
        """Whether the weight gradient of `m` may be added to the sum now."""
        return self.frozen_for is None and not self.done >> m & 1

    def record(self, m: int) -> None:
        """The weight gradient of `m` is in the sum."""
        assert self.may_add(m), f"microbatch {m} of step {self.t} would count twice"
        self.done |= 1 << m

    def take_over(self, done: int) -> None:
        """The sum of another member was added to this one, with all that its ledger held."""
        assert self.frozen_for is None and not self.done & done, "a microbatch would count twice"
        self.done |= done
        self.fixed |= done

    def remove(self, m: int) -> None:
        """The weight gradient of `m` was subtracted from the sum again."""
        assert self.frozen_for is None and (self.done & ~self.fixed) >> m & 1
        self.done &= ~(1 << m)

    def freeze(self, round_id: str) -> None:
        """Promise the sum as it is to a reduce round."""
        self.frozen_for = round_id

    def thaw(self) -> None:
        """The round is void: the sum is open again."""
        self.frozen_for = None

    def clear(self) -> None:
        """The sum was dropped; whatever was in it has to be computed again."""
        self.done = self.fixed = 0
        self.frozen_for = None

    def _check(self, m: int) -> None:
        if not 0 <= m < self.microbatches:
            raise ValueError(f"microbatch {m} is not in 0 … {self.microbatches - 1}")


def everything(microbatches: int) -> int:
    """The bitmap of a complete step."""
    return (1 << microbatches) - 1


def members_of(bitmap: int) -> Iterator[int]:
    """The microbatches in a bitmap, ascending."""
    while bitmap:
        low = bitmap & -bitmap
        yield low.bit_length() - 1
        bitmap ^= low


def to_bytes(bitmap: int, microbatches: int) -> bytes:
    """Little-endian wire form, ceil(M / 8) bytes."""
    return bitmap.to_bytes((microbatches + 7) // 8, "little")


def from_bytes(data: bytes, microbatches: int) -> int:
    """The bitmap in `data`.

    Raises:
        ValueError: wrong length, or a bit beyond M.
    """
    due = (microbatches + 7) // 8
    if len(data) != due:
        raise ValueError(f"a ledger of {microbatches} microbatches has {due} bytes, not {len(data)}")
    bitmap = int.from_bytes(data, "little")
    if bitmap > everything(microbatches):
        raise ValueError(f"the ledger names a microbatch beyond {microbatches - 1}")
    return bitmap


def read_bitmap(data: bytes, microbatches: int) -> int:
    """The bitmap in what a peer sent.

    Raises:
        Refused: not as many bits as the step has microbatches.
    """
    try:
        return from_bytes(data, microbatches)
    except ValueError as error:
        raise Refused(str(error)) from None
