"""Put hivemind's p2pd in place as it was before it was packed: `python scripts/unpack_p2pd.py`.

The wheel brings it packed with UPX: each start unpacks 28 MB, which takes 0.15 s of a core, and memory that
processes cannot share. Here its own stub unpacks it, once, watched by ptrace(2), and what is in memory before
the first instruction of the program is written down. Where that cannot be done it stays as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

TRACEME, POKETEXT, CONT, SYSCALL = 0, 4, 7, 24
BREAKPOINT = 0xCC
ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SEGMENT = struct.Struct("<IIQQQQQQ")
LOADED = 1
MAX_SYSCALLS = 1000
"""Of the stub, which makes some ten."""


class CannotUnpack(Exception):
    """Why not, in words."""


def is_packed(program: Path) -> bool:
    with program.open("rb") as file:
        return b"UPX!" in file.read(512)


def unpacked(program: Path) -> bytes:
    """The program that a packed one unpacks into its memory. Raises CannotUnpack, OSError."""
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            _ptrace(TRACEME, 0)
            os.execv(program, [str(program), "-help"])
        os._exit(127)
    try:
        _stopped(child)
        with Path(f"/proc/{child}/mem").open("rb", buffering=0) as memory:
            return _image(memory, *_run_to_entry(child, memory, program))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _run_to_entry(child: int, memory: BinaryIO, program: Path) -> tuple[int, int, bytes]:
    """Run the stub until it jumps to what it has unpacked.

    Returns where that is in memory, where it begins, and the word that was there.
    """
    with program.open("rb") as file:
        packed = file.read(ELF_HEADER.size)
        file.seek(ELF_HEADER.unpack(packed)[5])
        base = SEGMENT.unpack(file.read(SEGMENT.size))[3]  # the packed program reserves that
    for _ in range(MAX_SYSCALLS):
        _ptrace(SYSCALL, child)
        _stopped(child)
        with contextlib.suppress(OSError):  # nothing is mapped there yet
            header = _read(memory, base, ELF_HEADER.size)
            entry = ELF_HEADER.unpack(header)[4]
            if header[:4] == packed[:4] and header != packed and any(word := _read(memory, entry, 8)):
                break
    else:
        raise CannotUnpack("its stub unpacks nothing where it should")
    _ptrace(POKETEXT, child, entry, int.from_bytes(bytes([BREAKPOINT]) + word[1:], "little"))
    _ptrace(CONT, child)
    _stopped(child)
    return base, entry, word


def _image(memory: BinaryIO, base: int, entry: int, word: bytes) -> bytes:
    """The file whose segments are in memory from `base`, with `word` at `entry`."""
    fields = list(ELF_HEADER.unpack(_read(memory, base, ELF_HEADER.size)))
    table, number = fields[5], fields[10]
    segments = [
        SEGMENT.unpack(_read(memory, base + table + i * SEGMENT.size, SEGMENT.size)) for i in range(number)
    ]
    image = bytearray()
    for kind, _, offset, address, _, file_bytes, _, _ in segments:
        if kind == LOADED:
            image.extend(bytes(max(0, offset + file_bytes - len(image))))
            image[offset : offset + file_bytes] = _read(memory, address, file_bytes)
            if address <= entry < address + file_bytes:
                at = offset + entry - address
                image[at : at + len(word)] = word
    fields[6] = fields[12] = fields[13] = 0  # its sections were not loaded
    image[: ELF_HEADER.size] = ELF_HEADER.pack(*fields)
    return bytes(image)


def _read(memory: BinaryIO, address: int, length: int) -> bytes:
    memory.seek(address)
    found = b""
    while len(found) < length and (more := memory.read(length - len(found))):
        found += more
    return found


def _ptrace(request: int, child: int, address: int = 0, data: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, child, address, data) < 0:
        raise CannotUnpack(f"ptrace: {os.strerror(ctypes.get_errno())}")


def _stopped(child: int) -> None:
    """Wait until it stops. Raises CannotUnpack: it has ended, or something else stops it."""
    _, status = os.waitpid(child, 0)
    if not os.WIFSTOPPED(status) or os.WSTOPSIG(status) != signal.SIGTRAP:
        raise CannotUnpack(f"its stub ended or was stopped ({status:#x})")


def says(program: Path) -> tuple[int, bytes]:
    """Its exit code, and the help that it prints."""
    told = subprocess.run([program, "-help"], capture_output=True, check=False)
    return told.returncode, (told.stdout + told.stderr).partition(b"\n")[
        2
    ]  # the first line names the program


def replace(program: Path) -> None:
    """Raises CannotUnpack, OSError: it was left as it is."""
    other = program.with_name(f"{program.name}.{os.getpid()}")
    try:
        other.write_bytes(unpacked(program))
        other.chmod(program.stat().st_mode)
        if says(other) != says(program):
            raise CannotUnpack("what was unpacked does not say the same by itself")
        other.replace(program)
    finally:
        other.unlink(missing_ok=True)


def main() -> None:
    """Of this Python's hivemind, which is not imported: that takes longer."""
    found = importlib.util.find_spec("hivemind")
    if found is None or not found.origin or platform.machine() != "x86_64":
        return
    program = Path(found.origin).parent / "hivemind_cli" / "p2pd"
    try:
        if is_packed(program):
            replace(program)
    except (CannotUnpack, OSError) as error:
        print(f"p2pd stays packed: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
