"""Devices and free memory. torch is imported only where a device is really asked about."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import psutil

from peers.system import cpu_model, usable_cores
from swarm.errors import SetupError

CGROUP = Path("/sys/fs/cgroup")

NO_GPU = (
    "sees no GPU: is its driver there (nvidia-smi)? A container needs --gpus all, and its host the "
    "nvidia-container-toolkit"
)


class ComputeDevice(NamedTuple):
    """A compute device that exists."""

    name: str
    """As torch takes it: `cpu`, `cuda:0`."""
    model: str
    """For people: `Intel(R) Xeon(R) ..., 2 cores`."""
    free_bytes: int
    total_bytes: int


def check_word(device: str) -> None:
    """Raises SetupError: no machine has a device of this name."""
    if not re.fullmatch("auto|cpu|mps|cuda(:[0-9]*)?", device):
        raise SetupError(
            f"--device {device!r} is unknown; take auto, cpu, cuda, cuda:N (as in cuda:0) or mps"
        )


def choose_device(asked: str = "auto") -> str:
    """`auto | cpu | cuda | cuda:N | mps` to the name that torch takes; `auto` is the CUDA device with the
    most free memory, or else the CPU.

    Raises:
        SetupError: no such device on this machine, or no such word.
    """
    if asked == "cpu":
        return "cpu"
    check_word(asked)
    number = asked.partition(":")[2]

    import torch

    if asked == "mps":
        if not torch.backends.mps.is_available():
            raise SetupError("--device mps: this machine has no GPU of Apple, or a torch without it")
        return asked
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


def describe(name: str) -> ComputeDevice:
    """Model and memory of a device that `choose_device` returned."""
    if name == "cpu":
        free, total = host_memory()
        model = f"{cpu_model()}, {usable_cores()} cores"
        return ComputeDevice(name=name, model=model, free_bytes=free, total_bytes=total)

    import torch

    if name == "mps":  # its memory is the machine's
        total = torch.mps.recommended_max_memory()
        free = min(host_memory()[0], total - torch.mps.driver_allocated_memory())
        return ComputeDevice(name=name, model=f"GPU of {cpu_model()}", free_bytes=free, total_bytes=total)
    index = int(name.partition(":")[2] or 0)
    free, total = torch.cuda.mem_get_info(index)
    return ComputeDevice(
        name=name, model=torch.cuda.get_device_name(index), free_bytes=free, total_bytes=total
    )


def limit_memory(name: str, most: int | None) -> None:
    """Have torch take no more than `most` bytes of a GPU; of a CPU it cannot be kept from more."""
    if name == "cpu" or most is None:
        return
    import torch

    if name == "mps":
        torch.mps.set_per_process_memory_fraction(min(1.0, most / torch.mps.recommended_max_memory()))
    else:
        total = torch.cuda.get_device_properties(name).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), name)


def release_cached(name: str) -> None:
    """Give back what torch keeps of device `name` for tensors to come. Its CUDA context stays."""
    if name == "cpu":
        return
    import torch

    if name == "mps":
        torch.mps.empty_cache()
    else:
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
