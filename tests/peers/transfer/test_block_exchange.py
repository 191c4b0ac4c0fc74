"""Blocks of the data from other trainers and keepers of the run, when no address has them any more."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peers.events import Event, Trouble
from peers.ports import Answer, Handler, NetworkPath
from peers.storage.dataset import Dataset
from peers.transfer import blocks as exchange
from peers.transfer.blocks import BlockExchange
from swarm.errors import BadAnswer, Busy, NotNow, PeerGone, Refused, SetupError, SwarmError
from swarm.ids import PeerId
from swarm.manifest import Run
from swarm.merkle import BLOCK_BYTES
from swarm.policy.timeouts import most_s
from swarm.records import NO_STAGE, PeerRecord
from swarm.wire.messages import Ack, AskBlock, pack
from tests.peers.admitted import OTHER, TRAINER, admitting
from tests.peers.extremes import Extremes
from tests.peers.storage.test_index import EVERYWHERE, RUN, addressed, assert_right, made, opened, server
from tests.seeds import some
from tests.serving import Server

__all__ = ["made", "server"]
REPAIRS = "Repair one, add an address to the index"


class Asked:
    """A call as its handler sees it."""

    def __init__(self, peer: PeerId, header: bytes) -> None:
        self.peer, self.header, self.body_sizes, self.passed_bytes = peer, header, (), 0

    async def accept(self) -> list[memoryview]:
        return []


class Hub:
    """Trainers and keepers in one loop, with real threads."""

    def __init__(self) -> None:
        self.ends: dict[PeerId, End] = {}
        self.records: dict[PeerId, PeerRecord] = {}
        self.calls: list[tuple[PeerId, PeerId, str]] = []
        self.events: list[Event] = []


class End:
    """One peer's transport and directory."""

    def __init__(self, hub: Hub, name: PeerId, state: Any = "feeding") -> None:
        self.peer_id, self.hub, self.handlers = name, hub, dict[str, Handler]()
        self.lines: dict[PeerId, Any] = {}
        hub.ends[name] = self
        if state:
            hub.records[name] = PeerRecord(peer=name, run=RUN.id, stage=NO_STAGE, state=state, version=0)

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int = 0) -> None:
        self.handlers[method] = handler

    async def call(
        self, peer: PeerId, method: str, header: bytes, body: Sequence[Any] = (), *,
        max_answer_bytes: int = 0, deadline_s: float | None = None,
    ) -> Answer:  # fmt: skip
        self.hub.calls.append((self.peer_id, peer, method))
        end = self.hub.ends.get(peer)
        if end is None:
            raise PeerGone(peer, "cannot be reached")
        if method not in end.handlers:
            raise Refused(f"no such method: {method!r}")
        answer = await asyncio.wait_for(end.handlers[method](Asked(self.peer_id, header)), deadline_s)
        if sum(memoryview(part).nbytes for part in answer.body) > max_answer_bytes:
            raise BadAnswer(peer, "a larger answer than was asked for")
        return answer

    def at(self, stage: int) -> list[PeerRecord]:
        return list(self.hub.records.values()) if stage == NO_STAGE else []

    async def refresh(self, stages: Any = None) -> list[PeerRecord]:
        return self.at(NO_STAGE)

    async def announce(self, record: PeerRecord) -> None:
        self.hub.records[record.peer] = record

    async def withdraw(self) -> None:
        del self.hub.records[self.peer_id]


def shared(
    hub: Hub, name: PeerId, run: Run, *data: Dataset, state: Any = "feeding", **more: Any
) -> BlockExchange:
    end: Any = End(hub, name, state)
    return BlockExchange(run, end, end, [one.blocks for one in data], hub.events.append, **more)


def liar(hub: Hub, name: PeerId, data: bytes) -> None:
    async def lie(request: Any) -> Answer:
        return Answer(pack(Ack()), [data])

    End(hub, name).serve("block", lie)


