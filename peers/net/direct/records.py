"""A stream of bytes as sealed records. Without IO.

    record = length (4) | AES-256-GCM of at most 64 KiB, with its tag

Each direction has a key. A record's nonce is its number, so one that is changed, left out, repeated or put
elsewhere is refused, and no key seals two records with one nonce. A stream that is cut ends early, which
tells nothing by itself: what is in it says its own length (`swarm.wire.frames`).
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from swarm.wire import frames
from swarm.wire.buffers import Buffer

KEY_BYTES = 32
TAG_BYTES = 16
LENGTH_BYTES = 4
MAX_PLAIN_BYTES = frames.CHUNK_BYTES // 4 + frames.PREFIX_BYTES
"""A quarter of a chunk. Whole chunks cost no less CPU time (2026-11-26), and come once in four seconds on a
line of 64 kB/s."""
MAX_RECORD_BYTES = LENGTH_BYTES + MAX_PLAIN_BYTES + TAG_BYTES
SMALL_BYTES = 16 * 1024
"""Records of less cost about as much as large ones."""
RECORDS_PER_KEY = 1 << 20
"""64 GiB at most: what an attacker of AES-GCM may hope for grows with the square of that."""


class SealError(ValueError):
    """These bytes are not what the other end sealed next; the text says how."""


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
    """The end that sends."""

    def __init__(self, key: bytes, records_per_key: int = RECORDS_PER_KEY) -> None:
        self._keys = _Keys(key, records_per_key)

    def seal(self, parts: Sequence[Buffer]) -> list[bytes]:
        """What to send for these bytes, in order. All but the last part are short, such as prefixes."""
        *heads, last = map(memoryview, parts)
        first = MAX_PLAIN_BYTES - sum(head.nbytes for head in heads)
        assert first > 0
        sealed = self._record(b"".join((*heads, last[:first])) if heads else last[:first])
        for start in range(first, last.nbytes, MAX_PLAIN_BYTES):
            sealed += self._record(last[start : start + MAX_PLAIN_BYTES])
        return sealed

    def _record(self, plain: Buffer) -> list[bytes]:
        aead, nonce = self._keys.next()
        sealed = aead.encrypt(nonce, plain, None)
        length = len(sealed).to_bytes(LENGTH_BYTES, "big")
        return [length + sealed] if len(sealed) <= SMALL_BYTES else [length, sealed]


class Opener:
    """The end that receives, into one buffer: `room` is where the next bytes go, `came` opens what is whole.

    There is room for one record and the length of the next, so nothing has to be moved.
    """

    def __init__(self, key: bytes, records_per_key: int = RECORDS_PER_KEY) -> None:
        self._keys = _Keys(key, records_per_key)
        self._buffer = memoryview(bytearray(MAX_RECORD_BYTES + LENGTH_BYTES))
        self._here = 0
        """Bytes in the buffer."""
        self._size = 0
        """Of the sealed bytes of the record; 0: not known yet."""

    def room(self) -> memoryview:
        """Never empty."""
        end = LENGTH_BYTES + self._size + LENGTH_BYTES if self._size else LENGTH_BYTES
        return self._buffer[self._here : end]

    def came(self, nbytes: int) -> bytes:
        """So many bytes more are in the room: the record that they complete, or nothing.

        Raises:
            SealError: an impossible length, or not what the other end sealed next.
        """
        self._here += nbytes
        plain, end = b"", LENGTH_BYTES + self._size
        if self._size and self._here >= end:
            plain = self._open(self._buffer[LENGTH_BYTES:end])
            rest = self._here - end
            self._buffer[:rest] = self._buffer[end : self._here]
            self._here, self._size = rest, 0
        if not self._size and self._here == LENGTH_BYTES:
            self._size = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
            if not TAG_BYTES < self._size <= MAX_PLAIN_BYTES + TAG_BYTES:
                raise SealError(f"a record of {self._size} bytes")
        return plain

    def put(self, data: bytes) -> bytes:
        """The same for bytes that have to be moved into the room first: all that they complete."""
        plain, rest = b"", memoryview(data)
        while rest:
            part = rest[: self.room().nbytes]
            self.room()[: part.nbytes] = part
            plain, rest = plain + self.came(part.nbytes), rest[part.nbytes :]
        return plain

    def _open(self, sealed: memoryview) -> bytes:
        aead, nonce = self._keys.next()
        try:
            return aead.decrypt(nonce, sealed, None)
        except InvalidTag:
            raise SealError(f"record {self._keys.count - 1} is not what was sealed") from None
