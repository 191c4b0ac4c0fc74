"""--max-upload: what is sent stays within the limit, and control messages do not wait behind bodies."""

from __future__ import annotations

import asyncio
import os

import pytest

from peers.net.bandwidth import TURN_S, RateLimiter
from peers.net.transport import NetTransport
from peers.ports import Answer, Request
from tests.net.test_transport import pair, relay

__all__ = ["pair", "relay"]

ON_A_LINE = pytest.mark.parametrize("pair", ["p2pd", "direct"], indirect=True)
"""In memory there is no limit (test_memory_path.py)."""


@pytest.mark.parametrize("limit_bps", [1e6, 20e6, 1e9])
@pytest.mark.parametrize("links", [1, 7, 60])
def test_in_any_ten_seconds_no_more_is_sent_than_the_limit(limit_bps: float, links: int) -> None:
    """Each link asks for its next turn when it had the last one; timers are up to 5 ms late."""
    limiter = RateLimiter(limit_bps)
    due = {link: limiter.take(limiter.turn_bytes, now=0.0) for link in range(links)}
    turns = dict.fromkeys(range(links), 0)
    sent: list[tuple[float, int]] = []
    while (now := min(due.values())) < 30.0:
        link = min(due, key=lambda one: (due[one], one))
        sent.append((now, limiter.turn_bytes))
        turns[link] += 1
        if len(sent) % 10 == 0:
            limiter.took(64, now=now)  # a control message
            sent.append((now, 64))
        wait_s = limiter.take(limiter.turn_bytes, now=now)
        due[link] = now + wait_s + 0.005 * (len(sent) % 3 > 0)
    for start in (0.0, 5.0, 12.3, 19.9):
        bits = 8 * sum(nbytes for at, nbytes in sent if start <= at < start + 10.0)
        assert bits <= 1.05 * limit_bps * 10.0
        assert bits >= 0.85 * limit_bps * 10.0, "nothing of the line is wasted either"
    assert max(turns.values()) - min(turns.values()) <= 2, "links take turns"


def test_who_was_idle_does_not_make_up_for_it() -> None:
    limiter = RateLimiter(8e6)
    limiter.take(1, now=0.0)
    waits = [limiter.take(limiter.turn_bytes, now=100.0) for _ in range(10)]
    assert waits[0] == 0.0 and waits[-1] == pytest.approx(9 * TURN_S - 0.1, abs=0.01)


@pytest.mark.slow
def test_frames_that_do_not_wait_leave_bodies_half_of_the_line() -> None:
    limiter = RateLimiter(1e6)
    for _ in range(1000):
        limiter.took(5000, now=0.0)
    assert 0.85 < limiter.take(limiter.turn_bytes, now=0.0) <= 1.0, (
        "seconds: what came at once is not forgotten"
    )
    due = dict.fromkeys(range(3), 0.0)
    turns = 0
    for now in (tick / 100 for tick in range(6000)):
        for _ in range(50):  # 20 Mbit/s of answers
            limiter.took(500, now=now)
        for link in due:
            if due[link] <= now:
                due[link] = now + limiter.take(limiter.turn_bytes, now=now)
                turns += 1
    assert 8 * turns * limiter.turn_bytes >= 0.45 * 1e6 * 60.0


NOISE = os.urandom(1_000_000)
"""Which takes no fewer bytes packed."""


@ON_A_LINE
async def test_a_body_takes_its_time_and_a_control_message_passes_it(
    pair: tuple[NetTransport, NetTransport],
) -> None:
    caller, callee = pair
    await caller.call(callee.peer_id, "echo", b"", [bytes(100_000)], max_answer_bytes=100_000)
    caller.limit_upload(8e6)
    assert caller.lines[callee.peer_id].bandwidth_bps <= 8e6
    loop = asyncio.get_running_loop()
    began = loop.time()
    before = caller.lines[callee.peer_id].sent_bytes
    slow = asyncio.ensure_future(
        caller.call(callee.peer_id, "echo", b"", [NOISE], max_answer_bytes=len(NOISE))
    )
    passed = 0
    while not slow.done():
        await caller.call(callee.peer_id, "echo", b"quick")
        passed += not slow.done()
        await asyncio.sleep(0.01)
    took_s = loop.time() - began
    sent = caller.lines[callee.peer_id].sent_bytes - before
    assert len((await slow).body[0]) == len(NOISE) < sent
    assert 8 * sent / took_s <= 1.05 * 8e6 + 8 * 50_000 / took_s, "one turn may be ahead"
    assert passed >= 5, "they did not wait for the body"


@ON_A_LINE
async def test_answers_are_within_the_limit_too(pair: tuple[NetTransport, NetTransport]) -> None:
    caller, callee = pair

    async def give(request: Request) -> Answer:
        return Answer(b"", [NOISE[:500_000]])

    callee.serve("give", give)
    callee.limit_upload(8e6)
    began = asyncio.get_running_loop().time()
    calls = [caller.call(callee.peer_id, "give", b"", max_answer_bytes=500_000) for _ in range(2)]
    await asyncio.gather(*calls)
    assert asyncio.get_running_loop().time() - began >= 1.0 / 1.05 - TURN_S, "one turn may be ahead"
