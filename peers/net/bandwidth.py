"""What passes over the line to a peer: how much and how fast, and what it and we may send.

No clock: times and durations are given.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from peers.ports import NetworkPath
from swarm.codecs import SLOW_BPS
from swarm.ids import PeerId
from swarm.wire import frames

SMALL_BYTES = 4096
"""A call with no more tells the round trip: its own time on the line is 3 ms at 10 Mbit/s."""
TELLING_BYTES = 64 * 1024
"""A body of so much tells the bandwidth: it takes 5 ms at 100 Mbit/s, far more than a read is late."""
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

QUEUE_S = 0.15
"""What we send may wait so long on the way: the line is never idle, and reports pass in time."""
LONG_QUEUE_S = 1.0
"""The line carries less than before, whatever it carried."""
OBSERVED_EVERY_S = 0.25
IDLE_S = 2.0
"""Observations further apart say nothing: this peer sent nothing between them."""
OBSERVATIONS = 40
"""That in which most arrived tells what the line carries."""
LATEST = 8
"""Those that count while a queue is long."""
CYCLE, PROBES = 16, 2
"""Of so many observations, in so many more is sent than arrived before, to see whether more arrives."""
MORE, LESS = 1.25, 0.75
"""Of what the line carries, at most and at least: a queue that is not ours does not go if we send less."""
LEAST_BPS = 1e6
"""Seen while hardly anything was sent, a line looks as if it carried hardly anything."""

Gauge = Callable[[], tuple[int, float]]
"""Of a link: bytes that arrived at the other end since the last question, and seconds that packets wait."""


class RateLimiter:
    """Keeps what is sent within what the line carries: all links of a peer draw on one.

    Bodies wait for their turn, first come, first served; a turn is short, so that no receiver takes its
    sender for dead. Frames without a body go at once, and the bodies after them wait for what they took, but
    keep half of the line: a stranger that makes us answer without end cannot stop them.

    Without a limit of the owner it is found out: once packets wait longer on the way than they should, no
    more is sent than has arrived. So the queue is in the programs, where frames pass bodies, and not in a
    kernel or a router, where nothing passes anything. The shortest wait of all links counts: what is more is
    not of our line. Nothing is limited before packets wait, nor a link none of whose packets waited together
    with those of all others: the other end of one may only say that they wait.
    """

    def __init__(self, limit_bps: float = math.inf) -> None:
        self.gauges: set[Gauge] = set()
        """One for each link whose packets can be observed."""
        self._all, self._urgent = Allowance(math.inf, math.inf), Allowance(math.inf, math.inf)
        self.keep_to(limit_bps)
        self._observed_at, self._observed = float("-inf"), 0
        self._waiting: set[Gauge] = set()
        """Links whose packets waited when those of all did."""
        self._queued = 0
        """Observations in a row of packets that waited longer than they should."""
        self._waited = False
        """A body had to, since the last observation."""
        self._arrived: deque[float] = deque(maxlen=OBSERVATIONS)
        """Bytes a second, at each observation."""

    def keep_to(self, limit_bps: float) -> None:
        """The limit that the owner gives, from now on."""
        self.limit_bps = limit_bps
        self._set(SHARE * limit_bps / 8)

    def _set(self, bytes_per_s: float) -> None:
        self._bytes_per_s = rate = bytes_per_s
        self.turn_bytes = max(MIN_TURN_BYTES, int(TURN_S * min(rate, MAX_BPS)))
        self._all.keep_to(rate, rate * CATCH_UP_S)
        self._urgent.keep_to(rate * URGENT_SHARE, rate * URGENT_SHARE * URGENT_S)

    def take(self, nbytes: int, *, now: float, link: Gauge | None = None) -> float:
        """Reserve the line for `nbytes` of a link; how long they have to wait for their turn, in seconds."""
        if self.limit_bps == math.inf:
            self._observe(now)
        if self._bytes_per_s == math.inf or not self._holds(link):
            return 0.0
        owed = -self._all.left(now=now)
        self._all.take(nbytes, now=now)
        self._waited |= owed > 0
        return max(0.0, owed / self._bytes_per_s)

    def _holds(self, link: Gauge | None) -> bool:
        """Whether what a link sends has to wait for the line."""
        return self.limit_bps < math.inf or link is None or link in self._waiting

    def is_slow(self, link: Gauge | None) -> bool:
        """Whether a link waits for a line that carries so little that fewer bytes are worth CPU time."""
        return 8 * self._bytes_per_s <= SLOW_BPS and self._holds(link)

    def returned(self, nbytes: int, *, now: float) -> None:
        """So much was not sent of what was taken."""
        self._all.take(-nbytes, now=now)

    def took(self, nbytes: int, *, now: float) -> None:
        """Frames of `nbytes` that did not wait: bodies wait for them, within the share of such frames."""
        if self._bytes_per_s < math.inf:
            taken = min(nbytes, max(0.0, self._urgent.left(now=now)))
            self._urgent.take(taken, now=now)
            self._all.take(taken, now=now)

    def _observe(self, now: float) -> None:
        """Find out what the line carries, while bodies are sent."""
        since_s = now - self._observed_at
        if since_s < OBSERVED_EVERY_S:
            return
        self._observed_at = now
        told = {gauge: gauge() for gauge in self.gauges}
        queues_s = {gauge: queue_s for gauge, (arrived, queue_s) in told.items() if arrived}
        if not queues_s or since_s > IDLE_S:
            return
        queue_s = min(queues_s.values())
        if queue_s > QUEUE_S:
            self._waiting = (self._waiting | queues_s.keys()) & self.gauges
        self._arrived.append(min(self._bytes_per_s, sum(arrived for arrived, _ in told.values()) / since_s))
        self._queued = self._queued + 1 if queue_s > QUEUE_S else 0
        if self._bytes_per_s < math.inf:
            if self._waited or self._queued:
                self._adapt(queue_s)
        elif self._queued > 1:
            self._arrived = deque(list(self._arrived)[-2:], OBSERVATIONS)
            self._adapt(queue_s)

    def _adapt(self, queue_s: float) -> None:
        """Send as much as the line carries; a little more or less while the queue is short or long."""
        self._waited, self._observed = False, self._observed + 1
        share = min(MORE, max(LESS, 1 + QUEUE_S - queue_s))
        if queue_s > LONG_QUEUE_S:
            carries = max(list(self._arrived)[-LATEST:])
        else:
            carries = max(self._arrived)
            share = MORE if self._observed % CYCLE < PROBES else share
        self._set(max(LEAST_BPS / 8, share * carries))


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
UNPACKED_BYTES = 64
"""That cost as much as one of a header: 64 MiB a second, to unpack which takes half a core."""
UNPACKED_OF_ALL_PER_S = 1.5 * CONTROL_BYTES_PER_S
"""Of all callers but those that are wanted: three quarters of a core, 96 MiB a second."""
CALL_BYTES, HEADER_SHARE, LEAST_REST_S = 1024, 8, 0.02
"""A call of a peer without recent work costs so much more, as a forged ticket takes 0.3 ms, and a header so
small a part: 1,200 calls a second of all together. Less that they owe lets none rest: that takes longer."""
OWN_PER_S, OWN_AT_ONCE = 4096.0, 16384.0
"""Of that each has so much for itself, whatever a crowd owes: three short calls a second. Replicas of stages
that are no neighbours give each other no bodies, but once a second they tell how far their stages are."""
ANSWERS = frozenset({frames.Kind.ALIVE, frames.Kind.ACCEPT, frames.Kind.RESULT, frames.Kind.ERROR})
"""Frames of those that we call. A trainer gets no body of stage 0: it would wait for a crowd's calls."""
WANTED_S = 60.0
"""One is for so long after a handler took a body of more than a chunk from it, or asked it for one: a crowd
of strangers slows down strangers only."""
FRAME_BYTES = 256
"""What a frame costs besides its header: so a body of single bytes is slowed down, too. 4,096 frames a second
are 8 Gbit/s of bodies in whole chunks."""
EARLY_BYTES = 8 * (frames.WINDOW_BYTES + frames.MAX_HEADER_BYTES)
"""What one caller can make us hold: of bodies that we did not accept yet, and headers that are worked on."""
EARLY_BYTES_OF_ALL = 512 << 20
EARLY_SHARE = 8
"""A caller may hold at most this part of what is left of that: so what is left for a new one never ends, and
is as much as any of N others has, 512 / (8 + N) MiB, however many there are (dynamic thresholds: Choudhury
and Hahne, 1998)."""
UNREAD_BYTES_OF_ALL = 512 << 20
"""Of answers that strangers may ask for, until they are sent: shared as those are, but each may have one."""
CROWDED = 2
"""Where less than this part of it is left ..."""
UNREAD_REST_S = 30.0
"""A caller that took nothing of an answer and left it gets none for so long."""


