"""--pause-when-busy: what is read of a GPU, with a driver that is made up here, and what follows from it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from peers.events import Event, Note, Trouble
from peers.owner.commands import NO_ROOM, Owner
from peers.owner.gpu_contention import Nvml, nvml_of, watch
from swarm.errors import SetupError
from swarm.policy.contention import ContentionDetector, Use

GIB = 1 << 30


class Driver(SimpleNamespace):
    """What `pynvml` has of it."""

    class NVMLError(Exception): ...

    class NVMLError_NotFound(NVMLError): ...

    class NVMLError_NotSupported(NVMLError): ...

    def __init__(self) -> None:
        super().__init__(computes=[], draws=[], samples=[], error=None, asked=[])

    def nvmlInit(self) -> None:  # noqa: N802
        if self.error is not None:
            raise self.error

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        self.nvmlInit()
        assert handle == "GPU-1234"
        return self.computes

    def nvmlDeviceGetGraphicsRunningProcesses(self, _: str) -> list[SimpleNamespace]:  # noqa: N802
        return self.draws

    def nvmlDeviceGetProcessUtilization(self, _: str, since: int) -> list[SimpleNamespace]:  # noqa: N802
        self.asked.append(since)
        if not self.samples:
            raise self.NVMLError_NotFound("none")
        return self.samples


def process(pid: int, held: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=held)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def test_only_others_count_and_each_once(driver: Driver) -> None:
    reader, me = Nvml("1234", lambda: GIB), os.getpid()
    driver.computes = [process(me, 9 * GIB), process(7, 2 * GIB), process(8, None)]
    driver.draws = [process(7, 2 * GIB), process(9, GIB)]
    assert reader.others() == Use(held_bytes=3 * GIB, share=0.0)
    driver.samples = [
        SimpleNamespace(pid=me, smUtil=90, timeStamp=5), SimpleNamespace(pid=7, smUtil=10, timeStamp=6),
        SimpleNamespace(pid=7, smUtil=40, timeStamp=7),
    ]  # fmt: skip
    assert reader.others().share == 0.4
    reader.others()
    assert driver.asked == [0, 0, 7]


def test_who_cannot_find_itself_says_so(driver: Driver) -> None:
    own_bytes = 0
    reader = Nvml("GPU-1234", lambda: own_bytes)
    driver.computes = [process(77, GIB)]
    assert reader.others().held_bytes == GIB
    own_bytes = GIB
    with pytest.raises(OSError, match="a container needs --pid=host"):
        reader.others()


def test_without_driver_library_or_gpu_it_is_said_at_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.error = Driver.NVMLError("Driver Not Loaded")
    with pytest.raises(SetupError, match=r"NVML says Driver Not Loaded; is the driver there \(nvidia-smi\)"):
        Nvml("1234", lambda: 0)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(SetupError, match=r"pip install 'swarm-train\[owner\]'"):
        Nvml("1234", lambda: 0)
    with pytest.raises(SetupError, match="watches a GPU; this peer computes on cpu: leave it out"):
        nvml_of("cpu")


class Script:
    """A reader that plays what a test wrote; then it stays as it is."""

    def __init__(self, *uses: Use | OSError) -> None:
        self.uses: list[Use | OSError] = list(uses)
        self.looks = 0

    def others(self) -> Use:
        self.looks += 1
        use = self.uses.pop(0) if len(self.uses) > 1 else self.uses[0]
        if isinstance(use, OSError):
            raise use
        return use


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.virtual_time
async def test_it_pauses_and_resumes_and_leaves_a_pause_by_hand_alone() -> None:
    quiet, game = Use(held_bytes=0, share=0.0), Use(held_bytes=4 * GIB, share=0.9)
    owner, events, reader = Owner(), list[Event](), Script(quiet, game)
    gate = ContentionDetector(contended_after_s=3, free_after_s=10)
    watching = asyncio.create_task(
        watch(owner, reader.others, gate, events.append, clock=lambda: reader.looks)
    )
    await until(lambda: owner.paused)
    assert owner.why == "other programs have 4096 MiB more than usual, and 90% of the time"
    owner.pause("by hand", "swarm pause")
    owner.pause(NO_ROOM, "the device has no room")
    reader.uses = [quiet]
    await until(lambda: len(events) == 2)
    assert owner.paused and owner.why == "swarm pause", "what the device had no room for is tried again"
    assert [type(event) for event in events] == [Note, Note]
    watching.cancel()


@pytest.mark.virtual_time
async def test_a_driver_that_fails_for_good_ends_the_watch_and_its_pause() -> None:
    game = Use(held_bytes=0, share=0.9)
    owner, events, reader = Owner(), list[Event](), Script(game, game, game, OSError("NVML says GPU is lost"))
    gate = ContentionDetector(contended_after_s=1)
    await watch(owner, reader.others, gate, events.append, clock=lambda: reader.looks)
    assert not owner.paused
    assert isinstance(events[-1], Trouble)
    assert events[-1].text == (
        "--pause-when-busy: NVML says GPU is lost; this peer does not pause by itself any more"
    )
