"""Is this program well? The program itself answers, on a unix socket: for a container's health check.

    swarm peer … --health SOCKET      answers there, from the loop that does its work
    swarm health SOCKET               asks, prints a line, and ends with 0 or 1

Well is who is in the network and whose loop and p2pd answer in time. A process that hangs, or was stopped,
accepts the connection, since the kernel does that, and says nothing. Being alone, or still downloading, is
said but is not ill: whoever starts ill programs again would make it worse.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import msgspec

from peers import events
from peers.events import Emit, Event, count
from peers.options import HealthOptions
from peers.waiting import within
from swarm.errors import SetupError, SwarmError, short

ANSWER_S = 5.0
"""An answer takes milliseconds; a loop on a very busy machine may be late by a second or two."""
P2PD_S = 3.0
MAX_BYTES = 64 * 1024

Connected: TypeAlias = Callable[[], Awaitable[int]]
"""Asks p2pd how many peers it is connected to; raises SwarmError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
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
        who = f"{self.role} {short(self.peer)}" if self.peer else self.role
        if self.ill:
            return f"{who} is not well: {self.ill}"
        at = f" at version {self.version}" if self.version >= 0 else ""
        return f"{who}: {self.state}{at}, connected to {count(self.connected, 'peer')}"


class Pulse:
    """Knows from its events what a role does; called with each, which it passes on."""

    def __init__(self, role: str, emit: Emit) -> None:
        self._emit = emit
        self.health = Health(role=role)

    def __call__(self, event: Event) -> None:
        self.health = observe(self.health, event)
        self._emit(event)


def observe(health: Health, event: Event) -> Health:
    """What is known after one more event."""
    if isinstance(event, events.Started):
        state = "joining" if event.role == "peer" else "in the network"
        return replace(health, peer=event.peer, state=state)
    if isinstance(event, events.Serving):
        return replace(health, state=f"serving stage {event.stage}", version=event.version)
    if isinstance(event, events.Paused):
        return replace(health, state=f"paused at stage {event.stage}")
    if isinstance(event, events.Moved):
        return replace(health, state=f"moving to stage {event.to_stage}")
    if isinstance(event, events.StateFetched | events.Kept):
        return replace(health, version=event.version)
    if isinstance(event, events.StepDone | events.Stepped):
        return replace(health, version=event.t + 1)
    if isinstance(event, events.RolledBack):
        return replace(health, version=event.step)
    if isinstance(event, events.Paused):
        return replace(health, state=f"paused at stage {event.stage}")
    if isinstance(event, events.StopNow):
        return replace(health, state="leaving")
    return health


@contextlib.asynccontextmanager
async def answering(path: Path, health: Callable[[], Health], connected: Connected) -> AsyncIterator[None]:
    """Answer on a unix socket at `path`, for this user only, while the block runs.

    A `connected` that fails, or gives no answer within `P2PD_S`, means that p2pd is not well.

    Raises:
        SetupError: somebody answers there already, or no socket can be made there.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            number = -1
            with contextlib.suppress(SwarmError, asyncio.TimeoutError):
                number = await within(connected(), P2PD_S)
            writer.write(msgspec.json.encode(replace(health(), connected=number)))
            await writer.drain()
        writer.close()

    listener = listen(path, "--health")
    server = await asyncio.start_unix_server(answer, sock=listener)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


def listen(path: Path, what: str) -> socket.socket:
    """A listening unix socket at `path`, for this user only; one that a killed program left is replaced.

    Raises:
        SetupError: somebody answers there, or none can be made; `what` names it.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            gone = contextlib.suppress(ConnectionRefusedError, FileNotFoundError)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, gone:
                probe.settimeout(ANSWER_S)
                probe.connect(str(path))
                raise SetupError(f"{what} {path}: another program answers there; give each its own socket")
            path.unlink(missing_ok=True)  # of one that was killed
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(8)
    except OSError as error:
        listener.close()
        why = error.strerror or error  # "AF_UNIX path too long" has no number
        raise SetupError(f"{what} {path}: no socket can be made there: {why}") from None
    except SetupError:
        listener.close()
        raise
    return listener


async def ask(path: Path, limit_s: float = ANSWER_S) -> Health:
    """What the program that answers at `path` says.

    Raises:
        SetupError: nobody answers there, or not in time, or not what a program of ours says.
    """

    async def read() -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(path))
        try:
            return await reader.read(MAX_BYTES)
        finally:
            writer.close()

    try:
        return msgspec.json.decode(await within(read(), limit_s), type=Health)
    except asyncio.TimeoutError:
        raise SetupError(f"the program at {path} does not answer within {limit_s:g} s: it hangs") from None
    except OSError as error:
        raise SetupError(f"nobody answers at {path}: {error.strerror or error}") from None
    except msgspec.MsgspecError as error:
        raise SetupError(f"what answers at {path} is no program of the swarm: {error}") from None


async def run_health(options: HealthOptions) -> bool:
    """Ask, print, and say whether it is well."""
    health = await ask(options.socket)
    if options.json:
        print(msgspec.json.encode({"well": not health.ill, **msgspec.to_builtins(health)}).decode())
    else:
        print(health.words())
    return not health.ill
