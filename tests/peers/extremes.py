"""Messages that are well typed and cannot be true: every field at the ends of what its type can say."""

from __future__ import annotations

import functools
import math
import random
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from swarm.ids import PeerId
from swarm.protocol.ledger import MAX_MICROBATCHES, Bitmap

WHOLE = (0, -1, 1, 2, 3, 7, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1)
REAL = (
    0.0, -0.0, -1.0, 1.0, 1e-300, 1e300, 1.7e308, -1.7e308, 5e-324, math.inf, -math.inf, math.nan,
)  # fmt: skip
BITMAPS = (0, 1, 0b10110, (1 << 8) - 1, 1 << 8, 1 << (MAX_MICROBATCHES - 1), (1 << MAX_MICROBATCHES) - 1)
LONG = 20_000
"""Letters of a text, or bytes: three of them fit into a header."""


hints_of = functools.cache(typing.get_type_hints)
"""Of a class: each field -> its type. Reading them anew took half of what the tests did."""


class Extremes:
    """Draws messages. `peers`: names that the receiver knows, some of them."""

    def __init__(self, dice: random.Random, run: str, peers: tuple[PeerId, ...]) -> None:
        self._dice, self._run = dice, run
        self._texts = ("", "x", *peers, "\0\n\x1b[2J", "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 40, "l" * LONG)

    def of(self, kind: type[msgspec.Struct], honest: msgspec.Struct | None = None) -> msgspec.Struct:
        """One message: of the honest one each field may be replaced; without one, all are made up."""
        changes: dict[str, Any] = {}
        hints = hints_of(kind)
        most = self._dice.choice((1, 1, 2, 100))
        names = self._dice.sample(kind.__struct_fields__, k=len(kind.__struct_fields__))
        for name in names if honest is None else names[:most]:
            changes[name] = self._value(hints[name], depth=0)
        if "run" in kind.__struct_fields__ and self._dice.random() < 0.9:
            changes["run"] = self._run
        return kind(**changes) if honest is None else msgspec.structs.replace(honest, **changes)

    def _value(self, kind: Any, depth: int) -> Any:
        dice, origin = self._dice, typing.get_origin(kind)
        simple: dict[Any, Callable[[], Any]] = {
            int: lambda: dice.choice(WHOLE),
            float: lambda: dice.choice(REAL),
            bool: lambda: dice.random() < 0.5,
            str: lambda: dice.choice(self._texts),
            bytes: lambda: dice.choice((b"", b"x", bytes(64), bytes(LONG))),
            Bitmap: lambda: Bitmap(dice.choice(BITMAPS)),
            type(None): lambda: None,
        }
        if kind in simple:
            return simple[kind]()
        if origin in (typing.Union, types.UnionType):
            return self._value(dice.choice(typing.get_args(kind)), depth)
        if origin is typing.Literal:
            return dice.choice(typing.get_args(kind))
        if origin is typing.Annotated:
            return self._value(typing.get_args(kind)[0], depth)
        if origin in (tuple, list):
            parts = typing.get_args(kind)
            if parts[-1] is not ... and origin is tuple:
                return tuple(self._value(part, depth + 1) for part in parts)
            count = dice.choice((0, 1, 2, 5)) if depth else dice.choice((0, 1, 2, 5, 60))
            return origin(self._value(parts[0], depth + 1) for _ in range(count))
        if origin is dict:
            key, value = typing.get_args(kind)
            return {self._value(key, depth + 1): self._value(value, depth + 1) for _ in range(2)}
        if issubclass(kind, msgspec.Struct):
            fields = msgspec.structs.fields(kind)  # of a generic one with what it is made for
            return kind(**{field.name: self._value(field.type, depth + 1) for field in fields})
        assert issubclass(kind, tuple), kind  # a NamedTuple
        return kind(*(self._value(hint, depth + 1) for hint in hints_of(kind).values()))


def bodies(dice: random.Random) -> Iterator[list[bytes]]:
    """What comes with a message: nothing, nothing in parts, or anything."""
    while True:
        yield dice.choice(([], [], [b""], [bytes(8)], [dice.randbytes(64)], [bytes(8)] * 5, [bytes(5000)]))