@pytest.fixture
def both(server: Server, tmp_path: Path) -> Iterator[tuple[Run, Dataset, Dataset]]:
    """The run; its data with a trainer that has fetched all; and with one whose addresses are gone."""
    address = addressed(server, f"{server.url}/{{}}")
    run, full = opened(address, tmp_path / "full")
    full.bring(EVERYWHERE)
    for path in server.folder.glob("*.tokens"):
        path.unlink()
    _, empty = opened(address, tmp_path / "empty", run)
    server.asked.clear()
    yield run, full, empty


async def read(data: Dataset, offsets: list[int]) -> None:
    await asyncio.to_thread(assert_right, data, offsets)


@pytest.mark.parametrize("state", some(["feeding", "keeping"], quick=["feeding"]))
async def test_blocks_come_from_another_trainer_or_keeper_when_their_addresses_are_gone(
    both: tuple[Run, Dataset, Dataset], server: Server, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, full, empty = both
    hub = Hub()
    shared(hub, "full", run, full, state=state)
    shared(hub, "empty", run, empty)
    await read(empty, EVERYWHERE)
    assert {call[:2] for call in hub.calls} == {("empty", "full")}, "each block is asked for once"
    assert len(hub.calls) == 4
    tried = len(server.asked)
    assert tried and "cannot be had" in caplog.text
    await read(empty, EVERYWHERE)
    assert len(hub.calls) == 4 and len(server.asked) == tried, "they are kept, like those of addresses"
    assert not hub.events


async def test_peers_are_asked_first_while_an_address_rests(
    both: tuple[Run, Dataset, Dataset], server: Server
) -> None:
    run, full, empty = both
    hub = Hub()
    shared(hub, "full", run, full)
    shared(hub, "empty", run, empty)
    await read(empty, [BLOCK_BYTES // 2])
    assert server.asked == ["/2.tokens"]
    await read(empty, [BLOCK_BYTES + 10])
    assert server.asked == ["/2.tokens"], "a part of that block is in the shard whose address failed"
    await read(empty, [0])
    assert server.asked[1:] == ["/0.tokens"]


async def test_wrong_bytes_are_named_and_another_peer_is_asked(both: tuple[Run, Dataset, Dataset]) -> None:
    run, full, empty = both
    for name in (f"liar{number}" for number in range(8)):
        hub = Hub()
        liar(hub, name, bytes(BLOCK_BYTES))
        shared(hub, "full", run, full)
        shared(hub, "empty", run, empty)
        await read(empty, EVERYWHERE)
        told = [event.text for event in hub.events if isinstance(event, Trouble)]
        if told:
            break
    assert len(told) == 1, "it rests, and is not asked for the other blocks"
    assert told[0].startswith(f"peer {name[-6:]}: gave other bytes as block ")
    assert [callee for _, callee, _ in hub.calls].count(name) == 1


def crowd(hub: Hub, says: SwarmError, count: int = 200) -> None:
    """Strangers that say they have blocks, and give none."""

    async def refuse(request: Any) -> Answer:
        raise says

    for number in range(count):
        End(hub, f"a{number:03}", ("feeding", "keeping")[number % 2]).serve("block", refuse)


BUSY = Busy("gives to others", retry_after_s=1.0)


async def test_trainers_that_the_run_names_are_asked_before_a_crowd(
    both: tuple[Run, Dataset, Dataset],
) -> None:
    run, full, empty = both
    run, hub = admitting(run), Hub()
    crowd(hub, BUSY)
    shared(hub, TRAINER, run, full)
    shared(hub, OTHER, run, empty)
    await read(empty, EVERYWHERE)
    assert {call[1] for call in hub.calls} == {TRAINER}
    hub.records.pop(TRAINER)
    with pytest.raises(NotNow):
        await asyncio.to_thread(hub_exchange(empty), empty.blocks, 0)
    asked = {hub.records[call[1]].state for call in hub.calls if call[1] != TRAINER}
    assert asked == {"keeping"}, "others feed nobody"


@pytest.mark.parametrize("says", [BUSY, Refused("this peer has no such data")])
async def test_all_of_a_crowd_are_asked_in_the_end(
    both: tuple[Run, Dataset, Dataset], says: SwarmError
) -> None:
    """What they say is no fault of theirs, and no reason to give up."""
    run, full, empty = both
    hub = Hub()
    crowd(hub, says)
    shared(hub, "full", run, full)
    shared(hub, "empty", run, empty)
    for _ in range(200 // exchange.MAX_ASKED + 1):
        with contextlib.suppress(NotNow):
            await asyncio.to_thread(hub_exchange(empty), empty.blocks, 0)
            return
    raise AssertionError("the same strangers were asked again and again")


async def test_a_stranger_that_gave_nothing_is_waited_for_longer_each_time(
    both: tuple[Run, Dataset, Dataset],
) -> None:
    """Of a crowd of keepers that say nothing each was waited for for 70 s."""
    run, hub = admitting(both[0]), Hub()
    asks, waited_s = shared(hub, OTHER, run, both[2]), list[float]()
    for _ in range(6):
        waited_s.append(asks._limit_s("keeper", BLOCK_BYTES))
        asks._in_vain["keeper"] += 1
    whole_s = most_s(BLOCK_BYTES)
    assert waited_s == [whole_s / 16, whole_s / 8, whole_s / 4, whole_s / 2, whole_s, whole_s]
    asks._in_vain["keeper"] = 2000  # it lacks what is asked for, or is busy, all along
    assert asks._limit_s("keeper", BLOCK_BYTES) == whole_s
    asks._in_vain.clear()
    assert asks._limit_s(TRAINER, BLOCK_BYTES) == whole_s, "the manifest names it"
    hub.ends[OTHER].lines["keeper"] = NetworkPath(bandwidth_bps=1e6)
    assert asks._limit_s("keeper", BLOCK_BYTES) == most_s(BLOCK_BYTES, line_bps=1e6), "it gave one before"


async def test_strangers_that_come_and_go_are_not_remembered_for_ever(
    both: tuple[Run, Dataset, Dataset],
) -> None:
    run, _, empty = both
    hub = Hub()
    asks = shared(hub, "empty", run, empty)
    crowd(hub, BUSY, exchange.MAX_ASKED)
    with pytest.raises(NotNow):
        await asyncio.to_thread(hub_exchange(empty), empty.blocks, 0)
    assert len(asks._in_vain) == exchange.MAX_ASKED
    hub.records.clear()
    await asks._sources("")
    assert not asks._in_vain


def hub_exchange(data: Dataset) -> Callable[..., object]:
    """What has peers asked for a block of some data."""
    assert data.blocks.others is not None
    return data.blocks.others


@pytest.mark.parametrize("data", [b"", b"x" * 100, bytes(BLOCK_BYTES + 1)], ids=["none", "few", "many"])
async def test_what_nobody_has_is_an_error_that_says_where_it_was_looked_for(
    both: tuple[Run, Dataset, Dataset], data: bytes
) -> None:
    run, _, empty = both
    hub = Hub()
    shared(hub, "empty", run, empty)
    with pytest.raises(SetupError, match=r"0\.tokens cannot be had: .*; 0 peers of the run asked\. "):
        await read(empty, [0])
    End(hub, "keeper", "keeping")
    shared(hub, "other", run, empty)
    liar(hub, "liar", data)
    empty.blocks.others = None
    shared(hub, "empty", run, empty)
    with pytest.raises(SetupError) as raised:
        await read(empty, [0])
    text = raised.value.text
    assert "3 peers of the run asked; " in text and REPAIRS in text
    for why in (
        "peer keeper: no such method",
        "peer other: block 0 of the data is not here",
    ):
        assert why in text
    assert "peer liar: " in text
    assert all(caller == "empty" for caller, _, _ in hub.calls), "nobody asks others for the sake of one"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock of the exchange says."""
    said = [1000.0]
    monkeypatch.setattr(exchange, "now_s", lambda: said[0])
    return said


async def test_a_peer_that_is_gone_may_come_back_while_its_record_is_there(
    both: tuple[Run, Dataset, Dataset], now: list[float]
) -> None:
    run, full, empty = both
    hub = Hub()
    shared(hub, "full", run, full)
    shared(hub, "empty", run, empty)
    end, record = hub.ends.pop("full"), hub.records["full"]
    with pytest.raises(NotNow, match="1 peer of the run asked; peer full: cannot be reached"):
        await read(empty, [0])
    with pytest.raises(NotNow, match="0 peers of the run asked"):
        await read(empty, [BLOCK_BYTES // 2])
    assert len(hub.calls) == 1, "it rests"
    del hub.records["full"]
    with pytest.raises(SetupError, match="0 peers of the run asked"):
        await read(empty, [0])
    hub.ends["full"], hub.records["full"] = end, record
    now[0] += exchange.FIRST_REST_S
    await read(empty, EVERYWHERE)


async def test_a_busy_peer_is_asked_again_later(both: tuple[Run, Dataset, Dataset]) -> None:
    run, full, empty = both
    hub = Hub()
    gives = shared(hub, "full", run, full)
    shared(hub, "empty", run, empty)
    on_their_way = [np.empty(1, np.uint8) for _ in range(exchange.MAX_EACH)]
    for block in on_their_way:
        gives._given.hold("empty", block)
    del block
    with pytest.raises(NotNow, match="peer full: others, or you, have not read what they were given"):
        await read(empty, [0])
    on_their_way.clear()
    await read(empty, [0])


async def test_what_a_peer_gives_is_bounded_for_each_caller_and_for_all(
    both: tuple[Run, Dataset, Dataset], now: list[float]
) -> None:
    run, full, _ = both
    hub = Hub()
    shared(hub, "full", run, full)

    async def ask(caller: str) -> Answer:
        header = pack(AskBlock(run=run.id, root=full.root, number=0))
        return await hub.ends["full"].handlers["block"](Asked(caller, header))

    held = [await ask("a") for _ in range(exchange.MAX_EACH)]
    with pytest.raises(Busy):
        await ask("a")
    others = [name for name in "bcdefgh" for _ in range(exchange.MAX_EACH)][: exchange.MAX_GIVEN - len(held)]
    held += [await ask(name) for name in others]
    with pytest.raises(Busy):
        await ask("z")
    held.clear()
    got = 0
    with pytest.raises(Busy):
        for _ in range(100):
            await ask("a")
            got += 1
    assert got + exchange.MAX_EACH == exchange.AHEAD_S / exchange.EACH_S + 1
    await ask("z")
    now[0] += exchange.EACH_S
    await ask("a")


async def test_a_damaged_block_is_not_given_and_nothing_is_fetched_for_others(
    both: tuple[Run, Dataset, Dataset], server: Server, tmp_path: Path
) -> None:
    _, full, _ = both
    for path in (tmp_path / "full").glob("**/blocks/??/*"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert [full.blocks.held(number) for number in range(4)] == [None] * 4
    assert not server.asked


async def test_the_files_of_this_machine_are_given_too(server: Server, tmp_path: Path) -> None:
    run, near = opened(str(server.folder), tmp_path)
    first = near.blocks.held(0)
    near.bring([0])
    assert first is not None and near.blocks.held(0) == first == near.blocks.read(0, BLOCK_BYTES)
    hub = Hub()
    far = addressed(server, f"{server.url}/gone")
    _, empty = opened(far, tmp_path / "empty", run)
    shared(hub, "near", run, near)
    shared(hub, "empty", run, empty)
    await read(empty, EVERYWHERE)


def test_a_cache_of_nodes_is_of_no_use_to_an_index_of_other_machines(server: Server, tmp_path: Path) -> None:
    run, near = opened(str(server.folder), tmp_path)
    near.bring(EVERYWHERE)
    _, far = opened(addressed(server, f"{server.url}/{{}}"), tmp_path, run)
    assert_right(far, EVERYWHERE)


REFUSALS: list[tuple[Callable[[Run, str], AskBlock], str]] = [
    (lambda run, root: AskBlock(run="0" * 32, root=root, number=0), "this peer serves run"),
    (lambda run, root: AskBlock(run=run.id, root="ab", number=0), "no such data"),
    (lambda run, root: AskBlock(run=run.id, root=root, number=4), "no such data"),
    (lambda run, root: AskBlock(run=run.id, root=root, number=-1), "no such data"),
    (lambda run, root: AskBlock(run=run.id, root=root, number=2**63), "no such data"),
]


async def test_what_nobody_may_have_is_refused(both: tuple[Run, Dataset, Dataset]) -> None:
    run, full, _ = both
    hub = Hub()
    shared(hub, "full", run, full)
    handler = hub.ends["full"].handlers["block"]
    for question, why in REFUSALS:
        with pytest.raises(Refused, match=why):
            await handler(Asked("a", pack(question(run, full.root))))
    dice = random.Random(3)
    extremes = Extremes(dice, run.id, ("full",))
    for _ in range(60):
        try:
            header = pack(extremes.of(AskBlock, AskBlock(run=run.id, root=full.root, number=0)))
        except (OverflowError, ValueError):
            continue
        with contextlib.suppress(SwarmError):
            await handler(Asked("a", header))
    named = admitting(run, TRAINER)
    shared(hub, "named", named, full)
    asked = pack(AskBlock(run=named.id, root=full.root, number=0))
    with pytest.raises(Refused, match="only trainers that the run names"):
        await hub.ends["named"].handlers["block"](Asked("a", asked))
    await hub.ends["named"].handlers["block"](Asked(TRAINER, asked))


async def test_who_shares_nothing_asks_all_the_same(both: tuple[Run, Dataset, Dataset]) -> None:
    run, full, empty = both
    hub = Hub()
    shared(hub, "full", run, full, state="keeping")
    alone = shared(hub, "empty", run, empty, state="", gives=False)
    await read(empty, [0])
    assert not hub.ends["empty"].handlers
    announcing = asyncio.create_task(alone.announce(("/ip4/192.0.2.7/tcp/1",)))
    for _ in range(100):
        await asyncio.sleep(0)
    assert (found := hub.records["empty"]).state == "feeding" and found.stage == NO_STAGE and found.addresses
    announcing.cancel()
    await asyncio.gather(announcing, return_exceptions=True)
    assert "empty" not in hub.records


async def test_the_loop_itself_never_waits_for_a_peer(both: tuple[Run, Dataset, Dataset]) -> None:
    run, full, empty = both
    hub = Hub()
    shared(hub, "full", run, full)
    shared(hub, "empty", run, empty)
    with pytest.raises(NotNow, match="fetched again"):
        empty.batch([0])
    assert not hub.calls


async def test_all_threads_of_two_trainers_may_wait_for_each_other(server: Server, tmp_path: Path) -> None:
    address = addressed(server, f"{server.url}/{{}}")
    run, one = opened(address, tmp_path / "one")
    _, other = opened(address, tmp_path / "other", run)
    one.bring([0])
    other.bring([EVERYWHERE[-1]])
    for path in server.folder.glob("*.tokens"):
        path.unlink()
    hub = Hub()
    shared(hub, "one", run, one)
    shared(hub, "other", run, other)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    await asyncio.wait_for(asyncio.gather(read(one, [EVERYWHERE[-1]]), read(other, [0])), 20.0)
