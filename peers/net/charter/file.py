"""A charter in a file: the id of its owner, a line's end, and the signed bytes."""

from __future__ import annotations

import os
from pathlib import Path

from peers.net.charter.signed import open_statement
from swarm.charter import Charter
from swarm.errors import Refused
from swarm.ids import PeerId


def read(path: Path) -> tuple[Charter, PeerId, bytes]:
    """A charter, its owner, and the signed bytes.

    Raises:
        Refused: it is none.
        OSError: it cannot be read.
    """
    owner, _, sealed = path.read_bytes().partition(b"\n")
    try:
        signer = owner.decode()
    except UnicodeDecodeError:
        raise Refused("no owner's id stands before it") from None
    found = open_statement(sealed, signer)
    if not isinstance(found, Charter):
        raise Refused("it is a revocation")
    return found, signer, sealed


def write(path: Path, owner: PeerId, sealed: bytes) -> None:
    """Whole or not at all: several programs may write it at once. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft.write_bytes(owner.encode() + b"\n" + sealed)
    draft.replace(path)
