"""Disks that are full or tear a file: the shipped code writes to them and says what is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

from peers.sim.disks import Disks, Tear
from peers.sim.loop import PROCESS, Killed, Process
from peers.storage import checkpoint
from peers.storage.atomic_file import TEMPORARY
from swarm.errors import SetupError
from swarm.manifest import audit_run

RUN = audit_run(stages=1)


class Writer:
    """A process with a disk of its own."""

    def __init__(self, disks: Disks) -> None:
        self.process, self.disk = Process("a"), disks.add()
        disks.mount("a", self.disk)

    def save(self, step: int) -> None:
        state = {"weights": torch.full((4,), float(step))}
        here = checkpoint.Checkpoint(self.disk.folder, RUN, 0, step)
        self.process.context.run(here.save, state)

    def steps(self) -> list[int]:
        return checkpoint.saved_steps(self.disk.folder, RUN, 0)

    def tear(self, *, kept: float, renamed: bool) -> list[str]:
        """The next file; returns the names of the processes that were killed, as soon as they are."""
        killed: list[str] = []

        def kill() -> None:
            process = PROCESS.get()
            assert process is not None
            killed.append(process.name)

        self.disk.tear = Tear(kept, renamed, kill)
        return killed


@pytest.fixture
def writer() -> Iterator[Writer]:
    disks = Disks()
    with disks.in_use():
        yield Writer(disks)


def test_a_full_disk_keeps_what_it_has_and_says_how_much_is_free(writer: Writer) -> None:
    writer.save(1)
    writer.disk.full = True
    with pytest.raises(SetupError, match=r"the disk is full \(0 MiB are free\)"):
        writer.save(2)
    assert shutil.disk_usage(writer.disk.folder).free == 0
    writer.disk.full = False
    assert shutil.disk_usage(writer.disk.folder).free == 1 << 40
    writer.save(3)
    assert writer.steps() == [3, 1]


@pytest.mark.parametrize("kept", [0.5, 1.0])
def test_a_process_that_dies_before_the_rename_leaves_a_temporary_file(writer: Writer, kept: float) -> None:
    writer.save(1)
    killed = writer.tear(kept=kept, renamed=False)
    with pytest.raises(Killed):
        writer.save(2)
    assert killed == ["a"] and writer.steps() == [1]
    assert len(list(writer.disk.folder.rglob(f"{TEMPORARY}*"))) == 1
    writer.save(2)
    assert writer.steps() == [2, 1]


def test_a_file_that_was_cut_is_passed_over_with_a_word_and_written_again(writer: Writer) -> None:
    writer.save(1)
    writer.tear(kept=0.5, renamed=True)
    with pytest.raises(Killed):
        writer.save(2)
    writer.save(2)
    assert writer.steps() == [2, 1]
    (file,) = (writer.disk.folder / RUN.id / "step-000000002").glob("*.json")
    file.write_text(file.read_text()[:20])
    told: list[str] = []
    assert checkpoint.saved_steps(writer.disk.folder, RUN, 0, tell=told.append) == [1]
    assert "is damaged" in told[0]