class Allowance:
    """A token bucket: so much at once, and so much a second."""

    def __init__(self, per_s: float, at_once: float) -> None:
        self._per_s, self._most, self._left, self._at = per_s, at_once, at_once, float("-inf")

    def keep_to(self, per_s: float, at_once: float) -> None:
        """Another pace from now on: what is owed stays owed."""
        self._per_s, self._most, self._left = per_s, at_once, min(at_once, self._left)

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
        return self.left(now=now) >= amount and self.take(amount, now=now) == 0.0


class Line:
    """The line to one peer, over all streams: what passed, what that tells, and what the peer may do."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self.limiter = traffic.limiter
        """Of what we send: one for all lines."""
        self.sent_bytes = 0
        self.received_bytes = 0
        """Calls of the peer and its answers to ours share the line."""
        self.memory_bytes = 0
        """Of both: what did not leave this machine (`peers.net.direct.memory`)."""
        self.held_bytes = 0
        """Of bodies that were not accepted yet, and headers that are worked on."""
        self.unread_bytes = 0
        """Of answers that strangers may ask for: given to it, and not sent yet."""
        self.left_unread_at = float("-inf")
        """When it gave up such an answer, and took nothing of it."""
        self.worked_at = self.wanted_at = float("-inf")
        """When a body of it was accepted last, and one of more than a chunk."""
        self.handling = 0
        """Its calls that are worked on."""
        self.logged_at = float("-inf")
        """When it was last said that it does what it may not."""
        self._round_trips_s: deque[float] = deque(maxlen=_ROUND_TRIPS)
        self._rates_bps: deque[float] = deque(maxlen=_BODIES)
        self._calls = Allowance(CALLS_PER_S, CALLS_AT_ONCE)
        self._control = Allowance(CONTROL_BYTES_PER_S, CONTROL_BYTES_AT_ONCE)
        self._answers, self._own = Allowance(CALLS_PER_S, CALLS_AT_ONCE), Allowance(OWN_PER_S, OWN_AT_ONCE)

    @property
    def least_round_trip_s(self) -> float:
        """Of small calls lately; infinite: there was none."""
        return min(self._round_trips_s, default=math.inf)

    def answered(self, took_s: float, sent_bytes: int) -> None:
        """The first sign of the other end, so long after a call of so many bytes."""
        if sent_bytes <= SMALL_BYTES and took_s > 0:
            self._round_trips_s.append(took_s)

    def received(self, size_bytes: int, all_bytes: int, took_s: float) -> None:
        """A body of `size_bytes` is whole `took_s` after its header; `all_bytes` came meanwhile."""
        if size_bytes >= TELLING_BYTES:
            self._rates_bps.append(min(MAX_BPS, 8 * all_bytes / took_s) if took_s > 0 else MAX_BPS)

    def count(self, *, sent: int = 0, received: int = 0, in_memory: bool) -> None:
        """Bytes that passed, frames included."""
        self.sent_bytes += sent
        self.received_bytes += received
        self.memory_bytes += (sent + received) * in_memory

    def path(self) -> NetworkPath:
        """The line as far as it is known. What goes the other way is no wider than our limit."""
        rates_bps = sorted(self._rates_bps) or [0.0]
        most_bps = math.inf if self.memory_bytes else self.limiter.limit_bps
        return NetworkPath(
            rtt_s=min(self._round_trips_s, default=0.0),
            bandwidth_bps=min(most_bps, rates_bps[len(rates_bps) // 2]), sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes, memory_bytes=self.memory_bytes,
        )  # fmt: skip

    def pays(self, frame: frames.Prefix, *, now: float) -> float:
        """Note a frame that it sends; how long to read nothing more of it, in seconds."""
        is_call, is_part = frame.kind is frames.Kind.CALL, frame.kind is frames.Kind.BODY
        calls_s, of_all_s = self._calls.take(1.0, now=now) if is_call else 0.0, 0.0
        # What a packed part unpacks to pays.
        header_bytes = frame.header_bytes * (frame.kind is not frames.Kind.PACKED)
        if now - (self.wanted_at if is_part and header_bytes else self.worked_at) > WANTED_S:
            shared = header_bytes if is_part else header_bytes // HEADER_SHARE + CALL_BYTES * is_call
            cost, is_answer = FRAME_BYTES + shared, frame.kind in ANSWERS
            own, costs = (self._answers, 1.0) if is_answer else (self._own, math.inf if is_part else cost)
            if not own.take_if_there(costs, now=now):
                of_all_s = self._traffic.strangers.take(cost, now=now)
                of_all_s *= is_part or of_all_s > LEAST_REST_S
        return max(calls_s, of_all_s, self._control.take(FRAME_BYTES + header_bytes, now=now))

    def owes(self, *, now: float) -> bool:
        """Whether it has said more than it may itself, whatever others said."""
        return min(self._calls.left(now=now), self._control.left(now=now)) < 0

    def wants(self, body_bytes: int, *, now: float) -> None:
        """Note that a body of it is accepted."""
        if body_bytes:
            self.worked_at = now
        if body_bytes > frames.CHUNK_BYTES:
            self.wanted_at = now

    def may_hold(self, more_bytes: int) -> bool:
        """Whether so much more may be held of its bodies and headers."""
        share = (EARLY_BYTES_OF_ALL - self._traffic.held_bytes) // EARLY_SHARE
        return self.held_bytes + more_bytes <= min(EARLY_BYTES, share)

    def may_have_done(self, header_bytes: int) -> bool:
        """Whether a call may be worked on: short ones of each caller, whatever all others hold."""
        return self.held_bytes + header_bytes <= frames.CHUNK_BYTES or self.may_hold(header_bytes)

    def holds(self, more_bytes: int) -> None:
        """Note that so much more is held, or less."""
        self.held_bytes += more_bytes
        self._traffic.held_bytes += more_bytes

    def may_be_given(self, more_bytes: int) -> bool:
        """Whether an answer of so many bytes, which strangers may ask for, may be held until it is sent."""
        left = UNREAD_BYTES_OF_ALL - self._traffic.unread_bytes
        return self.unread_bytes + more_bytes <= (left // EARLY_SHARE if self.unread_bytes else left)

    def rests(self, *, now: float) -> bool:
        """Whether it left such an answer a moment ago, and there is little room for those of all."""
        left = UNREAD_BYTES_OF_ALL - self._traffic.unread_bytes
        return now - self.left_unread_at < UNREAD_REST_S and CROWDED * left < UNREAD_BYTES_OF_ALL

    def gives(self, more_bytes: int) -> None:
        """Note that so much more of such answers is not sent yet, or less."""
        self.unread_bytes += more_bytes
        self._traffic.unread_bytes += more_bytes


class Traffic(Mapping[PeerId, NetworkPath]):
    """What all streams share: the lines to peers, one limiter, and room for bodies; read as what is known of
    each line.

    A peer whose streams ended is remembered: a new one is no new allowance.
    """

    def __init__(self, *, most_peers: int) -> None:
        """`most_peers`: of more, the one that opened a stream longest ago is forgotten."""
        self.limiter = RateLimiter()
        self.lines: dict[PeerId, Line] = {}
        self.held_bytes = self.unread_bytes = 0
        self.strangers = Allowance(UNPACKED_OF_ALL_PER_S, CONTROL_BYTES_AT_ONCE)
        """What all may say and have unpacked together, but those that are wanted."""
        self._most_peers = most_peers

    def of(self, peer: PeerId) -> Line:
        """The line to a peer to which, or from which, a stream is opened."""
        line = self.lines[peer] = self.lines.pop(peer, None) or Line(self)
        if len(self.lines) > self._most_peers:
            del self.lines[next(iter(self.lines))]
        return line

    def __getitem__(self, peer: PeerId) -> NetworkPath:
        return self.lines[peer].path()

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)
