"""A source slower than any line is left. Chunks have their usual size, from which it follows what is slow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import pytest
import torch

from peers.ports import NetworkPath
from peers.transfer.client import DownloadFailed, Wanted, download
from peers.transfer.leases import CHUNK_BYTES
from peers.transfer.server import StateLeases
from swarm.errors import PeerFault
from swarm.manifest import audit_run
from swarm.wire.messages import OpenState
from tests.peers.network import CalmNetwork

pytestmark = pytest.mark.virtual_time

RUN = audit_run(stages=1)
WEIGHTS = {"weights": torch.arange(3 * CHUNK_BYTES // 8, dtype=torch.float64)}
"""Three chunks, which take 49 s at half a megabit per second; one alone takes 16 s."""
SLOW_S = 40.0


class Shelf:
    def versions(self) -> Sequence[int]:
        return [4]

    def load(self, version: int) -> Mapping[str, torch.Tensor]:
        return WEIGHTS


@pytest.fixture
async def net() -> AsyncIterator[CalmNetwork]:
    built = CalmNetwork(latency_s=0.001)
    built.join("me")
    StateLeases(RUN, built.join("a").transport, {0: Shelf()})
    yield built
    await built.close()


async def get(net: CalmNetwork, faults: list[PeerFault]) -> torch.Tensor:
    wanted = Wanted(name="weights", question=OpenState(run=RUN.id, stage=0, version=4), like=WEIGHTS)
    found = await download(net.peers["me"].transport, wanted, ["a"], on_fault=faults.append)
    return found.tensors["weights"]


async def test_all_chunks_in_flight_may_share_a_slow_line(net: CalmNetwork) -> None:
    net.delay_answer("a", "chunk", SLOW_S)
    assert torch.equal(await get(net, faults := []), WEIGHTS["weights"]) and not faults


@pytest.mark.parametrize(("bandwidth_bps", "late_s"), [(0.0, 60.0), (16e6, SLOW_S)], ids=["any", "fast"])
async def test_a_source_slower_than_its_line_is_left(
    net: CalmNetwork, bandwidth_bps: float, late_s: float
) -> None:
    net.peers["me"].transport.lines["a"] = NetworkPath(bandwidth_bps=bandwidth_bps)
    net.delay_answer("a", "chunk", late_s)
    faults = list[PeerFault]()
    with pytest.raises(DownloadFailed):
        await get(net, faults)
    assert [(fault.peer, fault.silent) for fault in faults] == [("a", True)]
