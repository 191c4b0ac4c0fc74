"""Sealed records without a socket."""

from __future__ import annotations

from peers.net.direct.records import Opener


def put(opener: Opener, data: bytes) -> bytes:
    """All that these bytes complete, as if they had come on the line."""
    plain, rest = b"", memoryview(data)
    while rest:
        part = rest[: opener.room().nbytes]
        opener.room()[: part.nbytes] = part
        plain, rest = plain + bytes(opener.came(part.nbytes)), rest[part.nbytes :]
    return plain
