"""Checkpoints beside the training: never two at once, never in the way, the newest first."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.events import Checkpointed, Event, Note, Trouble
from peers.stage.settings import Checkpoints
from peers.storage import checkpoint, checkpoint_store
from peers.storage.checkpoint_store import CheckpointWriter
from swarm.errors import SetupError
from swarm.manifest import audit_run
from swarm.records import NO_STAGE, PeerRecord
from tests.peers.loops import swarm

RUN = audit_run(stages=2, steps=100)


def state(version: int) -> dict[str, torch.Tensor]:
    return {"weights": torch.full((10,), float(version))}


class Disk:
    """A disk that writes when it is told to: each save waits for `go`."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.at_once = self.most_at_once = 0
        self.commit = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)
        self._save = checkpoint.Checkpoint.save
        self._lock = threading.Lock()

    def save(self, one: checkpoint.Checkpoint, *rest: Any, **named: Any) -> None:
        with self._lock:
            self.began.append(int(one.path.parent.name.removeprefix("step-")))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        self.arrived.release()
        assert self.commit.acquire(timeout=20)
        try:
            self._save(one, *rest, **named)
        finally:
            with self._lock:
                self.at_once -= 1

    async def starts(self) -> None:
        """The next save has begun."""
        assert await asyncio.to_thread(self.arrived.acquire, timeout=20)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(checkpoint.Checkpoint, "save", lambda *args, **named: disk.save(*args, **named))
    yield disk
    disk.commit.release(100)


def saver(folder: Path, emit: Callable[[Event], None]) -> CheckpointWriter:
    return CheckpointWriter(folder, RUN, 1, keep=5, emit=emit)


async def test_what_is_saved_is_there_and_told(tmp_path: Path) -> None:
    said: list[Event] = []
    one = saver(tmp_path, said.append)
    one.save(20, state(20))
    assert await one.close()
    assert said == [Checkpointed(stage=1, step=20, path=str(tmp_path))]
    tensors = checkpoint.Checkpoint(tmp_path, RUN, 1, 20).load()
    assert torch.equal(tensors["weights"], state(20)["weights"])
    one.save(40, state(40))
    assert await one.close()
    assert checkpoint.saved_steps(tmp_path, RUN, 1) == [40, 20]


async def test_a_slow_disk_holds_up_nobody_and_saves_never_overlap(tmp_path: Path, disk: Disk) -> None:
    said: list[Event] = []
    one = saver(tmp_path, said.append)
    began = time.perf_counter()
    one.save(10, state(10))
    await disk.starts()
    for version in (20, 30, 40):
        one.save(version, state(version))
    assert time.perf_counter() - began < 10  # the disk would wait twice as long
    assert [event.words() for event in said] == [
        "no checkpoint of version 20: the disk is slow, and version 30 is newer",
        "no checkpoint of version 30: the disk is slow, and version 40 is newer",
    ]
    assert not await one.close(0.0)
    disk.commit.release()
    await disk.starts()
    disk.commit.release()
    assert await one.close()
    assert (disk.began, disk.most_at_once) == ([10, 40], 1)
    assert [event.step for event in said if isinstance(event, Checkpointed)] == [10, 40]
    assert checkpoint.saved_steps(tmp_path, RUN, 1) == [40, 10]


async def test_what_cannot_be_saved_is_told_and_the_next_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Event] = []
    one = saver(tmp_path, said.append)

    def full(*_: Any, **__: Any) -> Path:
        raise SetupError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoint, "save", full)
        one.save(10, state(10))
        assert await one.close()
    one.save(20, state(20))
    assert await one.close()
    assert said[0] == Trouble(text="no checkpoint of version 10: the disk is full")
    assert isinstance(said[1], Checkpointed) and len(said) == 2
    assert not any(isinstance(event, Note) for event in said)


