"""What a peer sends if its owner gave no limit: the queue of a slow line is short, and the line is used."""

from __future__ import annotations

from collections import Counter, deque
from functools import partial

import pytest

from peers.net.bandwidth import LESS, RateLimiter
from peers.net.body_buffers import UNLIMITED, Outbox, Outgoing
from swarm.wire import frames

TICK_S = 0.002
KERNEL_BYTES = 256_000
"""TCP takes so much of each link: 1.5 s of six links on a line of 8 Mbit/s."""


class Uplink:
    """Links whose bodies never end, and the line that they share: first in, first out."""

    def __init__(self, bps: float, links: int = 6) -> None:
        self.bps, self.others_s = bps, 0.0
        """`others_s`: how long packets wait elsewhere on the way, and their acknowledgements."""
        self.limiter = RateLimiter()
        self.queues_s = list[float]()
        self.sent_bytes = 0
        self._now = self._spare = 0.0
        self._due = [0.0] * links
        self._turns = [0] * links
        self._held, self._told, self._arrived = ([0] * links for _ in range(3))
        self._waited_s = [0.0] * links
        self._queue = deque[tuple[int, int, float]]()
        """Of each turn: whose it is, how many bytes are left of it, and since when it waits."""
        self._gauges = [partial(self._gauge, link) for link in range(links)]
        self.limiter.gauges.update(self._gauges)

    def _gauge(self, link: int) -> tuple[int, float]:
        since, self._told[link] = self._arrived[link] - self._told[link], self._arrived[link]
        return since, self._waited_s[link] + self.others_s

    def run(self, seconds: float) -> float:
        """Send for so long; the share of the line that was used."""
        before, self.queues_s = self.sent_bytes, []
        for _ in range(round(seconds / TICK_S)):
            self._now += TICK_S
            for link in range(len(self._due)):
                self._ask(link)
            self._carry()
            self.queues_s.append(8 * sum(left for _, left, _ in self._queue) / self.bps)
        return 8 * (self.sent_bytes - before) / (self.bps * seconds)

    def _ask(self, link: int) -> None:
        """Send turns that have come, until the kernel takes no more."""
        while self._due[link] <= self._now and self._held[link] < KERNEL_BYTES:
            if size := self._turns[link]:
                self._held[link] += size
                self._queue.append((link, size, self._now))
            self._turns[link] = min(self.limiter.turn_bytes, KERNEL_BYTES)
            wait_s = self.limiter.take(self._turns[link], now=self._now, link=self._gauges[link])
            self._due[link] = self._now + wait_s

    def _carry(self) -> None:
        room = self._spare + self.bps / 8 * TICK_S
        while self._queue and room >= 1:
            link, left, since = self._queue.popleft()
            size = min(left, int(room))
            room -= size
            self.sent_bytes += size
            self._held[link] -= size
            self._arrived[link] += size
            self._waited_s[link] = self._now - since
            if left > size:
                self._queue.appendleft((link, left - size, since))
        self._spare = room if self._queue else 0.0


@pytest.mark.parametrize("links", [1, 6])
def test_the_queue_of_a_slow_line_stays_short_and_the_line_is_used(links: int) -> None:
    line = Uplink(8e6, links)
    line.run(10.0)
    assert line.run(20.0) > 0.95
    assert sum(line.queues_s) / len(line.queues_s) < 0.3
    assert max(line.queues_s) < 0.7, "seconds: reports have three"


def test_a_fast_line_is_never_waited_for() -> None:
    line = Uplink(1e9)
    assert line.run(2.0) > 0.99
    assert line.limiter.take(1 << 20, now=10.0) == 0.0


def test_a_line_that_becomes_fast_is_used() -> None:
    line = Uplink(8e6)
    line.run(10.0)
    line.bps = 100e6
    line.run(10.0)
    assert line.run(5.0) > 0.9


def test_a_line_that_becomes_slow_has_a_short_queue_again() -> None:
    line = Uplink(20e6)
    line.run(10.0)
    line.bps = 5e6
    line.run(20.0)
    assert line.run(5.0) > 0.95
    assert max(line.queues_s) < 0.7


def test_queues_that_are_not_ours_cost_little_of_our_line() -> None:
    """Such as those of acknowledgements behind the bodies that the other end sends."""
    line = Uplink(8e6)
    line.run(10.0)
    line.others_s = 0.6
    line.run(20.0)
    assert line.run(20.0) > LESS - 0.05


def test_a_disturbance_while_hardly_anything_is_sent_is_forgotten_in_seconds() -> None:
    line = Uplink(50e6, links=1)
    line.others_s = 0.3
    line.bps = 100e3
    line.run(1.0)
    line.others_s, line.bps = 0.0, 50e6
    line.run(5.0)
    assert line.run(2.0) > 0.7


@pytest.mark.parametrize("lie_s", [0.0, 5.0])
def test_one_that_says_its_packets_wait_slows_down_no_other(lie_s: float) -> None:
    """It asked for a little while others paused, and what these sent then went at 1 Mbit/s."""
    limiter, now = RateLimiter(), 0.0
    arrived, told = Counter[str](), Counter[str]()

    def gauge(name: str) -> tuple[int, float]:
        since, told[name] = arrived[name] - told[name], arrived[name]
        return since, lie_s if name == "liar" else 0.0

    links = {name: partial(gauge, name) for name in ("liar", "honest")}
    limiter.gauges.update(links.values())
    for _ in range(10):
        for _ in range(20):  # two seconds
            now += 0.1
            arrived["liar"] += 2000
            limiter.take(2000, now=now, link=links["liar"])
        for _ in range(200):  # as fast as it may
            assert limiter.take(1 << 16, now=now, link=links["honest"]) == 0.0
            arrived["honest"] += 1 << 16
            now += 0.005
    for _ in range(20):
        now += 0.1
        arrived["liar"] += 1 << 16
        waits_s = limiter.take(1 << 16, now=now, link=links["liar"])
    assert (waits_s > 0.0) is (lie_s > 0.0), "it may wait itself"
    for name, link in links.items():
        outbox = Outbox()
        outbox.gauge = link
        outbox.add(Outgoing(1, [memoryview(bytes(1 << 16))], UNLIMITED))
        frame, _ = outbox.next(limiter, frames.CHUNK_BYTES, now)
        if not frame:
            assert name == "liar" and outbox.turn_at is not None
            frame, _ = outbox.next(limiter, frames.CHUNK_BYTES, outbox.turn_at)
        packs = frames.unpack_prefix(memoryview(bytes(frame[0]))).kind is frames.Kind.PACKED
        assert packs is (name == "liar" and lie_s > 0.0), "nor has us pack what goes to others"
