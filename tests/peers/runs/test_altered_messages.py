"""A member that alters what it says and answers, one field of a message at a time, to what its type can say.

Others refuse that or do without the member: no handler fails otherwise, and their weights are right.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import pytest

from peers.ports import Answer, Request
from swarm.manifest import audit_run
from tests.peers.extremes import REAL, WHOLE
from tests.peers.loops import Swarm, swarm
from tests.peers.sybils import TRAINER, admitting, give_voice
from tests.seeds import some

pytestmark = pytest.mark.virtual_time

Where: TypeAlias = tuple[int | str, ...]
"""Keys and places that lead to a field of a message."""
MOST_PARTS = 2
"""Parts of a list that are told apart."""
LEAST = 130
"""Fields that are altered in each test."""


class Altering:
    """Alters of each message the field that it has altered least often, if never by now surely."""

    def __init__(self, dice: random.Random, names: list[str]) -> None:
        self._dice, self._names = dice, names
        self.altered = Counter[tuple[str, Where]]()

    def __call__(self, header: bytes, what: str) -> bytes:
        message = msgspec.msgpack.decode(header) if header else None
        fields = {(what, _told_apart(where)): where for where in _fields(message) if where}
        if not fields:
            return header
        kind = min(fields, key=lambda kind: (self.altered[kind], self._dice.random()))
        if self.altered[kind] and self._dice.random() < 0.7:
            return header
        self.altered[kind] += 1
        *above, last = fields[kind]
        holder = message
        for part in above:
            holder = holder[part]
        holder[last] = self._other(holder[last])
        return msgspec.msgpack.encode(message)

    def _other(self, old: Any) -> Any:
        if isinstance(old, bool):
            return not old
        if isinstance(old, float):
            return self._dice.choice(REAL)
        if isinstance(old, int):
            return self._dice.choice((*WHOLE, old + 1, old - 1))
        if isinstance(old, str):
            return self._dice.choice((*self._names, "", "x" * 64, old[::-1]))
        if isinstance(old, bytes):
            return self._dice.choice((b"", old[:-1], bytes(len(old)), self._dice.randbytes(len(old))))
        return self._dice.choice(([], old[::-1], old + old, old[1:]))


def _told_apart(where: Where) -> Where:
    return tuple(min(part, MOST_PARTS) if isinstance(part, int) else part for part in where)


def _fields(value: Any, where: Where = ()) -> Iterator[Where]:
    """Of all that a message says."""
    if value is not None and not isinstance(value, dict):
        yield where
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _fields(part, (*where, key))


def alter(s: Swarm, name: str, altering: Altering) -> None:
    """Have a peer say and answer, from now on, what `altering` makes of it."""
    transport = s.network.transports[name]
    call = transport.call

    async def say(peer: str, method: str, header: bytes = b"", *rest: Any, **more: Any) -> Answer:
        return await call(peer, method, altering(header, method), *rest, **more)

    transport.call = say  # type: ignore[method-assign]
    for method, (handler, limit) in [*transport.handlers.items()]:

        async def handle(request: Request, handler: Any = handler, method: str = method) -> Answer:
            answer = await handler(request)
            return Answer(altering(answer.header, f"answer {method}"), answer.body)

        transport.handlers[method] = (handle, limit)


@pytest.mark.parametrize(
    ("liar", "delayed"), some([("s0p0", False), ("s1p2", True), ("s1p0", False)], quick=[("s0p0", False)])
)
async def test_fields_that_a_member_alters_end_no_other_and_change_no_weight(
    liar: str, delayed: bool
) -> None:
    run = replace(audit_run(stages=2, steps=7, microbatches_per_step=4), dtype="float32", checkpoint_every=3)
    run = admitting(replace(run, delayed_updates=delayed))
    async with swarm(run, replicas=3, job_s=0.3) as s:
        give_voice(s, *s.peers)
        await s.until_serving()
        altering = Altering(random.Random(3), [*s.peers])
        alter(s, liar, altering)
        s.add_trainer(TRAINER)
        honest = [peer for name, peer in s.peers.items() if name != liar]
        await s.until(lambda: all(peer.core.version >= run.steps for peer in honest))
        s.kill(liar)
        s.assert_each_counted_once()
        assert len(altering.altered) > LEAST
        assert {what for what, _ in altering.altered} >= {"report", "held", "answer report"}
