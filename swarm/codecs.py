"""Names of codecs: what a manifest may prescribe and a header announce. `swarm.wire.codec` does it.

    none, bf16, blockwise8   every number: as it is, or in fewer bits
    topk:R                   the part R of the numbers that is largest in magnitude, as they are; others are 0
    topk:R+bf16              the same part, its values as bf16 has them
    topk:R+blockwise8        the same part, its values as blockwise8 has them

R is a decimal between 0 and 1 of at most six digits and no zero at the end, such as 0.05: one name for one
codec, and a whole number of millionths, so that how many numbers are kept is never a matter of rounding.
"""

from __future__ import annotations

import re
from typing import NamedTuple

VALUES = ("none", "bf16", "blockwise8")
"""How numbers look on the wire: codecs by themselves, and of the values that a top-k keeps."""

PPM = 1_000_000
KNOWN = f"{', '.join(VALUES)}, topk:R, {', '.join(f'topk:R+{values}' for values in VALUES[1:])}"
"""For messages. R is the part that is kept, such as 0.05."""

_TOPK = re.compile(rf"topk:0\.([0-9]{{0,5}}[1-9])(?:\+({'|'.join(VALUES[1:])}))?")


class Codec(NamedTuple):
    """What a codec's name says."""

    keep_ppm: int
    """Of a million numbers so many travel; `PPM`: all, and nothing is said of where they are."""
    values: str
    """How they look, one of `VALUES`."""

    @property
    def name(self) -> str:
        """The name that `parse_codec` reads as this codec."""
        if self.keep_ppm == PPM:
            return self.values
        part = f"topk:0.{self.keep_ppm:06d}".rstrip("0")
        return part if self.values == "none" else f"{part}+{self.values}"


def parse_codec(name: str) -> Codec | None:
    """What `name` says; None if it is no codec's."""
    if name in VALUES:
        return Codec(PPM, name)
    if (found := _TOPK.fullmatch(name)) is None:
        return None
    digits, values = found.groups()
    return Codec(int(digits.ljust(6, "0")), values or "none")


def topk(ratio: float, values: str = "none") -> str:
    """The name of the codec that keeps the part `ratio`, to a millionth.

    Raises:
        ValueError: the ratio is not between a millionth and 1, or there are no such values.
    """
    keep_ppm = round(ratio * PPM)
    if not 1 <= keep_ppm < PPM or values not in VALUES:
        raise ValueError(f"no codec keeps {ratio} of the numbers as {values}")
    return Codec(keep_ppm, values).name
