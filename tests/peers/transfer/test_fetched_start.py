"""What a stage starts with, from peers: whoever has it, and nothing else than the manifest's digest says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

import msgspec
import pytest
import torch

from peers.events import Event, Note
from peers.ports import Answer, Request
from peers.transfer.server import StateLeases
from peers.transfer.start import FetchedStart
from swarm.errors import Refused, SetupError
from swarm.ids import Stage
from swarm.manifest import Run, StartSpec, demo_run
from swarm.model import layout
from swarm.model.layout import start_digest, start_from, start_shapes, start_tensors
from swarm.records import PeerRecord, Voucher
from swarm.wire.messages import START, OpenState, pack
from tests.peers.network import CalmNetwork
from tests.peers.sybils import admitting, voucher
from tests.peers.tarpits import never_answered

pytestmark = pytest.mark.virtual_time


def tensors_of(run: Run, stage: Stage, value: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in start_shapes(run, stage).items()}


def started_run() -> Run:
    run = replace(demo_run(stages=2, steps=4), start=StartSpec(weights="folder"))
    starts = (tensors_of(run, stage) for stage in range(2))
    digests = tuple(start_digest(start, start.__getitem__) for start in starts)
    return replace(run, start=replace(run.start, digests=digests))


RUN = admitting(started_run())


@pytest.fixture
async def network() -> AsyncIterator[CalmNetwork]:
    network = CalmNetwork()
    yield network
    layout._readers.pop(RUN.id, None)
    await network.close()


def source(
    network: CalmNetwork, name: str, value: float | None, stage: Stage = 0, voucher: Voucher | None = None
) -> StateLeases:
    """A peer of `stage` that gives all stages such weights; None: it has none."""

    def given(asked: Stage) -> Mapping[str, torch.Tensor]:
        if value is None:
            raise SetupError("the weights are not here")
        return tensors_of(RUN, asked, value)

    leases = StateLeases(RUN, network.join(name).transport, {}, start=given)
    record = PeerRecord(run=RUN.id, peer=name, stage=stage, state="serving", version=0, addresses=("a",))
    network.announce(msgspec.structs.replace(record, voucher=voucher))
    return leases


async def fetched(network: CalmNetwork, stage: Stage, told: list[Event]) -> dict[str, torch.Tensor]:
    newcomer = network.join("newcomer") if "newcomer" not in network.peers else network.peers["newcomer"]
    fetching = FetchedStart(RUN)
    await fetching.prepare(stage, newcomer.transport, newcomer.directory, told.append)
    return start_tensors(RUN, stage)


async def test_a_peer_without_the_folder_takes_it_from_one_of_any_stage(network: CalmNetwork) -> None:
    source(network, "other", 1.0, stage=1)
    found = await fetched(network, 0, [])
    assert found.keys() == start_shapes(RUN, 0).keys()
    assert all(bool((tensor == 1.0).all()) for tensor in found.values())
    with pytest.raises(SetupError, match="this peer has what that stage starts with"):
        start_tensors(RUN, 1)


async def test_other_weights_are_not_believed_however_many_give_them(network: CalmNetwork) -> None:
    for number in range(10):
        source(network, f"a liar {number}", 2.0)
    source(network, "b honest", 1.0, stage=1)
    assert all(bool((tensor == 1.0).all()) for tensor in (await fetched(network, 0, [])).values())


async def test_who_has_worked_is_asked_before_a_crowd_that_says_nothing(network: CalmNetwork) -> None:
    for number in range(30):
        source(network, f"a {number}", None)
        network.peers[f"a {number}"].transport.serve("state", never_answered)
    source(network, "b honest", 1.0, stage=1, voucher=voucher(RUN, "b honest"))
    assert await asyncio.wait_for(fetched(network, 0, []), 10.0)


async def test_a_crowd_that_says_nothing_is_not_waited_for_as_long_as_a_source_may_take(
    network: CalmNetwork,
) -> None:
    for number in range(100):
        source(network, f"a {number}", None)
        network.peers[f"a {number}"].transport.serve("state", never_answered)
    source(network, "b honest", 1.0, stage=1)
    assert await asyncio.wait_for(fetched(network, 0, []), 120.0), "it took 27 minutes"


@pytest.mark.parametrize(("crowd", "has_voice"), [(1, False), (100, True)])
async def test_a_source_that_takes_long_is_waited_for_at_once_or_in_the_end(
    network: CalmNetwork, crowd: int, has_voice: bool
) -> None:
    for number in range(crowd):
        source(network, f"a silent {number}", None)
        network.peers[f"a silent {number}"].transport.serve("state", never_answered)
    source(network, "b slow", 1.0, voucher=voucher(RUN, "b slow") if has_voice else None)
    transport = network.peers["b slow"].transport
    at_once, _ = transport.handlers["state"]

    async def slow(request: Request) -> Answer:
        await asyncio.sleep(60.0)
        return await at_once(request)

    transport.serve("state", slow)
    assert await asyncio.wait_for(fetched(network, 0, []), 70.0 if has_voice else 300.0)


async def test_who_asks_for_the_start_of_no_stage_is_refused(network: CalmNetwork) -> None:
    """Each such question had a traceback in the log."""
    source(network, "honest", 1.0)
    asker = network.join("stranger").transport
    for stage in (-1, 2, 1 << 40):
        question = pack(OpenState(run=RUN.id, stage=stage, version=START))
        with pytest.raises(Refused, match=f"has no weights that stage {stage} of the run starts from"):
            await asker.call("honest", "state", question)


async def test_who_reads_the_start_from_a_slow_disk_gives_states_meanwhile(network: CalmNetwork) -> None:
    leases, asker = source(network, "honest", 1.0), network.join("joiner").transport
    async with leases._starting:
        with pytest.raises(Refused, match="keeps no checkpoints of stage 0"):
            await asker.call("honest", "state", pack(OpenState(run=RUN.id, stage=0)), deadline_s=10.0)


async def test_an_invited_peer_that_waits_for_the_start_keeps_no_others_from_states(
    network: CalmNetwork,
) -> None:
    leases, asker = source(network, "honest", 1.0), network.join("joiner").transport
    network.invited, invited = frozenset({"first"}), network.join("first").transport
    async with leases._starting:
        question = pack(OpenState(run=RUN.id, stage=0, version=START))
        waiting = asyncio.create_task(invited.call("honest", "state", question, max_answer_bytes=1 << 20))
        await asyncio.sleep(1.0)
        with pytest.raises(Refused, match="keeps no checkpoints of stage 0"):
            await asker.call("honest", "state", pack(OpenState(run=RUN.id, stage=0)), deadline_s=10.0)
    await waiting


async def test_it_says_what_it_waits_for_until_a_peer_has_it(network: CalmNetwork) -> None:
    source(network, "empty", None)
    told: list[Event] = []
    waiting = asyncio.create_task(fetched(network, 0, told))
    await asyncio.sleep(10.0)
    assert not waiting.done()
    (note,) = told
    assert (
        isinstance(note, Note) and "the weights are not here. Or give their folder with --start" in note.text
    )
    source(network, "late", 1.0)
    assert await waiting


async def test_a_peer_that_has_the_folder_asks_nobody(network: CalmNetwork) -> None:
    start_from(RUN, lambda names, shape: torch.full(shape, 1.0))
    assert await fetched(network, 1, [])
    assert not network.peers["newcomer"].transport.lines
