"""Is this program well? The program itself answers, on a unix socket: for a container's health check.

    swarm peer … --health SOCKET      answers there, from the loop that does its work
    swarm health SOCKET               asks, prints a line, and ends with 0 or 1

A program is well if it is in the network and its loop and its p2pd answer in time. A process that hangs, or
was stopped, accepts the connection, since the kernel does that, and says nothing. Being alone, or still
downloading, is said but is not ill: a restart would make it worse.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from peers.events import Emit, Event, Moved, Paused, Serving, Started, StopNow, count, version_of
from peers.owner import control_socket
from peers.waiting import within
from swarm.errors import SwarmError, short

P2PD_S = 3.0
STATES: dict[type[Event], str] = {
    Serving: "serving stage {stage}",
    Paused: "paused at stage {stage}",
    Moved: "moving to stage {to_stage}",
    StopNow: "leaving",
}
"""What a peer does after an event."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What a program says of itself."""

    role: str
    peer: str = ""
    state: str = "starting"
    """`starting` until it is in the network; then what it does, in words."""
    version: int = -1
    """Steps of the run that are in its weights, or that it saw; -1 = none yet."""
    connected: int = -1
    """Peers that its p2pd is connected to; -1: p2pd did not answer."""

    @property
    def ill(self) -> str:
        """Why it is not well; empty if it is."""
        if self.state == "starting":
            return "it is not in the network yet"
        return "its p2pd does not answer" if self.connected < 0 else ""

    def words(self) -> str:
        """One line."""
        name = f"{self.role} {short(self.peer)}" if self.peer else self.role
        if self.ill:
            return f"{name} is not well: {self.ill}"
        at = f" at version {self.version}" if self.version >= 0 else ""
        return f"{name}: {self.state}{at}, connected to {count(self.connected, 'peer')}"


class Pulse:
    """Follows what a role does by its events; called with each, which it passes on."""

    def __init__(self, role: str, emit: Emit) -> None:
        self._emit = emit
        self.health = Health(role=role)

    def __call__(self, event: Event) -> None:
        if (version := version_of(event)) is not None:
            self.health = replace(self.health, version=version)
        if isinstance(event, Started):
            state = "joining" if event.role == "peer" else "in the network"
            self.health = replace(self.health, peer=event.peer, state=state)
        elif words := STATES.get(type(event)):
            self.health = replace(self.health, state=words.format_map(msgspec.structs.asdict(event)))
        self._emit(event)


def answering(
    path: Path, health: Callable[[], Health], connected: Callable[[], Awaitable[int]],
    *, p2pd_s: float = P2PD_S,
) -> AbstractAsyncContextManager[None]:  # fmt: skip
    """Answer at `path` while the block runs; raises as `control_socket.answering`.

    `connected` asks p2pd how many peers it is connected to. If that fails or takes longer than `p2pd_s`,
    p2pd is not well.
    """

    async def answer(_: control_socket.Do) -> Health:
        number = -1
        with contextlib.suppress(SwarmError, asyncio.TimeoutError):
            number = await within(connected(), p2pd_s)
        return replace(health(), connected=number)

    return control_socket.answering(path, "--health", answer)
