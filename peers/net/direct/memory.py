"""Connections between two processes of one machine and one user: unix sockets with abstract names.

What passes there stays in the memory of the machine, and no other user can read it: it is not encrypted.
Linux only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import sys
from pathlib import Path

from swarm.ids import PeerId

AVAILABLE = sys.platform == "linux"
_CREDENTIALS = struct.Struct("=iII")


def address_of(peer: PeerId) -> bytes:
    """Where a peer listens for processes of this machine (and network namespace)."""
    return b"\0swarm/" + peer.encode()


def machine_of(run: str) -> str:
    """Equal for all processes that can connect to one another, another one in each run; empty: none can."""
    if not AVAILABLE:
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    network = Path("/proc/self/ns/net").stat().st_ino
    return hashlib.blake2b(f"{run} {boot} {network} {os.geteuid()}".encode(), digest_size=8).hexdigest()


def listener_of(peer: PeerId) -> socket.socket | None:
    """Where other processes connect; None: it cannot be had, and all goes on without."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address_of(peer))
        listener.listen()
    except OSError:
        listener.close()
        return None
    listener.setblocking(False)
    return listener


def connect(peer: PeerId) -> socket.socket | None:
    """A connection to a peer of this machine and user; None: it is elsewhere, or takes none."""
    near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    near.setblocking(False)
    with contextlib.suppress(OSError):
        near.connect(address_of(peer))
        if of_this_user(near):
            return near
    near.close()
    return None


def of_this_user(near: socket.socket) -> bool:
    """Whether the process at the other end runs for the user that we run for, as the kernel says."""
    told = near.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(told)[1] == os.geteuid()
