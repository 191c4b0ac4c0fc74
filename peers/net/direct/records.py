"""A stream of bytes as sealed records. Without IO.

    record = length (4) | AES-256-GCM of at most 64 KiB, with its tag

Each direction has a key, and a record's nonce is its number. A stream that is cut ends early, which tells
nothing by itself: what is in it says its own length (`swarm.wire.frames`).
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from peers.net.body_buffers import new_buffer
from swarm.errors import Refused
from swarm.wire import frames
from swarm.wire.buffers import Buffer

KEY_BYTES = 32
TAG_BYTES = 16
LENGTH_BYTES = 4
MAX_PLAIN_BYTES = frames.CHUNK_BYTES // 4 + frames.PREFIX_BYTES
"""A quarter of a chunk: whole ones cost no less CPU, and come once in 4 s on 64 kB/s (2026-11-26)."""
MAX_RECORD_BYTES = LENGTH_BYTES + MAX_PLAIN_BYTES + TAG_BYTES
SMALL_BYTES = 16 * 1024
"""Records of less cost about as much as large ones."""
READ_RECORDS = 2
"""At once: fewer reads and less Python for each byte (2026-11-27); four are no better."""
RECORDS_PER_KEY = 1 << 20
"""64 GiB at most: what an attacker of AES-GCM may hope for grows with the square of that."""


class _Keys:
    """Key and nonce of each record of one direction, in turn. A key that is used up makes the next one."""

    def __init__(self, key: bytes, records_per_key: int) -> None:
        self._key, self._aead, self._most, self.count = key, AESGCM(key), records_per_key, 0

    def next(self) -> tuple[AESGCM, bytes]:
        if self.count == self._most:
            self._key, self.count = HKDFExpand(SHA256(), KEY_BYTES, b"next key").derive(self._key), 0
            self._aead = AESGCM(self._key)
        nonce = self.count.to_bytes(12, "big")
        self.count += 1
        return self._aead, nonce


class Sealer:
    def __init__(self, key: bytes, records_per_key: int = RECORDS_PER_KEY) -> None:
        self._keys = _Keys(key, records_per_key)

    def seal(self, parts: Sequence[Buffer]) -> memoryview:
        """What to send for these bytes, in one piece. All but the last part are short, such as prefixes."""
        *heads, last = map(memoryview, parts)
        first = MAX_PLAIN_BYTES - sum(head.nbytes for head in heads)
        assert first > 0
        plains: list[Buffer] = [b"".join((*heads, last[:first])) if heads else last[:first]]
        plains += [last[at : at + MAX_PLAIN_BYTES] for at in range(first, last.nbytes, MAX_PLAIN_BYTES)]
        sealed, at = new_buffer(sum(map(len, plains)) + len(plains) * (LENGTH_BYTES + TAG_BYTES)), 0
        for plain in plains:
            (aead, nonce), size = self._keys.next(), len(plain) + TAG_BYTES
            start, end = at + LENGTH_BYTES, at + LENGTH_BYTES + size
            sealed[at:start], at = size.to_bytes(LENGTH_BYTES, "big"), end
            aead.encrypt_into(nonce, plain, None, sealed[start:end])
        return sealed


class Opener:
    """The end that receives: `room` is where the next bytes go, `came` opens the records that are whole."""

    def __init__(self, key: bytes, records_per_key: int = RECORDS_PER_KEY) -> None:
        self._keys = _Keys(key, records_per_key)
        self._buffer = memoryview(bytearray(READ_RECORDS * MAX_RECORD_BYTES))
        self._plain = memoryview(bytearray(READ_RECORDS * MAX_PLAIN_BYTES))
        self._here = 0
        """Bytes in the buffer: what begins with the first record that is not whole."""
        self.small = 0
        """Of the records that were opened last: those that cost as much as large ones."""

    def room(self) -> memoryview:
        """Never empty."""
        return self._buffer[self._here :]

    def came(self, nbytes: int) -> memoryview:
        """So many bytes more are in the room: what is in the records that they complete, until the next call.

        Raises:
            Refused: an impossible length, or not what the other end sealed next.
        """
        self._here += nbytes
        self.small = at = out = 0
        while at + LENGTH_BYTES <= self._here:
            start = at + LENGTH_BYTES
            size = int.from_bytes(self._buffer[at:start], "big")
            if not TAG_BYTES < size <= MAX_PLAIN_BYTES + TAG_BYTES:
                raise Refused(f"a record of {size} bytes")
            if start + size > self._here:
                break
            end = out + size - TAG_BYTES
            self._open(self._buffer[start : start + size], self._plain[out:end])
            self.small += size < SMALL_BYTES
            at, out = start + size, end
        if at:
            self._buffer[: self._here - at] = self._buffer[at : self._here]
            self._here -= at
        return self._plain[:out]

    def _open(self, sealed: memoryview, plain: memoryview) -> None:
        aead, nonce = self._keys.next()
        try:
            aead.decrypt_into(nonce, sealed, None, plain)
        except InvalidTag:
            raise Refused(f"record {self._keys.count - 1} is not what was sealed") from None
