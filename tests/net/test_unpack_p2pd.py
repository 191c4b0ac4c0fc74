"""`scripts/unpack_p2pd.py`, with a program that is packed as UPX does it: a stub, and what that unpacks."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from scripts.unpack_p2pd import ELF_HEADER, LOADED, SEGMENT, CannotUnpack, is_packed, replace, says

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the programs here are for x86-64")
PLACE, STUB_PLACE = 0x400000, 0x600000
BEFORE_CODE = ELF_HEADER.size + SEGMENT.size
EXIT_7 = b"\xbf\x07\0\0\0" + b"\xb8\xe7\0\0\0" + b"\x0f\x05"  # exit_group(7)
EXIT_AS_TOLD = b"\x44\x89\xff" + EXIT_7[5:]  # exit_group(r15)
TELL_7 = b"\x41\xbf\x07\0\0\0"
GETPID = b"\xb8\x27\0\0\0" + b"\x0f\x05"


def elf(segments: list[tuple[int, int, int]], entry: int, mark: bytes = b"") -> bytes:
    """The head of a program: segments as (offset, address, bytes)."""
    ident = (b"\x7fELF\x02\x01\x01\0" + mark).ljust(16, b"\0")
    head = ELF_HEADER.pack(ident, 2, 62, 1, entry, 64, 0, 0, 64, SEGMENT.size, len(segments), 64, 0, 0)
    table = (SEGMENT.pack(LOADED, 7, at, place, place, size, 4096, 4096) for at, place, size in segments)
    return head + b"".join(table)


def program(code: bytes) -> bytes:
    size = BEFORE_CODE + len(code)
    return elf([(0, PLACE, size)], PLACE + BEFORE_CODE) + code


def packed(inner: bytes, jump_to: int, last: bytes = b"") -> bytes:
    """A stub that copies `inner` to where it belongs, asks the system something, and jumps there."""
    before = BEFORE_CODE + SEGMENT.size
    number = [n.to_bytes(4, "little") for n in (0, PLACE, len(inner), jump_to)]
    code = b"\xbf%b\xb9%b\xf3\xa4" % (number[1], number[2])  # rep movsb
    code += GETPID + last + b"\xb8%b\xff\xe0" % number[3]
    start = 5 + len(code)
    source = (STUB_PLACE + before + start).to_bytes(4, "little")
    body = b"\xbe" + source + code + inner
    segments = [(0, PLACE, before), (0, STUB_PLACE, before + len(body))]
    return elf(segments, STUB_PLACE + before, b"UPX!") + body


def written(folder: Path, content: bytes) -> Path:
    path = folder / "p2pd"
    path.write_bytes(content)
    path.chmod(0o755)
    return path


def test_what_a_packed_program_unpacks_takes_its_place(tmp_path: Path) -> None:
    inner = program(EXIT_7)
    path = written(tmp_path, packed(inner, PLACE + BEFORE_CODE))
    assert is_packed(path) and says(path) == (7, b"")
    replace(path)
    assert path.read_bytes() == inner
    assert not is_packed(path) and says(path) == (7, b"")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (packed(b"", STUB_PLACE), "stub"),  # it unpacks nothing, and begins again
        (packed(program(EXIT_7), 0), "stub"),  # what it unpacks never begins
        (packed(program(EXIT_AS_TOLD), PLACE + BEFORE_CODE, TELL_7), "does not say"),  # by itself
    ],
)  # fmt: skip
def test_a_program_that_cannot_be_unpacked_stays_as_it_is(tmp_path: Path, content: bytes, why: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(CannotUnpack, match=why):
        replace(path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
