"""`swarm pause` and `swarm resume`: the owner speaks to the peers of this machine, never over the network.

Each peer answers on a unix socket in the cache folder, named by its process and for its user only:
`~/.cache/swarm/control/PID.sock`. A program that can open it could as well kill the process. The commands are
in `peers.programs.owner`. Question and answer are a line of JSON each; health checks use such sockets too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from peers.owner.commands import Owner
from peers.storage import cache_folder
from peers.storage.atomic_file import as_setup_error
from peers.waiting import happens, within
from swarm.errors import SetupError, short

DONE_S = 120.0
"""For a pause or its end. --pause-within bounds finishing; the copy of a large state takes seconds, and a
device that hangs is given up before."""


class PeerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    peer: str
    device: str
    identity: str
    """The path of its key file; empty: its key was made for this one life."""
    doing: str
    words: str

    def line(self) -> str:
        """For people."""
        return f"peer {short(self.peer)} on {self.device}, pid {self.pid}: {self.words or self.doing}"


def control_folder() -> Path:
    return cache_folder() / "control"


@contextlib.asynccontextmanager
async def obeying(owner: Owner, about: Callable[[], PeerAnswer]) -> AsyncIterator[None]:
    """Do what the owner commands on this process's socket while the block runs; `about` describes this peer.

    Raises:
        SetupError: no socket can be made there.
    """
    folder = control_folder()
    with as_setup_error(f"{folder} cannot be made", "; set SWARM_CACHE to a folder of yours"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    for path in folder.glob("*.sock"):
        if not (Path("/proc", path.stem).exists() or _answers(path)):  # one that starts listens in a moment
            path.unlink(missing_ok=True)  # its peer was killed

    async def answer(do: Do) -> PeerAnswer:
        if do == "pause":
            owner.pause("by hand", "swarm pause")
            await _until(owner, lambda: not owner.paused or owner.doing in ("paused", "leaving"))
        elif do == "resume":
            owner.resume()
            await _until(owner, lambda: owner.paused or owner.doing not in ("paused", "pausing"))
        return about()

    path = folder / f"{os.getpid()}.sock"
    async with answering(path, "the owner's socket", answer):
        yield


async def _until(owner: Owner, done: Callable[[], bool]) -> None:
    while not done():
        await happens(owner.changed, DONE_S)


QUESTION_S = 5.0
"""An answer takes milliseconds; a loop on a very busy machine may be late by a second or two."""
LAST_ANSWERS_S = 1.0
MAX_BYTES = 64 * 1024

Do: TypeAlias = Literal["look", "pause", "resume"]


@contextlib.asynccontextmanager
async def answering(path: Path, what: str, answer: Callable[[Do], Awaitable[Any]]) -> AsyncIterator[None]:
    """Answer on a socket at `path` while the block runs; what was asked before its end, a moment longer.

    Args:
        what: names the socket in errors.
        answer: a question -> its answer, which msgspec encodes.

    Raises:
        SetupError: another program answers there, or no socket can be made there.
    """
    asked: set[asyncio.Task[None]] = set()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        asked.add(task)
        task.add_done_callback(asked.discard)
        with contextlib.suppress(ConnectionError, ValueError, msgspec.MsgspecError, asyncio.TimeoutError):
            question = msgspec.json.decode(await within(reader.readline(), QUESTION_S), type=Do)
            writer.write(msgspec.json.encode(await answer(question)) + b"\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(converse, sock=listen(path, what), limit=MAX_BYTES)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        if asked:
            await asyncio.wait(asked, timeout=LAST_ANSWERS_S)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(QUESTION_S)
        return probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def listen(path: Path, what: str) -> socket.socket:
    """A listening socket at `path`; one that a killed program left is replaced. Raises as `answering`."""
    with contextlib.ExitStack() as on_error:
        listener = on_error.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        with as_setup_error(
            f"{what} {path}: no socket can be made there", ". Name another, or remove what is there"
        ):
            if path.is_socket():
                if _answers(path):
                    raise SetupError(f"{what} {path}: another program answers there; give each its own")
                path.unlink(missing_ok=True)
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            listener.listen(8)
        on_error.pop_all()
        return listener
