"""Answers about states that lie: each takes an honest answer and returns what a liar sends instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from peers.ports import Answer
from swarm.wire.messages import Opened, pack, unpack


def flip_a_bit(answer: Answer) -> Answer:
    body = bytearray(answer.body[0])
    body[-1] ^= 1
    return Answer(answer.header, [body])


def offered(**changes: Any) -> Callable[[Answer], Answer]:
    def change(answer: Answer) -> Answer:
        opened = unpack(answer.header, Opened)
        return Answer(pack(msgspec.structs.replace(opened, **changes)), answer.body)

    return change
