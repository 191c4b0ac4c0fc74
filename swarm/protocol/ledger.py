"""What counts, once each: the microbatches of one step that are in one peer's gradient sum.

Pure: no clock, no tensors. A ledger is a bitmap with three rules (invariant I1):

- a microbatch is claimed before it is computed, and a second claim is told so;
- it enters the sum at most once, and never while the sum is frozen for a reduce;
- a sum that cannot be trusted any more is dropped together with its ledger.

Bitmaps are Python integers: bit `m` stands for microbatch `(t, m)`. `Bitmap` is their form in messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from enum import Enum
from functools import lru_cache, reduce
from operator import or_
from typing import Any

from swarm.errors import Refused

MAX_MICROBATCHES = 8192
"""Of a step; what a manifest allows. No bitmap in a message names one beyond."""
_BITS, _RUNS = b"\0", b"\1"


class Bitmap(int):
    """The microbatches of a step in a message: bytes on the wire, whichever form is shorter.

    After the byte 0: the bits, little-endian, without trailing zeros. After the byte 1: the lengths of the
    runs of zeros and ones, by turns, from bit 0 on, as LEB128. So of a plan with 1,000 members each ledger
    takes what it holds, and a step that no replica has begun takes 4 bytes for each stage. Nothing: no bits.
    """

    __slots__ = ()

    def packed(self) -> bytes:
        """The wire form."""
        return _packed(int(self))

    @staticmethod
    def unpacked(data: object) -> Bitmap:
        """The bitmap in a wire form: call `check_bitmap` before use.

        Raises:
            ValueError: `data` is not bytes, of no form, or names a microbatch that no step has.
        """
        if not isinstance(data, bytes):
            raise ValueError("a bitmap is bytes")
        form, rest = data[:1], data[1:]
        if form == _RUNS:
            return Bitmap(_from_runs(rest))
        if form not in (b"", _BITS):
            raise ValueError(f"a bitmap of an unknown form, {form[0]}")
        if 8 * len(rest) > MAX_MICROBATCHES:
            raise ValueError(f"a bitmap of {8 * len(rest)} microbatches; a step has up to {MAX_MICROBATCHES}")
        return Bitmap(int.from_bytes(rest, "little"))


@lru_cache(maxsize=2048)
def _packed(bitmap: int) -> bytes:
    # Kept, since a coordinator says the same plan to each of its members.
    bits = bitmap.to_bytes((bitmap.bit_length() + 7) // 8, "little")
    runs_of_ones = (bitmap & ~(bitmap << 1)).bit_count()
    if 2 * runs_of_ones >= len(bits):
        return _BITS + bits if bits else b""
    runs = _runs(bitmap)
    return _RUNS + runs if len(runs) < len(bits) else _BITS + bits


def _runs(bitmap: int) -> bytes:
    packed = bytearray()
    while bitmap:
        zeros = (bitmap & -bitmap).bit_length() - 1
        bitmap >>= zeros
        ones = (~bitmap & (bitmap + 1)).bit_length() - 1
        bitmap >>= ones
        for length in (zeros, ones):
            while length > 0x7F:
                packed.append(length & 0x7F | 0x80)
                length >>= 7
            packed.append(length)
    return bytes(packed)


def _from_runs(data: bytes) -> int:
    """Raises ValueError: an odd number of runs, an empty one within, or more than a step has."""
    lengths, length, shift = list[int](), 0, 0
    for byte in data:
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            lengths.append(length)
            length = shift = 0
        elif shift > 14:
            raise ValueError("a bitmap with an impossible run")
    if shift or len(lengths) % 2 or 0 in lengths[1:] or sum(lengths) > MAX_MICROBATCHES:
        raise ValueError(f"a bitmap whose runs are not of a step of at most {MAX_MICROBATCHES} microbatches")
    text = "".join("01"[at & 1] * length for at, length in enumerate(lengths))
    return int(text[::-1] or "0", 2)


class Claim(Enum):
    """What to do with a request for `(t, m)`."""

    NEW = "new"
    """Not here: compute it."""
    DOING = "doing"
    """In progress here: wait for that answer."""
    DONE = "done"
    """In the sum: answer from memory, add nothing."""


class Ledger:
    """The microbatches of step `t` that this peer has in its sum, or is computing."""

    def __init__(self, t: int, microbatches: int, check: Callable[[], None] = lambda: None) -> None:
        """`check` is called before `done` or `frozen_for` change; raises if they must not."""
        self.t = t
        self._may_change = check
        self.microbatches = microbatches
        self.done = 0
        self.in_progress = 0
        self.late = 0
        """The part of `in_progress` whose tensors come too slowly: a caller that can bring it sooner may."""
        self.frozen_for: str | None = None
        """Id of the reduce round that the sum is promised to."""
        self._removed = 0
        self.returned = 0
        """How many microbatches were added that had been subtracted before: no other replica has had them."""

    def claim(self, m: int) -> Claim:
        """Ask to compute `m`; the caller computes it only on `NEW`."""
        if not 0 <= m < self.microbatches:
            raise ValueError(f"microbatch {m} is not in 0 … {self.microbatches - 1}")
        if self.done >> m & 1:
            return Claim.DONE
        if self.in_progress >> m & 1:
            return Claim.DOING
        self.in_progress |= 1 << m
        return Claim.NEW

    def release(self, m: int) -> None:
        """Note that the computation of `m` ended, whether or not it entered the sum."""
        self.in_progress &= ~(1 << m)
        self.late &= ~(1 << m)

    @property
    def promised(self) -> int:
        """What this peer computes, for all that others need to do about it."""
        return self.in_progress & ~self.late

    def may_add(self, m: int) -> bool:
        """Whether the weight gradient of `m` may be added to the sum now."""
        return self.frozen_for is None and not self.done >> m & 1

    def record(self, m: int) -> None:
        """Note that the weight gradient of `m` is in the sum."""
        self._may_change()
        assert self.may_add(m), f"microbatch {m} of step {self.t} would count twice"
        self.done |= 1 << m
        self.returned += self._removed >> m & 1

    def remove(self, m: int) -> None:
        """Note that the weight gradient of `m` was subtracted from the sum again."""
        self._may_change()
        assert self.frozen_for is None and self.done >> m & 1
        self.done &= ~(1 << m)
        self._removed |= 1 << m

    def freeze(self, round_id: str) -> None:
        """Promise the sum as it is to a reduce round."""
        self._may_change()
        self.frozen_for = round_id

    def thaw(self) -> None:
        """Open the sum again: the round was aborted."""
        self._may_change()
        self.frozen_for = None

    def clear(self) -> None:
        """Note that the sum was dropped; all that was in it has to be computed again."""
        self._may_change()
        self.done = 0
        self.frozen_for = None


def everything(microbatches: int) -> int:
    """The bitmap of a complete step."""
    return (1 << microbatches) - 1


def union_of(bitmaps: Iterable[int]) -> int:
    """The microbatches in any of some bitmaps."""
    return reduce(or_, bitmaps, 0)


def members_of(bitmap: int) -> Iterator[int]:
    """The microbatches in a bitmap, ascending."""
    while bitmap:
        low = bitmap & -bitmap
        yield low.bit_length() - 1
        bitmap ^= low


def check_bitmap(bitmap: int, microbatches: int) -> None:
    """Raise Refused if a bitmap that a peer sent has more bits than the step has microbatches."""
    if bitmap > everything(microbatches):
        raise Refused(f"the ledger names a microbatch beyond {microbatches - 1}")


def forget_before(t: int, *known: MutableMapping[int, Any]) -> None:
    """Drop what is known, by step, of the steps before `t`."""
    for by_step in known:
        for old in [step for step in by_step if step < t]:
            del by_step[old]
