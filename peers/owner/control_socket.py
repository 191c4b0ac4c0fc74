"""`swarm pause` and `swarm resume`: the owner speaks to the peers of this machine, never over the network.

Each peer answers on a unix socket in the cache folder, named by its process and for its user only:
`~/.cache/swarm/control/PID.sock`. A program that can open it could as well kill the process. The commands are
in `peers.programs.owner`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from peers.owner import local_socket
from peers.owner.commands import Owner
from peers.owner.local_socket import OwnerCommand
from peers.storage import cache_folder
from peers.storage.atomic_file import told
from peers.waiting import happens
from swarm.errors import short

DONE_S = 120.0
"""For a pause or its end. --pause-within bounds handing over; the copy of a large state takes seconds, and a
device that hangs is given up before."""


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
    return cache_folder() / "control"


@contextlib.asynccontextmanager
async def obeying(owner: Owner, about: Callable[[], PeerAnswer]) -> AsyncIterator[None]:
    """Do what the owner commands on this process's socket while the block runs; `about` describes this peer.

    Raises:
        SetupError: no socket can be made there.
    """
    folder = control_folder()
    with told(f"{folder} cannot be made", "; set SWARM_CACHE to a folder of yours"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)

    async def answer(command: OwnerCommand) -> PeerAnswer:
        if command.do == "pause":
            owner.pause("by hand", "swarm pause")
            await _until(owner, lambda: not owner.paused or owner.doing in ("paused", "leaving"))
        elif command.do == "resume":
            owner.resume()
            await _until(owner, lambda: owner.paused or owner.doing not in ("paused", "pausing"))
        return about()

    path = folder / f"{os.getpid()}.sock"
    async with local_socket.answering(path, "the owner's socket", answer):
        yield


async def _until(owner: Owner, done: Callable[[], bool]) -> None:
    while not done():
        await happens(owner.changed, DONE_S)
