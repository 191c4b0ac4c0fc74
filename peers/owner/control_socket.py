"""`swarm pause` and `swarm resume`: the owner speaks to the peers of this machine, never over the network.

Each peer answers on a unix socket in the cache folder, named by its process and for its user only:
`~/.cache/swarm/control/PID.sock`. A program that can open it could as well kill the process. The next command
removes a socket that a killed peer left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from peers.options import OwnerOptions, PauseOptions, ResumeOptions
from peers.owner import local_socket
from peers.owner.commands import Owner
from peers.waiting import happens
from swarm.errors import SetupError, short

DONE_S = 120.0
"""For a pause or its end. --pause-within bounds handing over; the copy of a large state takes seconds, and a
device that hangs is given up before."""


Do: TypeAlias = Literal["look", "pause", "resume"]


class OwnerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a peer."""

    do: Do


class PeerAnswer(msgspec.Struct, frozen=True, kw_only=True):
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
async def obeying(owner: Owner, about: Callable[[], PeerAnswer]) -> AsyncIterator[None]:
    """Do what the owner commands on this process's socket while the block runs; `about` describes this peer.

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

    async def answer(command: OwnerCommand) -> PeerAnswer:
        if command.do == "pause":
            owner.pause("by hand", "swarm pause")
            await _until(owner, lambda: not owner.paused or owner.doing in ("paused", "leaving"))
        elif command.do == "resume":
            owner.resume()
            await _until(owner, lambda: owner.paused or owner.doing not in ("paused", "pausing"))
        return about()

    path = folder / f"{os.getpid()}.sock"
    async with local_socket.answering(path, "the owner's socket", answer, question=OwnerCommand):
        yield


async def _until(owner: Owner, done: Callable[[], bool]) -> None:
    while not done():
        await happens(owner.changed, DONE_S)


async def _ask(path: Path, do: Do, limit_s: float) -> PeerAnswer:
    """What the peer at `path` answers, once it has done that; raises as `local_socket.ask`."""
    name = f"the peer with pid {path.stem}"
    return await local_socket.ask(path, name, PeerAnswer, OwnerCommand(do=do), limit_s=limit_s)


async def run_command(
    options: PauseOptions | ResumeOptions, *, question_s: float = local_socket.QUESTION_S
) -> None:
    """Pause or resume all peers that are meant, at once, and print what each says.

    Raises:
        SetupError: there is none, or one does not answer.
    """
    do: Do = "pause" if isinstance(options, PauseOptions) else "resume"
    found: dict[Path, PeerAnswer] = {}
    trouble: list[str] = []  # one that hangs must not keep the others from what their owner wants
    for path in sorted(control_folder().glob("*.sock")):
        if options.pid is not None and path.stem != str(options.pid):
            continue
        try:
            found[path] = await _ask(path, "look", question_s)
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
        *(_ask(path, do, DONE_S + question_s) for path in meant), return_exceptions=True
    )
    for path, answer in zip(meant, answers, strict=True):
        if isinstance(answer, PeerAnswer):
            print(answer.line(), flush=True)
        elif isinstance(answer, SetupError):
            trouble.append(answer.text)
        elif isinstance(answer, OSError):
            trouble.append(f"the peer with pid {path.stem} ended meanwhile")
        else:
            raise answer
    if trouble:
        raise SetupError("; ".join(trouble))


def _is_meant(said: PeerAnswer, options: OwnerOptions) -> bool:
    if options.identity is not None and said.identity != str(options.identity.absolute()):
        return False
    return options.device in (None, said.device)
