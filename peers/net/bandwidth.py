"""What passes over the line to a peer: how much and how fast, and what it and we may send.

No clock: times and durations are given.
"""

from __future__ import annotations

from collections import deque

from peers.ports import PROBE_BYTES, NetworkPath
from swarm.ids import PeerId
from swarm.wire import frames

SMALL_BYTES = 4096
"""A call with no more tells the round trip: its own time on the line is 3 ms at 10 Mbit/s."""
MAX_BPS = 1e12
"""Faster than any line: the body lay in a buffer when it was seen."""
_ROUND_TRIPS = 32
"""Their least counts: whatever is above it is the work of the other end, or a queue."""
_BODIES = 15
"""Their median counts: one that lay in a buffer looks too fast, one that shared the line too slow."""

SHARE = 0.95
"""Of the limit, for our bytes: those of TCP, IP and libp2p's encryption come on top, 3 to 4 % of packets."""
TURN_S = 0.05
"""Of the line's time that one turn takes. 70 links that send at once all send within the silence limit."""
MIN_TURN_BYTES = 1024
CATCH_UP_S = 0.1
"""Of an idle past that may be used: timers are late by milliseconds."""
URGENT_SHARE = 0.5
"""Of the line, for frames that do not wait; what they take beyond it is not taken from bodies."""
URGENT_S = 2.0
"""How far ahead they may take their share."""


class RateLimiter:
    """Keeps what is sent within a limit: all links of a peer draw on one.

    Bodies wait for their turn, first come, first served; a turn is short, so that no receiver takes its
    sender for dead. Frames without a body go at once, and the bodies after them wait for what they took, but
    keep half of the line: a stranger that makes us answer without end cannot stop them.
    """

    def __init__(self, limit_bps: float) -> None:
        self.limit_bps = limit_bps
        self._bytes_per_s = rate = SHARE * limit_bps / 8
        self.turn_bytes = max(MIN_TURN_BYTES, int(TURN_S * rate))
        self._all = Allowance(rate, rate * CATCH_UP_S)
        self._urgent = Allowance(rate * URGENT_SHARE, rate * URGENT_SHARE * URGENT_S)

    def take(self, nbytes: int, *, now: float) -> float:
        """Reserve the line for `nbytes`; how long they have to wait for their turn, in seconds."""
        owed = -self._all.left(now=now)
        self._all.take(nbytes, now=now)
        return max(0.0, owed / self._bytes_per_s)

    def took(self, nbytes: int, *, now: float) -> None:
        """Frames of `nbytes` that did not wait: bodies wait for them, within the share of such frames."""
        taken = min(nbytes, max(0.0, self._urgent.left(now=now)))
        self._urgent.take(taken, now=now)
        self._all.take(taken, now=now)


# --- what callers may make us do and hold ------------------------------------------------------------------
#
# One that asks for more is slowed down: nothing more is read of its stream until its allowance has grown
# again, so what it sends waits in its own machine. Others are not affected, and no call is refused for it.

CALLS_PER_S = 200.0
CALLS_AT_ONCE = 1000.0
"""A trainer with 512 microbatches in flight makes 256 calls at once (`frames.MAX_PENDING`), and answers come
at the pace of a device. A peer of 64 replicas gets up to 56 a second of its coordinator, or 46 kB (virtual
time, 2026-11-23). A download makes a call for each MB: 1.6 Gbit/s from one source, after the first GB."""
CONTROL_BYTES_PER_S = float(1 << 20)
CONTROL_BYTES_AT_ONCE = float(4 << 20)
"""64 of the largest headers."""
FRAME_BYTES = 256
"""What a frame costs besides its header: so a body of single bytes is slowed down, too. 4,096 frames a second
are 8 Gbit/s of bodies in whole chunks."""
EARLY_BYTES = 8 * frames.WINDOW_BYTES
"""What one caller can make us hold of bodies that we did not accept yet."""
EARLY_BYTES_OF_ALL = 512 << 20
EARLY_SHARE = 8
"""A caller may hold at most this part of what is left of that: so what is left for a new one never ends, and
is as much as any of N others has, 512 / (8 + N) MiB, however many there are (dynamic thresholds: Choudhury
and Hahne, 1998)."""


