"""`swarm pause` and `swarm resume`: the owner speaks to the peers of this machine, never over the network.

Each peer answers on a unix socket in the cache folder, named by its process and for its user only:

    ~/.cache/swarm/control/PID.sock      one JSON object each way, a line each

Whoever can open it could as well kill the process. A socket that a killed peer left behind is removed by the
next one who looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from peers.options import OwnerOptions
from peers.owner.commands import Owner
from peers.owner.health_socket import listen
from peers.waiting import happens, within
from swarm.errors import SetupError, short

LOOK_S = 5.0
"""An answer takes milliseconds."""
DONE_S = 120.0
"""For a pause or its end. --pause-within bounds handing over; the copy of a large state takes seconds, and a
device that hangs is given up before."""
LAST_WORDS_S = 1.0
MAX_BYTES = 4096


class OwnerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a peer."""

    do: Literal["look", "pause", "resume"]


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer answers."""

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
    """Where the sockets are."""
    cache = os.environ.get("SWARM_CACHE")
    return (Path(cache) if cache else Path.home() / ".cache" / "swarm") / "control"


@contextlib.asynccontextmanager
async def heard(owner: Owner, said: Callable[[], Said]) -> AsyncIterator[None]:
    """Do what the owner wishes on this process's socket, while the block runs.

    Raises:
        SetupError: no socket can be made there.
    """
    folder = control_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        text = f"{folder} cannot be made: {error.strerror}; set SWARM_CACHE to a folder of yours"
        raise SetupError(text) from None

    asked: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        asked.add(task)
        task.add_done_callback(asked.discard)
        with contextlib.suppress(ConnectionError, ValueError, msgspec.MsgspecError, asyncio.TimeoutError):
            wish = msgspec.json.decode(await within(reader.readline(), LOOK_S), type=OwnerCommand)
            if wish.do == "pause":
                owner.pause("by hand", "swarm pause")
                await _until(owner, lambda: not owner.paused or owner.doing in ("paused", "leaving"))
            elif wish.do == "resume":
                owner.resume()
                await _until(owner, lambda: owner.paused or owner.doing not in ("paused", "pausing"))
            writer.write(msgspec.json.encode(said()) + b"\n")
            await writer.drain()
        writer.close()

    path = folder / f"{os.getpid()}.sock"
    listener = listen(path, "the owner's socket")
    server = await asyncio.start_unix_server(answer, sock=listener, limit=MAX_BYTES)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        if asked:  # a peer that ends instead of pausing still says why
            await asyncio.wait(asked, timeout=LAST_WORDS_S)


async def _until(owner: Owner, done: Callable[[], bool]) -> None:
    while not done():
        await happens(owner.changed, DONE_S)


async def ask(path: Path, wish: OwnerCommand, limit_s: float) -> Said:
    """What the peer at `path` answers, once it has done what is wished.

    Raises:
        SetupError: it does not answer in time, or not what a peer says.
        OSError: nobody is there any more.
    """

    async def call() -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(path), limit=16 * MAX_BYTES)
        try:
            writer.write(msgspec.json.encode(wish) + b"\n")
            return await reader.readline()
        finally:
            writer.close()

    try:
        return msgspec.json.decode(await within(call(), limit_s), type=Said)
    except asyncio.TimeoutError:
        text = f"the peer with pid {path.stem} does not answer within {limit_s:g} s: it hangs"
        raise SetupError(text) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise SetupError(f"what answers at {path} is no peer of the swarm: {error}") from None


def _sockets() -> Iterator[Path]:
    yield from sorted(control_folder().glob("*.sock"))


async def run_wish(do: Literal["pause", "resume"], options: OwnerOptions) -> None:
    """Have all peers that are meant do it, at once, and print what each says.

    Raises:
        SetupError: there is none, or one does not answer.
    """
    found: dict[Path, Said] = {}
    trouble: list[str] = []  # one that hangs must not keep the others from what their owner wants
    for path in _sockets():
        if options.pid is not None and path.stem != str(options.pid):
            continue
        try:
            found[path] = await ask(path, OwnerCommand(do="look"), LOOK_S)
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)  # it was killed
        except OSError as error:
            trouble.append(f"the peer with pid {path.stem} cannot be asked: {error.strerror or error}")
        except SetupError as error:
            trouble.append(error.text)
    meant = [path for path, said in found.items() if _is_meant(said, options)]
    if not meant and not trouble:
        there = "; ".join(said.line() for said in found.values()) or "none runs"
        raise SetupError(f"no peer of yours on this machine is meant by that: {there}")
    answers = await asyncio.gather(
        *(ask(path, OwnerCommand(do=do), DONE_S + LOOK_S) for path in meant), return_exceptions=True
    )
    for path, answer in zip(meant, answers, strict=True):
        if isinstance(answer, Said):
            print(answer.line(), flush=True)
        elif isinstance(answer, SetupError):
            trouble.append(answer.text)
        elif isinstance(answer, OSError):
            trouble.append(f"the peer with pid {path.stem} ended meanwhile")
        else:
            raise answer
    if trouble:
        raise SetupError("; ".join(trouble))


def _is_meant(said: Said, options: OwnerOptions) -> bool:
    if options.identity is not None and said.identity != str(options.identity.absolute()):
        return False
    return options.device in (None, said.device)
