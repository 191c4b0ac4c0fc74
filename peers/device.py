"""Devices, free memory and the allocator. torch is imported only where a device is really asked about."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from swarm.errors import SetupError

CGROUP = Path("/sys/fs/cgroup")

NO_GPU = (
    "sees no GPU: is its driver there (nvidia-smi)? A container needs --gpus all, and its host the "
    "nvidia-container-toolkit"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A compute device that exists."""

    name: str
    """As torch takes it: `cpu`, `cuda:0`."""
    model: str
    """For people: `Intel(R) Xeon(R) ..., 2 cores`."""
    free_bytes: int
    total_bytes: int


def choose_device(asked: str = "auto") -> str:
    """`auto | cpu | cuda | cuda:N` to the name that torch takes; `auto` is the GPU with most free memory.

    Raises:
        SetupError: no such device on this machine, or no such word.
    """
    if asked == "cpu":
        return "cpu"
    kind, _, number = asked.partition(":")
    if asked != "auto" and (kind != "cuda" or (number and not (number.isascii() and number.isdigit()))):
        raise SetupError(f"--device {asked!r} is unknown; take auto, cpu, cuda or cuda:N (as in cuda:0)")

    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto":
        if devices == 0:
            return "cpu"
        return f"cuda:{max(range(devices), key=lambda n: (torch.cuda.mem_get_info(n)[0], -n))}"
    if devices == 0:
        reason = NO_GPU if torch.version.cuda else "has no CUDA"
        raise SetupError(f"--device {asked}: this torch ({torch.__version__}) {reason}; take --device cpu")
    index = int(number or 0)
    if index >= devices:
        raise SetupError(f"--device {asked}: this machine has cuda:0 to cuda:{devices - 1}")
    return f"cuda:{index}"


def lacks_gpu() -> str:
    """That this torch was made for GPUs and finds none, in words; empty if that is not so."""
    import torch

    if torch.version.cuda is None or torch.cuda.is_available():
        return ""
    return f"this torch ({torch.__version__}) {NO_GPU}"


def describe(name: str) -> Device:
    """Model and memory of a device that `choose_device` returned."""
    if name == "cpu":
        free, total = host_memory()
        model = f"{_cpu_model()}, {usable_cores()} cores"
        return Device(name=name, model=model, free_bytes=free, total_bytes=total)

    import torch

    index = int(name.partition(":")[2] or 0)
    free, total = torch.cuda.mem_get_info(index)
    return Device(name=name, model=torch.cuda.get_device_name(index), free_bytes=free, total_bytes=total)


def free_bytes(name: str) -> int:
    """Bytes that can be taken on device `name` now without pushing anything out."""
    return describe(name).free_bytes


def limit_memory(name: str, most: int | None) -> None:
    """Have torch take no more than `most` bytes of a GPU; of a CPU it cannot be kept from more."""
    if name.startswith("cuda") and most is not None:
        import torch

        total = torch.cuda.get_device_properties(name).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), name)


def release_cached(name: str) -> None:
    """Give back what torch keeps of device `name` for tensors to come. Its CUDA context stays."""
    if name.startswith("cuda"):
        import torch

        with torch.cuda.device(name):
            torch.cuda.empty_cache()


def host_memory() -> tuple[int, int]:
    """(free, total) bytes of this machine, or of the container if that gives less."""
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    limit, used = _cgroup_memory()
    if limit is not None and limit < total:
        free, total = min(free, max(0, limit - used)), limit
    return free, total


def _cgroup_memory() -> tuple[int | None, int]:
    """(limit, used) bytes by cgroup 2; the limit is None without one. File cache counts as free."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return None, 0
        used = int((CGROUP / "memory.current").read_text())
        for line in (CGROUP / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])
        return int(limit), max(0, used)
    except (OSError, ValueError):
        return None, 0


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


# --- the allocator ---

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8

MMAP_THRESHOLD_BYTES = (256 << 20, 32 << 20)
"""Activations come and go by the megabyte: below the threshold their pages stay mapped instead of being
faulted in again. Tried in this order, since older versions of glibc take 32 MiB at most."""

TRIM_THRESHOLD_BYTES = 512 << 20
"""Free memory at the top of the heap that is kept rather than given back."""

TOP_PAD_BYTES = 64 << 20
"""What the heap grows by at a time."""


def tune_malloc(*, arenas: int = 1) -> bool:
    """Keep freed memory for the next microbatch instead of giving it back to the kernel.

    Call it first thing in a process, before threads start. One arena, since per-thread arenas multiply what
    is kept. Returns False where the C library is not glibc, which changes nothing but speed.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    settings = ((M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES), (M_TOP_PAD, TOP_PAD_BYTES), (M_ARENA_MAX, arenas))
    taken = [mallopt(name, value) == 1 for name, value in settings]
    taken.append(any(mallopt(M_MMAP_THRESHOLD, value) == 1 for value in MMAP_THRESHOLD_BYTES))
    return all(taken)


# --- life and death ---

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None = None, *, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when the thread that started it ends.

    `parent_pid` is the expected parent: if it died before this call, this process ends now. The
    setting follows the *thread* that forked, so start children from one that lives as long as its process.

    Raises:
        SetupError: not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise SetupError("--die-with-parent needs Linux")
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)
