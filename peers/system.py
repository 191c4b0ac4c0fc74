"""What only some systems have: on Linux its own way, elsewhere a portable form of the same.

With $SWARM_PORTABLE set, Linux takes the portable forms too; so they are tested there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

PARENT_EVERY_S = 0.5
"""Where the kernel does not tell of a parent's death, it is looked for so often."""


def on_linux() -> bool:
    """Whether Linux's own ways are taken."""
    return sys.platform.startswith("linux") and not os.environ.get("SWARM_PORTABLE")


def usable_cores() -> int:
    """Cores that this process may run on; all of the machine where that is not known."""
    return len(os.sched_getaffinity(0)) if on_linux() else os.cpu_count() or 1


def cpu_model() -> str:
    """For people: `Intel(R) Xeon(R) ...`, or the kind of machine."""
    if on_linux():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def shortage(error: BaseException) -> str:
    """What this process itself is short of, in words, if that is what an error says."""
    number, said = getattr(error, "errno", 0), str(error)
    if number == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"this process has no free file descriptors ({limit} are allowed): raise the limit (ulimit -n)"
    if number == errno.ENFILE:
        return "this machine has no free file descriptors: end other programs, or raise fs.file-max"
    short = isinstance(error, MemoryError) or number == errno.ENOMEM
    if short or "can't allocate memory" in said or "out of memory" in said:  # torch's words, CPU and GPU
        return "no memory is left: end other programs, or raise the limit (ulimit -v, that of the container)"
    return ""


def everywhere() -> str:
    """Where to listen for other machines: by IPv6 only if that alone leads to them. Nothing is sent."""
    for family, host, there in (
        (socket.AF_INET, "0.0.0.0", "192.0.2.1"), (socket.AF_INET6, "::", "2001:db8::1"),
    ):  # fmt: skip
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect((there, 9))
            return host
    return "0.0.0.0"


# --- life and death ---

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, *, signum: int = signal.SIGKILL) -> None:
    """Have this process get `signum` when its parent ends; at once if that is not `parent_pid` any more.

    On Linux the kernel sends it when the *thread* ends that forked: start children from one that lives as
    long as its process. Elsewhere a thread looks for the parent twice a second.
    """

    def gone() -> bool:
        return os.getppid() != parent_pid

    def wait() -> None:
        while not gone():
            time.sleep(PARENT_EVERY_S)
        os.kill(os.getpid(), signum)

    if not on_linux():
        threading.Thread(target=wait, name="parent", daemon=True).start()
    elif ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if gone():
        os.kill(os.getpid(), signum)


def killed_with_parent(command: Sequence[str]) -> list[str]:
    """A command whose process the kernel kills when its parent ends, where there is a way to have it so."""
    setpriv = shutil.which("setpriv") if on_linux() else None
    return [*command] if setpriv is None else [setpriv, "--pdeathsig", "KILL", "--", *command]


# --- folders that are removed though all programs that know of them were killed ---

STALE_AFTER_S = 60.0
"""One younger than this may not have taken its lock yet."""


def private_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder, mode 700, and the descriptor of its held lock: processes that inherit it hold it, too.

    Those of this kind whose lock is free, since all their owners died at once, are removed.
    """
    for folder in parent.glob(f"{prefix}????????"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < STALE_AFTER_S:
                continue
            lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


# --- the allocator ---

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8

MMAP_THRESHOLD_BYTES = (256 << 20, 32 << 20)
"""Activations come and go by the megabyte: below the threshold their pages stay mapped instead of being
faulted in again. Tried in this order, since older versions of glibc take 32 MiB at most."""

TRIM_THRESHOLD_BYTES = 512 << 20
"""Free memory at the top of the heap that is kept rather than given back."""

TOP_PAD_BYTES = 64 << 20
"""What the heap grows by at a time."""


def tune_malloc() -> bool:
    """Keep freed memory for the next microbatch instead of giving it back to the kernel.

    Call it first thing in a process, before threads start. One arena, since per-thread arenas multiply what
    is kept. Returns False where the C library is not glibc, which changes nothing but speed.
    """
    if not on_linux():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    settings = ((M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES), (M_TOP_PAD, TOP_PAD_BYTES), (M_ARENA_MAX, 1))
    taken = [mallopt(name, value) == 1 for name, value in settings]
    taken.append(any(mallopt(M_MMAP_THRESHOLD, value) == 1 for value in MMAP_THRESHOLD_BYTES))
    return all(taken)