class Allowance:
    """A token bucket: so much at once, and so much a second."""

    def __init__(self, per_s: float, at_once: float) -> None:
        self._per_s, self._most, self._left, self._at = per_s, at_once, at_once, float("-inf")

    def left(self, *, now: float) -> float:
        """What may be taken; negative: what is owed."""
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._per_s)
        self._at = max(now, self._at)
        return self._left

    def take(self, amount: float, *, now: float) -> float:
        """Take it in any case; the seconds after which nothing of it is owed."""
        self._left = self.left(now=now) - amount
        return max(0.0, -self._left / self._per_s)

    def take_if_there(self, amount: float, *, now: float) -> bool:
        """Take it, if nothing has to be owed for it."""
        there = self.left(now=now) >= amount
        return there and self.take(amount, now=now) == 0.0


class Line:
    """The line to one peer, over all streams: what passed, what that tells, and what the peer may do."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self.sent_bytes = 0
        self.received_bytes = 0
        """Calls of the peer and its answers to ours share the line."""
        self.memory_bytes = 0
        """Of both: what did not leave this machine (`peers.net.direct.memory`)."""
        self.held_bytes = 0
        """Of bodies that were not accepted yet."""
        self.handling = 0
        """Its calls that are worked on."""
        self.logged_at = float("-inf")
        """When it was last said that it does what it may not."""
        self.direct_at = float("-inf")
        """When a direct connection may be tried, again."""
        self._round_trips_s: deque[float] = deque(maxlen=_ROUND_TRIPS)
        self._rates_bps: deque[float] = deque(maxlen=_BODIES)
        self._calls = Allowance(CALLS_PER_S, CALLS_AT_ONCE)
        self._control = Allowance(CONTROL_BYTES_PER_S, CONTROL_BYTES_AT_ONCE)

    @property
    def limiter(self) -> RateLimiter | None:
        """Of what we send: one for all lines."""
        return self._traffic.limiter

    def answered(self, took_s: float, sent_bytes: int) -> None:
        """The first sign of the other end, so long after a call of so many bytes."""
        if sent_bytes <= SMALL_BYTES and took_s > 0:
            self._round_trips_s.append(took_s)

    def received(self, size_bytes: int, all_bytes: int, took_s: float) -> None:
        """A body of `size_bytes` is complete, so long after the header that announced it; `all_bytes` came
        over the line meanwhile."""
        if size_bytes >= PROBE_BYTES:
            self._rates_bps.append(min(MAX_BPS, 8 * all_bytes / took_s) if took_s > 0 else MAX_BPS)

    def count(self, *, sent: int = 0, received: int = 0, in_memory: bool) -> None:
        """Bytes that passed, frames included."""
        self.sent_bytes += sent
        self.received_bytes += received
        self.memory_bytes += (sent + received) * in_memory

    def path(self) -> NetworkPath:
        """The line as far as it is known. What goes the other way is no wider than our limit."""
        rates_bps = sorted(self._rates_bps) or [0.0]
        limiter = None if self.memory_bytes else self.limiter
        most_bps = limiter.limit_bps if limiter is not None else float("inf")
        return NetworkPath(
            rtt_s=min(self._round_trips_s, default=0.0),
            bandwidth_bps=min(most_bps, rates_bps[len(rates_bps) // 2]),
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            memory_bytes=self.memory_bytes,
        )

    def pays(self, frame: frames.Prefix, *, now: float) -> float:
        """Note a frame that it sends; how long to read nothing more of it, in seconds."""
        calls_s = self._calls.take(1.0, now=now) if frame.kind is frames.Kind.CALL else 0.0
        return max(calls_s, self._control.take(FRAME_BYTES + frame.header_bytes, now=now))

    def may_hold(self, more_bytes: int) -> bool:
        """Whether so much more may be held of its bodies."""
        share = (EARLY_BYTES_OF_ALL - self._traffic.held_bytes) // EARLY_SHARE
        return self.held_bytes + more_bytes <= min(EARLY_BYTES, share)

    def holds(self, more_bytes: int) -> None:
        """Note that so much more is held, or less."""
        self.held_bytes += more_bytes
        self._traffic.held_bytes += more_bytes


class Traffic:
    """What all streams share: the lines to peers, one limiter, and room for bodies.

    A peer whose streams ended is remembered: a new one is no new allowance.
    """

    def __init__(self, *, most_peers: int) -> None:
        """`most_peers`: of more, the one that opened a stream longest ago is forgotten."""
        self.limiter: RateLimiter | None = None
        self.lines: dict[PeerId, Line] = {}
        self.held_bytes = 0
        self._most_peers = most_peers

    def of(self, peer: PeerId) -> Line:
        """The line to a peer to which, or from which, a stream is opened."""
        line = self.lines[peer] = self.lines.pop(peer, None) or Line(self)
        if len(self.lines) > self._most_peers:
            del self.lines[next(iter(self.lines))]
        return line
