"""Who downloads a stage's state holds a copy of it at its source, and not for longer than it takes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from peers import sync
from peers.core import StageCore
from peers.sync import StateServer, download_state
from swarm.errors import NotReady
from swarm.model.stage import StageCompute
from swarm.run import counting_run
from swarm.wire.messages import OpenState, pack
from tests.peers.memory_net import MemoryNetwork

RUN = counting_run(stages=1, steps=9)


class Source:
    """A peer that gives its state out, and one that asks for it."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.core = StageCore(RUN, 0, "source", StageCompute(RUN, 0), lambda event: None)
        self.server = StateServer(self.core, self.network.add("source").transport)
        self.asker = self.network.add("asker").transport
        self.core.device.start()
        self.core.joined = True

    def step(self) -> None:
        self.core.compute.load_state(self.core.version + 1, self.core.compute.state())

    async def open(self) -> None:
        await self.asker.call("source", "state", pack(OpenState(run=RUN.id, stage=0)))

    async def download(self) -> int:
        opened, _ = await download_state(RUN, 0, self.core.compute.state(), self.asker, "source")
        return opened.version


@pytest.fixture
async def source() -> AsyncIterator[Source]:
    built = Source()
    yield built
    built.core.close()
    await built.network.close()


async def test_joiners_at_one_version_after_another_need_not_wait(source: Source) -> None:
    for version in range(5):
        assert await source.download() == version
        source.step()


async def test_half_read_copies_are_kept_until_nobody_reads_them(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(sync.MOST_LEASES):
        await source.open()
        source.step()
    with pytest.raises(NotReady, match="others are downloading"):
        await source.download()
    monkeypatch.setattr(sync, "LEASE_S", -1.0)
    assert await source.download() == sync.MOST_LEASES


async def test_a_copy_that_two_read_is_kept_until_both_have_it(source: Source) -> None:
    await source.open()
    assert await source.download() == 0
    source.step()
    await source.open()
    source.step()
    with pytest.raises(NotReady, match="others are downloading"):
        await source.download()
