"""What the loops know of the world. `peers/net` fulfils these with hivemind, tests with memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from swarm.ids import PeerId, Stage
from swarm.records import PeerRecord
from swarm.wire.buffers import Buffer


@dataclass(frozen=True, slots=True)
class Answer:
    """What a handler returns and a caller gets: a small header and raw buffers."""

    header: bytes
    body: Sequence[Buffer] = field(default=())


class Request(Protocol):
    """A call as its handler sees it: the header first, the body when asked for."""

    peer: PeerId
    """Who calls; authenticated by libp2p."""
    header: bytes
    body_sizes: Sequence[int]
    """Bytes of each announced buffer; nothing of them was received or reserved yet."""

    async def accept(self) -> list[memoryview]:
        """Tell the caller `accepted` and receive the body (writable buffers).

        Raising before calling this refuses the call cheaply: the caller stops sending.
        """
        ...


Handler: TypeAlias = Callable[[Request], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Line:
    """What the line between this peer and another can do; 0 = not measured."""

    rtt_s: float = 0.0
    bandwidth_bps: float = 0.0
    """Bits per second that came from the other."""


PROBE_BYTES = 64 * 1024
"""A body of so much tells the bandwidth: it takes 5 ms at 100 Mbit/s, far more than a read is late."""


class Transport(Protocol):
    """Calls between peers. A call is answered with `accepted`, `alive` each second, then the result."""

    peer_id: PeerId

    @property
    def sent_bytes(self) -> Mapping[PeerId, int]:
        """Bytes sent so far, by the peer at the other end."""
        ...

    @property
    def received_bytes(self) -> Mapping[PeerId, int]:
        """Bytes received so far, by the peer at the other end."""
        ...

    @property
    def lines(self) -> Mapping[PeerId, Line]:
        """What is known of the lines to others, from what passed over them."""
        ...

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int = 0) -> None:
        """Answer `method`. A handler's SwarmError becomes the answer; other exceptions are bugs."""
        ...

    async def call(
        self,
        peer: PeerId,
        method: str,
        header: bytes,
        body: Sequence[Buffer] = (),
        *,
        max_answer_bytes: int = 0,
        deadline_s: float | None = None,
    ) -> Answer:
        """Call `method` of `peer`.

        Raises:
            PeerGone: unreachable, or the connection broke.
            PeerSilent: no heartbeat within the silence limit, the answer was lost, or `deadline_s` passed.
            BadAnswer: malformed, or larger than `max_answer_bytes`.
            Busy, NotReady, Leaving, Stale, Refused: the peer's answers.
        """
        ...


class Directory(Protocol):
    """Who serves what, from the DHT; verified records only.

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

    async def survey(self) -> Sequence[PeerRecord]:
        """Ask the DHT now for all stages. For who joins or looks: in a large run it takes seconds."""
        ...

    async def announce(self, record: PeerRecord) -> None:
        """Publish our own record until it expires or is replaced."""
        ...

    async def withdraw(self) -> None:
        """Replace our record by one that says `left`."""
        ...
