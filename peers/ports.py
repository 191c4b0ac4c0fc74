"""What the loops know of the world. `peers/net` fulfils these with hivemind, tests with memory."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, TypeAlias, TypeVar

from swarm.ids import PeerId, Stage
from swarm.protocol.statements import Signer
from swarm.records import PeerRecord
from swarm.wire.buffers import Buffer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a handler returns and a caller gets: a small header and raw buffers."""

    header: bytes
    body: Sequence[Buffer] = field(default=())


class Request(Protocol):
    """A call as its handler sees it: the header first, the body when asked for."""

    peer: PeerId
    """The caller; authenticated by libp2p."""
    header: bytes
    body_sizes: Sequence[int]
    """Bytes of each announced buffer; nothing of them was received or reserved yet."""

    @property
    def passed_bytes(self) -> int:
        """What is here of the body, and what the caller was sent of the answer."""
        ...

    async def accept(self) -> list[memoryview]:
        """Tell the caller `accepted` and receive the body (writable buffers).

        Raising before calling this refuses the call cheaply: the caller stops sending.
        """
        ...


Handler: TypeAlias = Callable[[Request], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class NetworkPath:
    """What the line between this peer and another can do, and has done; 0 = not measured."""

    rtt_s: float = 0.0
    bandwidth_bps: float = 0.0
    """Bits per second that came from the other."""
    sent_bytes: int = 0
    received_bytes: int = 0
    memory_bytes: int = 0
    """Of both, handed over in memory: the other is on the same machine."""


class Transport(Protocol):
    """Calls between peers. A call is answered with `accepted`, `alive` each second, then the result."""

    peer_id: PeerId

    @property
    def signer(self) -> Signer:
        """The key of this peer, which also checks what others signed."""
        ...

    @property
    def lines(self) -> Mapping[PeerId, NetworkPath]:
        """What is known of the lines to others, from what passed over them."""
        ...

    def invited(self, peer: PeerId, /) -> bool:
        """Whether the run's owner named a peer to serve a stage, or gave it a token that holds."""
        ...

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int = 0) -> None:
        """Answer `method`. A handler's SwarmError becomes the answer; other exceptions are bugs."""
        ...

    async def call(
        self, peer: PeerId, method: str, header: bytes, body: Sequence[Buffer] = (), *,
        max_answer_bytes: int = 0, deadline_s: float | None = None,
    ) -> Answer:  # fmt: skip
        """Call `method` of `peer`.

        Raises:
            PeerGone: unreachable, or the connection broke.
            PeerSilent: no heartbeat within the silence limit, the answer was lost, or `deadline_s` passed.
            BadAnswer: malformed, or larger than `max_answer_bytes`.
            Busy, NotReady, Leaving, Stale, Refused: the peer's answers.
        """
        ...


class Directory(Protocol):
    """Which peer serves which stage, from the DHT; verified records only.

    Those of the stages that are watched are a few seconds old, however many peers there are. The others are,
    too, in a run of hundreds; in a larger one they are as old as `lag_s` says.
    """

    def watch(self, stages: Collection[Stage] | None) -> None:
        """With which stages this peer works from now on; None: with all, as at the beginning."""
        ...

    def peers(self) -> Sequence[PeerRecord]:
        """The records known now, sorted by peer id; refreshed in the background.

        Not to be changed. The same object means that nothing has changed.
        """
        ...

    def at(self, stage: Stage) -> Sequence[PeerRecord]:
        """Those of one stage, likewise: many look for each microbatch."""
        ...

    def find(self, peer: PeerId) -> PeerRecord | None:
        """That of one peer."""
        ...

    @property
    def lag_s(self) -> float:
        """Seconds since the oldest part of the picture was asked for; infinite before all of it was."""
        ...

    async def refresh(self, stages: Collection[Stage] | None = None) -> Sequence[PeerRecord]:
        """Ask the DHT now for some stages, or for those that are watched; all records that are known then."""
        ...

    async def lookup_all(self) -> Sequence[PeerRecord]:
        """Ask the DHT now for all stages. For newcomers and monitors: in a large run it takes seconds."""
        ...

    async def announce(self, record: PeerRecord) -> None:
        """Publish our own record until it expires or is replaced."""
        ...

    async def withdraw(self) -> None:
        """Replace our record by one that says `left`."""
        ...


class Rank(IntEnum):
    """Which job goes first. Forwards take turns with backwards: stages behind wait for them."""

    STEP = 0
    COMPUTE = 1
    IDLE = 2


class Books:
    """What sums and ledgers are changed under: a lock that knows its holder."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._holder = 0
        self._lock.release()

    def check(self) -> None:
        """A ledger is about to change: a bug of ours if the caller does not hold the books."""
        assert self._holder == threading.get_ident(), "a ledger changes outside of a job that holds the books"


class StageDevice(Protocol):
    """What computes for one stage. Jobs begin by rank, then by step, then in order of arrival.

    A job of rank `STEP` runs alone: it may change weights, and sees all at rest. The others run several at
    once and change no weights. A sum, and what its ledger says is in it (`done`, `frozen_for`),
    changes only in a job that holds the `books`: one of rank `STEP`, which is given them, or one that takes
    them. What is being computed (`in_progress`) is the event loop's.
    """

    books: Books
    workers: int
    """Jobs that run at once."""
    busy_s: float
    """Seconds of work done, of all workers on average."""
    longest_s: float
    """Of all jobs that ended."""
    abandoned: bool
    """The running jobs are not waited for: one will never end, or all is to end at once."""

    failure: Exception | None
    """A job failed in a way that nothing works on this device any more, in this process."""

    @property
    def running(self) -> int | None:
        """Number of the job that has run longest."""
        ...

    def start(self) -> None:
        """Run jobs from now on, those that wait already first."""
        ...

    def stop(self) -> None:
        """Finish the running jobs unless they are abandoned; the others are not done."""
        ...

    def mean_queue(self) -> float:
        """Jobs that waited or ran, on average since this was last asked."""
        ...

    def elapsed_s(self) -> float:
        """For a job itself: how long it has run. In virtual time, how long it runs in all."""
        ...

    async def run(self, rank: Rank, t: int, job: Callable[..., T], *args: Any) -> T:
        """The result of `job(*args)`, of step `t`. Raises Leaving: the device was stopped before."""
        ...
