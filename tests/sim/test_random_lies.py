"""`scripts/bench/recovery/random_lies.py`: a seed says the same lies each time, and they are told so."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from peers.ports import Answer
from peers.sim.dice import Dice
from peers.sim.faults import KINDS as FAULTS
from peers.sim.loop import run_virtual
from scripts.bench.common.lies import ACTS, KINDS, RECORD, REFUSALS, TRUTH, Lie, altered, drawn
from scripts.bench.recovery.random_lies import Liar, draw
from swarm.errors import PeerSilent, SwarmError

LIE = TRUTH._replace(kind="locate", chance=1.0, share=1.0, lasts_s=math.inf, by_s=2.5, number=1)
Told = list[tuple[float, Any]]
"""Each question that reached the other one, and each answer that the liar gave it: when, and what it said."""


async def tell(lie: Lie) -> tuple[Told, int]:
    """A liar asks 0 and 1, and is asked 10 and 11: in truth it answers 100 and 101. And how often it lied."""
    told: Told = []
    now = asyncio.get_running_loop().time
    handlers: dict[str, Any] = {}

    async def call(peer: str, kind: str, header: bytes, body: Any, **limits: float) -> Answer:
        told.append((now(), msgspec.msgpack.decode(header)))
        return Answer(b"", [])

    async def handle(request: Any) -> Answer:
        return Answer(msgspec.msgpack.encode(90 + msgspec.msgpack.decode(request.header)), [])

    def serve(kind: str, handler: Any, **limits: int) -> None:
        handlers[kind] = handler

    swarm: Any = SimpleNamespace(told=0, say=lambda text: None, network=SimpleNamespace(transports=["other"]))
    swarm.loop = SimpleNamespace(now_s=1.0)
    member: Any = SimpleNamespace(name="liar", transport=SimpleNamespace(call=call, serve=serve))
    member.directory = SimpleNamespace(announce=None)
    Liar(swarm, member, [lie])
    member.transport.serve("locate", handle)
    for number in (0, 1):
        request = SimpleNamespace(peer="other", header=msgspec.msgpack.encode(10 + number), body_sizes=())
        try:
            await member.transport.call("other", "locate", msgspec.msgpack.encode(number), deadline_s=9.0)
        except PeerSilent:
            told.append((now(), "silence"))
        try:
            answer = await asyncio.wait_for(handlers["locate"](request), 7.0)
            told.append((now(), msgspec.msgpack.decode(answer.header)))
        except SwarmError as error:
            told.append((now(), error.code))
        except asyncio.TimeoutError:
            told.append((now(), "no answer"))
    return told, swarm.told


ASKS: dict[str, Told] = {
    "drops": [(9.0, "silence"), (9.0, 100), (18.0, "silence"), (18.0, 101)],
    "delays": [(2.5, 0), (2.5, 100), (5.0, 1), (5.0, 101)],
    "doubles": [(0.0, 0), (0.0, 0), (0.0, 100), (0.0, 1), (0.0, 1), (0.0, 101)],
    "replays": [(0.0, 0), (0.0, 100), (0.0, 0), (0.0, 101)],
    "mixes up": [(0.0, 0), (0.0, 100), (0.0, 10), (0.0, 101)],
    "alters": [(0.0, 0), (0.0, 100), (0.0, 2), (0.0, 101)],
    "refuses": [(0.0, 0), (0.0, "silence"), (0.0, 100), (0.0, 1), (0.0, "silence"), (0.0, 101)],
}
ANSWERS: dict[str, Told] = {
    "drops": [(0.0, 0), (7.0, "no answer"), (7.0, 1), (14.0, "no answer")],
    "delays": [(0.0, 0), (2.5, 100), (2.5, 1), (5.0, 101)],
    "replays": [(0.0, 0), (0.0, 100), (0.0, 1), (0.0, 100)],
    "alters": [(0.0, 0), (0.0, 200), (0.0, 1), (0.0, 202)],
    "refuses": [(0.0, 0), (0.0, "stale"), (0.0, 1), (0.0, "stale")],
}


@pytest.mark.parametrize(("answers", "due"), [(False, ASKS), (True, ANSWERS)], ids=["asks", "answers"])
def test_a_lie_is_told_as_its_words_say(answers: bool, due: dict[str, Told]) -> None:
    for act, told in due.items():
        assert run_virtual(tell(LIE._replace(act=act, answers=answers))) == (told, 2), act
    assert ASKS.keys() == ACTS.keys() and ANSWERS.keys() == ACTS.keys() - {"doubles", "mixes up"}


def test_a_lie_that_is_not_due_or_about_something_else_is_not_told() -> None:
    for lie in (LIE._replace(since_s=1.5), LIE._replace(lasts_s=0.5), LIE._replace(kind="work"),
                LIE._replace(share=0.0), LIE._replace(chance=0.0)):  # fmt: skip
        assert run_virtual(tell(lie._replace(act="drops"))) == (
            [(0.0, 0), (0.0, 100), (0.0, 1), (0.0, 101)],
            0,
        )


def test_of_an_altered_message_one_field_is_another_one() -> None:
    true = {"run": "r", "peer": "a", "t": 3, "done": b"\0\x05", "ready": False, "steps": [1, 2], "s": 1.5}
    seen = set()
    for number in range(200):
        found = altered(true, Dice(number), ["a", "b"])
        (field,) = [name for name in true if found[name] != true[name]] or ["none"]
        seen.add(field)
        assert field == "none" or type(found[field]) is type(true[field])
    assert seen == {*true, "none"} - {"run"}


def test_a_seed_says_the_same_each_time_and_every_kind_of_run() -> None:
    said = [draw(seed) for seed in range(12)]
    assert [setting.words() for setting in said] == [draw(seed).words() for seed in range(12)]
    shapes = [(len(setting.lies), len(setting.faults)) for setting in said]
    assert shapes == 3 * [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert {fault.kind for setting in said for fault in setting.faults} <= FAULTS.keys()


def test_lies_at_random_are_of_every_kind() -> None:
    lies = [drawn(Dice(number)) for number in range(600)]
    assert {(lie.kind, lie.answers) for lie in lies} >= {(kind, False) for kind in KINDS}
    assert {lie.kind for lie in lies if lie.answers} == KINDS.keys() - {RECORD}
    assert {lie.act for lie in lies} == ACTS.keys()
    assert LIE._replace(act="delays", answers=True, chance=0.5).words() == (
        "delays answers to locate by 2.5 s, 50% of them, from 0.00 s on"
    )
    assert {refuse().code for refuse in REFUSALS} == {"refused", "stale", "busy", "leaving", "not-ready"}