async def test_the_last_version_is_tried_again_until_there_is_room_and_once_more_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step comes after it; its peer may be the only one that has it."""
    said = list[Event]()

    def full(*_: Any, **__: Any) -> Path:
        raise SetupError("the disk is full")

    for again_s, tries in ((0.01, 3), (1000.0, 1)):
        one = saver(tmp_path / str(tries), said.append)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.Checkpoint, "save", full)
            one.again_s = again_s
            said.clear()
            one.save(RUN.steps, state(RUN.steps))
            while len(said) < tries:
                await asyncio.sleep(0)
        assert await one.close()
        assert checkpoint.saved_steps(tmp_path / str(tries), RUN, 1) == [RUN.steps]


async def test_after_a_bug_it_can_still_be_closed_and_saves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Event] = []
    one = saver(tmp_path, said.append)

    def broken(*_: Any, **__: Any) -> Path:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoint, "save", broken)
        one.save(10, state(10))
        assert await one.close()
    one.save(20, state(20))
    assert await one.close()
    assert [type(event) for event in said] == [Checkpointed]


def test_a_disk_that_hangs_does_not_keep_the_program_alive(tmp_path: Path, disk: Disk) -> None:
    async def main() -> bool:
        one = saver(tmp_path, lambda event: None)
        one.save(10, state(10))
        await disk.starts()
        (thread,) = [t for t in threading.enumerate() if t.name == "checkpoints of stage 1"]
        assert thread.daemon  # Python does not wait for it at its end
        return await one.close(0.05)

    assert asyncio.run(main()) is False  # and it returned, though the disk still holds the save
    assert checkpoint.saved_steps(tmp_path, RUN, 1) == []


@pytest.mark.virtual_time
async def test_a_stage_takes_all_its_steps_while_its_disk_still_writes_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[int] = []
    disk = asyncio.Semaphore(0)

    async def write(work: Any, *, name: str) -> Event:
        began.append(work.args[0])
        await disk.acquire()
        return work()

    monkeypatch.setattr(checkpoint_store, "in_daemon_thread", write)
    run = replace(audit_run(stages=2, steps=5, microbatches_per_step=4), checkpoint_every=1)
    async with swarm(run, replicas=0) as s:
        slow = s.add_peer("slow", 0, checkpoints=Checkpoints(folder=tmp_path, keep=9))
        s.add_peer("other", 1)
        s.add_trainer("trainer")
        await s.until_finished()
        # Said when the last checkpoint is on its way.
        await s.until(lambda: sum("all 5 steps" in note.text for note in s.seen(Note)) == 2)
        s.assert_each_counted_once()
        assert began == [1]
        disk.release()
        disk.release()
        slow.leave()  # what waits is written before it goes
        await s.until(s.tasks["slow"].done)
        assert began == [1, 5]
        assert checkpoint.saved_steps(tmp_path, run, 0) == [5, 1]
        tensors = checkpoint.Checkpoint(tmp_path, run, 0, 5).load()
        assert torch.equal(tensors["weights"] * -run.M, torch.full((run.M,), 5.0, dtype=torch.float64))


@pytest.mark.virtual_time
async def test_without_a_folder_the_newest_checkpoint_is_held_for_a_keeper_only() -> None:
    run = replace(audit_run(stages=1, steps=5, microbatches_per_step=4), checkpoint_every=2)
    for kept in (False, True):
        async with swarm(run, replicas=1) as s:
            await s.until_serving()
            if kept:
                end = s.network.join("keeper")
                record = PeerRecord(peer="keeper", run=run.id, stage=NO_STAGE, state="keeping", version=0)
                await end.directory.announce(record)
            s.add_trainer("trainer")
            await s.until_finished()
            store = s.peers["s0p0"].store
            await s.until(lambda s=s: [note for note in s.seen(Note) if "all 5 steps" in note.text])
            # The last version is given out as it is.
            assert store.versions() == ([4] if kept else [])
            if kept:
                counted = -store.load(4)["weights"] * run.M
                assert torch.equal(counted, torch.full((run.M,), 4.0, dtype=torch.float64))
