"""Names of codecs: what a manifest may prescribe and a header announce. `swarm.wire.codec` does it.

    none, bf16, blockwise8, hadamard4   every number: as it is, or in fewer bits
    topk:R                              the part R of the numbers that is largest in magnitude, as they are;
                                        others are 0
    topk:R+bf16, topk:R+blockwise8, …   the same part, its values as that codec has them

R is a decimal between 0 and 1 of at most six digits and no zero at the end, such as 0.05: one name for one
codec, and a whole number of millionths, so that how many numbers are kept is never a matter of rounding.
"""

from __future__ import annotations

import re
from typing import NamedTuple

VALUES = ("none", "bf16", "blockwise8", "hadamard4")
"""How numbers look on the wire: codecs by themselves, and for the values that a top-k keeps."""

ROUNDED = {"rounded16": 14, "rounded8": 6}
"""What else `codec.reduce` may be, and how many bits of a block's largest sum it keeps: a number may double
before it takes more than 16 or 8 on its way."""

PACKED = {"none": 0.924, "bf16": 0.785, "blockwise8": 0.914, "hadamard4": 0.89}
"""Of the bytes of such numbers, what a slow line carries: real runs (docs/benchmarks/slow-lines.md)."""
SLOW_BPS = 200e6
"""To pack what such a line carries takes 0.27 of a core, to unpack it 0.18."""

PPM = 1_000_000
KNOWN = f"{', '.join(VALUES)}, topk:R, topk:R+bf16 (or {', '.join(f'+{values}' for values in VALUES[2:])})"
"""For messages. R is the part that is kept, such as 0.05."""

_TOPK = re.compile(rf"topk:0\.([0-9]{{0,5}}[1-9])(?:\+({'|'.join(VALUES[1:])}))?")


class Codec(NamedTuple):
    """Numbers that travel, of each million; `PPM`: all, and their places are not sent."""

    keep_ppm: int
    values: str
    """How they look, one of `VALUES`."""

    @property
    def name(self) -> str:
        """What a manifest calls it."""
        if self.keep_ppm == PPM:
            return self.values
        part = f"topk:0.{self.keep_ppm:06d}".rstrip("0")
        return part if self.values == "none" else f"{part}+{self.values}"


def packed_part(name: str) -> float:
    """Of the bytes of a codec that there is, what a slow line carries; of a top-k as of its values."""
    return PACKED.get(name.rpartition("+")[2], PACKED["none"])


def parse_codec(name: str) -> Codec | None:
    """What `name` says; None if it is no codec's."""
    if name in VALUES:
        return Codec(PPM, name)
    if (found := _TOPK.fullmatch(name)) is None:
        return None
    digits, values = found.groups()
    return Codec(int(digits.ljust(6, "0")), values or "none")
