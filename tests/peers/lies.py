"""Answers about states that lie: each takes an honest answer and returns what a liar sends instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from peers.ports import Answer
from peers.stage.all_reduce import checksum
from swarm.wire.messages import StateOpened, VectorChunk, pack, unpack


def flip_a_bit(answer: Answer) -> Answer:
    body = bytearray(answer.body[0])
    body[-1] ^= 1
    return Answer(answer.header, [body])


def flip_a_bit_and_sign(answer: Answer) -> Answer:
    """As a liar, not a bad line: the checksum fits."""
    changed = flip_a_bit(answer)
    chunk = unpack(answer.header, VectorChunk)
    return Answer(pack(msgspec.structs.replace(chunk, crc=checksum(changed.body))), changed.body)


def told(**changes: Any) -> Callable[[Answer], Answer]:
    """A chunk of the same body with other things said of it."""

    def change(answer: Answer) -> Answer:
        chunk = unpack(answer.header, VectorChunk)
        return Answer(pack(msgspec.structs.replace(chunk, **changes)), answer.body)

    return change


def offered(**changes: Any) -> Callable[[Answer], Answer]:
    def change(answer: Answer) -> Answer:
        opened = unpack(answer.header, StateOpened)
        return Answer(pack(msgspec.structs.replace(opened, **changes)), answer.body)

    return change
