"""`--pause-when-busy`: samples what other processes use of our GPU, by NVML (the extra `owner`)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from peers.events import Emit, Note, Trouble
from peers.owner.commands import NO_ROOM, Owner
from swarm.errors import SetupError
from swarm.policy.contention import ContentionDetector, Use

SAMPLE_EVERY_S = 1.0
BY = "busy"
MAX_FAILURES = 10
"""Failed samples in a row; then the driver is not asked any more."""


async def watch(
    owner: Owner, others: Callable[[], Use], gate: ContentionDetector, emit: Emit,
    *, clock: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    """Pause while others want the device, for ever. A pause by hand stays whatever others do.

    `others` tells what they have of it: it may block for milliseconds, and raises OSError if it cannot now.
    """
    paused, failures = False, 0
    while failures < MAX_FAILURES:
        await asyncio.sleep(SAMPLE_EVERY_S)
        try:
            use = await asyncio.to_thread(others)
        except OSError as error:
            failures += 1
            if failures == MAX_FAILURES:
                emit(Trouble(text=f"--pause-when-busy: {error}; this peer does not pause by itself any more"))
            continue
        failures = 0
        pauses, why = gate.observe(use, now=clock())
        if pauses == paused:
            continue
        paused = pauses
        emit(Note(text=f"{'pauses' if paused else 'resumes'}: {why}"))
        if paused:
            owner.pause(BY, why)
        else:
            owner.resume(BY, NO_ROOM)  # what others had is free again, so it is worth another try
    owner.resume(BY)  # nothing else would end that pause


class Nvml:
    """NVML's view of one CUDA device. Processes are told apart by their ids."""

    def __init__(self, uuid: str, own_bytes: Callable[[], int]) -> None:
        """`uuid`: as torch has it. `own_bytes`: what this process holds of the device.

        Raises:
            SetupError: no NVML here, or it does not know the device.
        """
        try:
            import pynvml
        except ImportError:
            raise SetupError(
                "--pause-when-busy reads what other programs do by NVML: pip install 'swarm-train[owner]'"
            ) from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        except pynvml.NVMLError as error:
            raise SetupError(
                f"--pause-when-busy: NVML says {error}; is the driver there (nvidia-smi)?"
            ) from None
        self._own_bytes = own_bytes
        self._seen = 0
        """Time stamp of the newest sample, as NVML counts."""

    def others(self) -> Use:
        """What other processes have of the device; raises OSError: it cannot be told now."""
        nvml, me = self._nvml, os.getpid()
        try:
            running = [
                *nvml.nvmlDeviceGetComputeRunningProcesses(self._handle),
                *nvml.nvmlDeviceGetGraphicsRunningProcesses(self._handle),
            ]
            share = self._share(me)
        except nvml.NVMLError as error:
            raise OSError(f"NVML says {error}") from None
        if self._own_bytes() and all(process.pid != me for process in running):
            # In a container ids are others than the driver's: we would take ourselves for another.
            raise OSError("this process is not among those that NVML lists; a container needs --pid=host")
        # A process that computes and draws is in both lists; without leave to see its memory it is None.
        held = {process.pid: process.usedGpuMemory or 0 for process in running if process.pid != me}
        return Use(held_bytes=sum(held.values()), share=share)

    def _share(self, me: int) -> float:
        """Of the time since the last sample in which others computed; 0 where there are no samples."""
        nvml = self._nvml
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(self._handle, self._seen)
        except (nvml.NVMLError_NotFound, nvml.NVMLError_NotSupported):
            return 0.0
        self._seen = max([self._seen, *(sample.timeStamp for sample in samples)])
        newest = {sample.pid: sample.smUtil for sample in samples if sample.pid != me}
        return min(1.0, sum(newest.values()) / 100)


def nvml_of(device: str) -> Nvml:
    """The reader for a device that torch has. Raises SetupError: it is no GPU, or NVML is not there."""
    if not device.startswith("cuda"):
        raise SetupError(f"--pause-when-busy watches a GPU; this peer computes on {device}: leave it out")
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return Nvml(uuid, lambda: torch.cuda.memory_reserved(device))
