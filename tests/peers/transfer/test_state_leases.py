"""Who downloads a stage's state holds a copy of it at its source, and not for longer than it takes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import pytest
import torch

from peers.clock import now_s
from peers.ports import Answer, Handler
from peers.sim.device import SimDevice
from peers.sim.dice import Dice
from peers.sim.network import SimTransport
from peers.stage.open_step import OpenStep
from peers.stage.state import StageCore
from peers.transfer import leases as state_leases
from peers.transfer.client import download, state_of
from peers.transfer.leases import MAX_READERS, Lease, Leases, Snapshot
from peers.transfer.server import MAX_LEASES, SAID_S, WAITED_FOR_S, StateLeases, StateServer
from swarm.digest import digest_of
from swarm.errors import NotReady, Refused, SetupError, SwarmError
from swarm.ids import Generation, Stage
from swarm.manifest import Run, audit_run
from swarm.model.stage import StageCompute
from swarm.policy import timeouts
from swarm.policy.backoff import Backoff
from swarm.protocol.ledger import Ledger
from swarm.protocol.rounds import Commit, Prepared, Proof
from swarm.records import NO_STAGE, PeerRecord
from swarm.wire import whole_numbers
from swarm.wire.messages import (
    MAX_HEADER_BYTES,
    AskSaved,
    CloseLease,
    FetchChunk,
    Opened,
    OpenState,
    Saved,
    SavedStage,
    pack,
    unpack,
)
from tests.peers.network import CalmNetwork
from tests.peers.sybils import admitting, voucher

pytestmark = pytest.mark.virtual_time

RUN = audit_run(stages=1, steps=9)


class Clock:
    """`time.monotonic` of the server."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class SavedHere:
    """A shelf in memory: version v is a state of v's. `damaged` versions cannot be read."""

    def __init__(self, *versions: int, damaged: Sequence[int] = ()) -> None:
        self.here, self.damaged, self.loads = list(versions), damaged, 0

    def versions(self) -> Sequence[int]:
        return self.here

    def signed(self, version: int) -> tuple[()]:
        return ()

    def load(self, version: int) -> Mapping[str, torch.Tensor]:
        self.loads += 1
        if version in self.damaged:
            raise SetupError(f"the file of version {version} is damaged")
        return {
            name: torch.full_like(t, float(version)) for name, t in StageCompute(RUN, 0).state.copy().items()
        }


class Source:
    """A peer that gives its state out, and those that ask for it."""

    def __init__(self, store: SavedHere | None = None, run: Run = RUN) -> None:
        self.network = CalmNetwork()
        here = self.network.join("source")
        self.core = StageCore(
            run, 0, StageCompute(run, 0), here.transport, here.directory, Backoff(), lambda event: None,
            device=SimDevice(Dice(1), 0.01),
        )  # fmt: skip
        self.server = StateServer(self.core, store or SavedHere())
        self.core.device.start()
        self.core.joined = True

    def step(self) -> None:
        self.core.compute.load_state(self.core.version + 1, self.core.compute.state.copy())

    def asker(self, name: str = "asker") -> SimTransport:
        return (
            self.network.peers[name].transport
            if name in self.network.peers
            else self.network.join(name).transport
        )

    async def call(self, method: str, message: object, by: str = "asker") -> Answer:
        return await self.asker(by).call("source", method, pack(message), max_answer_bytes=1 << 20)  # type: ignore[arg-type]

    async def open(self, by: str = "asker", version: int = -1, stage: Stage = 0) -> Opened:
        question = OpenState(run=self.core.run.id, stage=stage, version=version)
        return unpack((await self.call("state", question, by)).header, Opened)

    async def read(self, opened: Opened, by: str = "asker") -> None:
        await self.call("chunk", FetchChunk(run=self.core.run.id, lease=opened.lease, index=0), by)

    async def download(self, version: int = -1, by: str = "asker") -> tuple[int, dict[str, torch.Tensor]]:
        got = await download(self.asker(by), state_of(RUN, 0, version), ["source"])
        return got.opened.version, got.tensors

    async def refusal(self, by: str = "asker", version: int = -1, stage: Stage = 0) -> SwarmError:
        with pytest.raises((NotReady, Refused)) as caught:
            await self.open(by, version, stage)
        return caught.value


@pytest.fixture
async def source() -> AsyncIterator[Source]:
    built = Source()
    yield built
    built.core.close()
    await built.network.close()


@pytest.fixture
async def saving() -> AsyncIterator[Source]:
    """A source with versions 2 and 4 on its shelf, and 3 damaged."""
    built = Source(SavedHere(2, 3, 4, damaged=[3]))
    yield built
    built.core.close()
    await built.network.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(state_leases, "now_s", made.monotonic)
    return made


async def half_read(source: Source) -> None:
    """As many copies as there may be, each opened by somebody else who has not read it to its end."""
    for number in range(MAX_LEASES):
        await source.read(await source.open(f"reader{number}"), f"reader{number}")
        source.step()


OTHERS = "others are downloading from this peer"


async def test_joiners_at_one_version_after_another_need_not_wait(source: Source) -> None:
    for version in range(5):
        assert (await source.download(by=f"joiner{version}"))[0] == version
        source.step()


async def test_half_read_copies_are_kept_until_nobody_reads_them(source: Source, clock: Clock) -> None:
    await half_read(source)
    assert (await source.refusal()).text == OTHERS
    clock.now += state_leases.QUIET_S - 0.1
    assert (await source.refusal()).text == OTHERS
    clock.now += 0.2
    assert (await source.open()).version == MAX_LEASES


async def test_a_reader_that_died_does_not_block_the_next_one(source: Source, clock: Clock) -> None:
    await half_read(source)
    assert (await source.refusal()).text == OTHERS
    source.server.gone("reader0")
    assert (await source.open()).version == MAX_LEASES
    # The place of the dead is taken; the other reader has kept its own.
    source.step()
    assert (await source.refusal("late")).text == OTHERS


async def test_two_slow_readers_lose_their_places_to_one_that_waits_and_get_no_other(
    source: Source, clock: Clock
) -> None:
    """They read on, the same chunk again and again, and open another copy as soon as theirs is gone."""
    await half_read(source)
    opened = {}
    for number, lease in enumerate(list(source.server._leases.values())):
        opened[f"reader{number}"] = lease.opened
    began, joined = clock.now, False
    while not joined:
        for name, lease in opened.items():
            with contextlib.suppress(SwarmError):
                await source.read(lease, name)
        try:
            joined = bool(await source.open("joiner"))
        except NotReady:
            clock.now += 1.0
    assert state_leases.QUIET_S < clock.now - began <= 30.0
    assert "slower than any line" in (await source.refusal("reader0")).text
    clock.now += state_leases.REST_S + 1.0
    await source.open("reader0")


async def test_a_slow_reader_keeps_its_place_while_no_other_waits(source: Source, clock: Clock) -> None:
    opened = await source.open("slow")
    for _ in range(9):
        clock.now += 18.0
        await source.read(opened, "slow")


async def test_a_reader_on_a_slow_line_keeps_its_place(
    source: Source, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it reads in a time is what the least pace asks for."""
    monkeypatch.setattr(state_leases, "CHUNK_BYTES", 8)
    monkeypatch.setattr(timeouts, "LEAST_BYTES_PER_S", 1.0)
    opened = await source.open("slow")
    source.step()
    chunks = len(source.server._leases[opened.lease].chunks)
    assert chunks > 3
    for index in range(chunks):
        clock.now += 7.0
        await source.call("chunk", FetchChunk(run=RUN.id, lease=opened.lease, index=index), "slow")
        source.step()
        await source.open(f"joiner{index}")
        source.server.gone(f"joiner{index}")
    await source.read(opened, "slow")


async def test_who_closes_makes_room(source: Source, clock: Clock) -> None:
    await half_read(source)
    for number in range(MAX_LEASES):
        name = f"reader{number}"
        for lease in list(source.server._leases):
            await source.call("close", CloseLease(run=RUN.id, lease=lease), name)
    assert (await source.open()).version == MAX_LEASES


async def test_closing_what_is_not_open_changes_nothing(source: Source, clock: Clock) -> None:
    await half_read(source)
    await source.call("close", CloseLease(run=RUN.id, lease="nothing"))
    for lease in list(source.server._leases):
        await source.call("close", CloseLease(run=RUN.id, lease=lease), "somebody else")
    assert (await source.refusal()).text == OTHERS


async def test_who_opens_a_newer_version_has_done_with_the_one_before(source: Source, clock: Clock) -> None:
    for version in range(4):
        assert (await source.open()).version == version
        source.step()


async def test_a_copy_that_two_read_is_kept_until_both_have_it(source: Source, clock: Clock) -> None:
    first = await source.open("first")
    assert (await source.download(by="second"))[0] == 0
    source.step()
    await source.open("third")
    source.step()
    assert (await source.refusal("fourth")).text == OTHERS
    await source.call("close", CloseLease(run=RUN.id, lease=first.lease), "first")
    assert (await source.open("fourth")).version == 2


async def test_a_copy_is_dropped_when_nobody_reads_it_any_more(
    source: Source,
) -> None:
    opened = await source.open()
    assert len(source.server._leases) == 1
    await asyncio.sleep(state_leases.LEASE_S)
    assert source.server._leases, "somebody may still read it"
    await asyncio.sleep(state_leases.LEASE_S)
    assert not source.server._leases
    with pytest.raises(Refused, match="no such download"):
        await source.read(opened)


async def test_one_peer_has_a_state_copied_a_quarter_of_the_time(source: Source) -> None:
    """It opened that of each step, and read nothing: a device copies gigabytes meanwhile, and others wait."""
    snapshot, copies = source.server.snapshot, list[float]()

    async def slow() -> Snapshot:
        copies.append(now_s())
        await asyncio.sleep(4.0)
        return await snapshot()

    source.server.snapshot = slow  # type: ignore[method-assign]
    until = now_s() + 160.0
    while now_s() < until:
        with contextlib.suppress(NotReady):
            await source.open("stranger")
        source.step()
        await asyncio.sleep(0.5)
    assert 9 <= len(copies) <= 10
    assert "a state was copied" in (await source.refusal("stranger")).text
    assert (await source.open("joiner")).version == source.core.version, "others need not wait"
    await asyncio.sleep(16.0)
    source.step()
    assert (await source.open("stranger")).version == source.core.version


async def test_who_opens_at_the_same_moment_gets_the_same_copy(source: Source) -> None:
    first, second = await asyncio.gather(source.open("first"), source.open("second"))
    assert first.lease == second.lease


# --- who comes first ----------------------------------------------------------------------------------------

BEHIND = "peers that have worked for the run, or were invited, wait for a place"


@pytest.fixture(params=["has worked", "is invited", "keeps, and has worked"])
async def queued(request: pytest.FixtureRequest) -> AsyncIterator[Source]:
    """A source that `first` asks as well: it has a voucher, or a token of the owner."""
    run = admitting(RUN)
    built = Source(run=run)
    built.asker("first")
    if request.param == "is invited":
        built.network.invited = frozenset({"first"})
    else:
        stage, state = (0, "joining") if request.param == "has worked" else (NO_STAGE, "keeping")
        said = PeerRecord(peer="first", run=run.id, stage=stage, state=state, version=0)
        built.network.announce(msgspec.structs.replace(said, voucher=voucher(run, "first")))
        await built.core.directory.refresh()
    yield built
    built.core.close()
    await built.network.close()


async def test_a_place_that_is_free_again_is_for_who_comes_first(queued: Source) -> None:
    """A crowd that asks all the time took each place as soon as it was free."""
    await half_read(queued)
    assert (await queued.refusal("stranger")).text == OTHERS
    assert (await queued.refusal("first")).text == OTHERS
    queued.server.gone("reader0")
    assert (await queued.refusal("stranger")).text == BEHIND
    assert (await queued.open("first")).version == queued.core.version
    queued.step()
    queued.server.gone("reader1")
    assert (await queued.open("stranger")).version == queued.core.version, "nobody waits any more"


async def test_a_place_is_not_kept_free_for_who_does_not_come_again(queued: Source) -> None:
    await half_read(queued)
    await queued.refusal("first")
    queued.server.gone("reader0")
    await asyncio.sleep(WAITED_FOR_S - 0.1)
    assert (await queued.refusal("stranger")).text == BEHIND
    await asyncio.sleep(0.2)
    assert (await queued.open("stranger")).version == queued.core.version


async def test_who_comes_first_and_asks_for_what_is_not_there_holds_nobody_up(queued: Source) -> None:
    for number, (version, stage) in enumerate(((queued.core.version + 5, 0), (0, 3))):
        await queued.refusal("first", version, stage)
        assert (await queued.open(f"stranger{number}")).version == queued.core.version


async def test_a_crowd_that_asked_before_waits_behind_who_comes_first(queued: Source) -> None:
    """Each state that is copied takes its time: the one after the other, in the order of those that asked."""
    snapshot = queued.server.snapshot

    async def slow() -> Snapshot:
        copied = await snapshot()
        await asyncio.sleep(4.0)
        queued.step()  # the next one needs another copy
        return copied

    queued.server.snapshot = slow  # type: ignore[method-assign]

    async def asks(name: str) -> float:
        while True:
            try:
                await queued.open(name)
                queued.server.gone(name)
                return now_s()
            except NotReady as refusal:
                await asyncio.sleep(refusal.retry_after_s)

    began = now_s()
    crowd = [asyncio.create_task(asks(f"stranger{number}")) for number in range(6)]
    await asyncio.sleep(1.0)
    assert await asks("first") - began < 8.5, "one was being served already"
    ends = await asyncio.gather(*crowd)
    assert max(ends) - began > 20.0 and max(ends) - began < 40.0


# --- hashes -------------------------------------------------------------------------------------------------


async def test_the_body_of_an_answer_has_the_hash_of_each_chunk(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_leases, "CHUNK_BYTES", 24)
    answer = await source.call("state", OpenState(run=RUN.id, stage=0))
    state = source.core.compute.state.copy()
    opened = unpack(answer.header, Opened)
    expected = b""
    for described in opened.tensors:
        data = state[described.name].numpy()
        for start in range(0, len(data), 3):
            expected += digest_of(data[start : start + 3].tobytes())
    assert b"".join(answer.body) == expected


async def test_an_exact_sum_is_given_out_in_as_many_bytes_as_it_needs() -> None:
    network = CalmNetwork()
    giver, taker = network.join("giver").transport, network.join("taker").transport
    total = torch.arange(-3000, 3000)
    lease = await Leases(RUN, giver).add("sum", None, Snapshot(version=0, tensors={"sum": total}))
    ask = pack(FetchChunk(run=RUN.id, lease=lease.opened.lease, index=0))
    answer = await taker.call("giver", "chunk", ask, max_answer_bytes=1 << 20)
    assert sum(len(memoryview(buffer)) for buffer in answer.body) < 2.1 * len(total)
    assert torch.equal(whole_numbers.unpack(answer.body, len(total)), total)
    await network.close()


# --- saved versions -----------------------------------------------------------------------------------------


async def test_saved_versions_are_told_and_given_out(saving: Source) -> None:
    answer = await saving.call("saved", AskSaved(run=RUN.id))
    assert unpack(answer.header, Saved) == Saved(stages=(SavedStage(stage=0, versions=(2, 3, 4)),))
    for version in (2, 4):
        got, tensors = await saving.download(version)
        assert got == version
        assert all(bool((tensor == version).all()) for tensor in tensors.values())
    # The newest without a number is what it has live.
    assert (await saving.download())[0] == 0


async def test_of_many_saved_versions_the_newest_are_told() -> None:
    network = CalmNetwork()
    StateLeases(RUN, network.join("source").transport, {0: SavedHere(*range(100))})
    answer = await network.join("asker").transport.call("source", "saved", pack(AskSaved(run=RUN.id)))
    assert unpack(answer.header, Saved) == Saved(
        stages=(SavedStage(stage=0, versions=tuple(range(36, 100))),)
    )


async def test_the_live_version_may_be_asked_for_by_its_number(saving: Source) -> None:
    saving.step()
    saving.core.generation = Generation(1, 1)
    opened = await saving.open(version=1)
    assert (opened.version, opened.generation) == (1, saving.core.generation)


async def test_a_copy_that_was_saved_or_made_before_the_run_went_back_is_not_the_newest(
    saving: Source,
) -> None:
    """Whoever took it for that would be told to download again, and again get the same."""
    saved = await saving.open("keeper", version=2)
    saving.step()
    saving.step()
    for number in (1, 2):
        saving.core.generation = Generation(number, 2)
        newest = await saving.open(f"joiner{number}")
        assert (newest.version, newest.generation) == (2, saving.core.generation)
    assert await saving.open() == newest
    assert (await saving.open("keeper", version=2)).lease in (saved.lease, newest.lease)


async def test_a_live_version_that_is_passed_while_it_is_copied_is_not_given_out_as_another() -> None:
    source = Source(SavedHere())
    for _ in range(4):
        source.step()
    snapshot = source.server.snapshot

    async def stepping() -> Snapshot:
        source.step()
        return await snapshot()

    source.server.snapshot = stepping  # type: ignore[method-assign]
    with pytest.raises(Refused) as caught:
        await source.open(version=4)
    assert caught.value.text == "version 4 of stage 0 is not here; saved are: none"


async def test_a_peer_that_joins_itself_gives_out_what_it_has_saved(saving: Source) -> None:
    saving.core.joined = False
    assert (await saving.refusal()).text == "this peer is joining itself"
    assert (await saving.download(2))[0] == 2


async def test_a_peer_that_joins_itself_and_saves_nothing_says_so(source: Source) -> None:
    source.core.joined = False
    assert (await source.refusal(version=-1)).text == "this peer is joining itself"
    text = "version 2 of stage 0 is not here; saved are: none"
    assert (await source.refusal(version=2)).text == text
    source.core.joined = True
    assert (await source.refusal(version=2)).text == text


@pytest.mark.parametrize(
    ("version", "kind", "text"),
    [
        (7, NotReady, "version 7 of stage 0 is not here; saved are: 2, 3, 4"),
        (1, Refused, "version 1 of stage 0 is not here; saved are: 2, 3, 4"),
        (3, Refused, "version 3 of stage 0 cannot be given: the file of version 3 is damaged"),
    ],
)
async def test_a_version_that_is_not_there_is_refused_with_what_is(
    saving: Source, version: int, kind: type[SwarmError], text: str
) -> None:
    refused = await saving.refusal(version=version)
    assert (type(refused), refused.text) == (kind, text)


async def test_copies_of_saved_versions_do_not_take_the_room_of_live_ones(
    saving: Source, clock: Clock
) -> None:
    assert isinstance(saving.server._stores[0], SavedHere)
    saving.server._stores[0].here[:] = [2, 4, 6]
    await saving.open("a", 2)
    await saving.open("b", 4)
    assert (await saving.refusal("c", 6)).text == OTHERS
    assert (await saving.open("c")).version == 0
    # Two that read the same version share a copy.
    loads = saving.server._stores[0].loads
    assert (await saving.open("d", 4)).version == 4
    assert saving.server._stores[0].loads == loads


# --- a keeper: shelves, and nobody who trains ---------------------------------------------------------------


async def test_a_keeper_gives_out_what_is_on_its_shelves() -> None:
    network = CalmNetwork()
    shelves = {0: SavedHere(2, 4), 1: SavedHere()}
    StateLeases(RUN, network.join("source").transport, shelves, most_saved=1)
    asker = network.join("asker").transport
    got = await download(asker, state_of(RUN, 0), ["source"])
    assert (got.opened.version, got.opened.last_commit) == (4, None)
    for stage, text in (
        (1, "no version of stage 1 is saved here yet"),
        (2, "this peer keeps no checkpoints of stage 2"),
    ):
        with pytest.raises(SwarmError) as caught:
            await asker.call("source", "state", pack(OpenState(run=RUN.id, stage=stage)))
        assert caught.value.text == text
    answer = await asker.call("source", "saved", pack(AskSaved(run=RUN.id)))
    assert unpack(answer.header, Saved) == Saved(stages=(SavedStage(stage=0, versions=(2, 4)),))
    # At most one copy at once.
    await asker.call(
        "source", "state", pack(OpenState(run=RUN.id, stage=0, version=2)), max_answer_bytes=1 << 20
    )
    with pytest.raises(NotReady, match=OTHERS):
        await network.join("other").transport.call("source", "state", pack(OpenState(run=RUN.id, stage=0)))


async def test_a_keeper_reads_each_version_once_whoever_opens_them_how_often() -> None:
    """Gigabytes are hashed for it: a crowd that opened one version after another kept it busy for ever."""
    network, saved = CalmNetwork(), SavedHere(2, 4, 6)
    leases = StateLeases(RUN, network.join("source").transport, {0: saved}, most_saved=5)
    add, joiner = leases.add, network.join("joiner").transport

    async def slow(pool: str, what: object, content: Snapshot) -> Lease:
        await asyncio.sleep(4.0)
        return await add(pool, what, content)

    leases.add = slow  # type: ignore[assignment, method-assign]
    for version in saved.here:  # it need not wait where the one before could not be had
        question = OpenState(run=RUN.id, stage=0, version=version)
        await joiner.call("source", "state", pack(question), max_answer_bytes=1 << 20)
    for opened in range(30):
        crowd = network.join(f"stranger{opened}").transport
        question = OpenState(run=RUN.id, stage=0, version=saved.here[opened % 3])
        await crowd.call("source", "state", pack(question), max_answer_bytes=1 << 20)
        await asyncio.sleep(state_leases.LEASE_S / 2)
    assert saved.loads == 3
    await asyncio.sleep(10 * state_leases.LEASE_S)
    assert len(leases.of("saved")) == 3
    del saved.here[0]
    assert await leases.versions(0) == [4, 6]
    await asyncio.sleep(2 * state_leases.LEASE_S)
    assert [lease.opened.version for lease in leases.of("saved")] == [4, 6], "the disk has its room again"
    await network.close()


async def test_a_state_is_given_out_without_a_commit_that_fits_into_no_header() -> None:
    """In a run of 100 stages whose commits are proven: its readers would never join."""
    leases = Leases(RUN, CalmNetwork().join("source").transport)
    proof = Proof("12D3KooW" + "x" * 44, Prepared("r" * 32, 1.5, "d" * 32, bytes(64)))
    for stages, is_said in ((1, True), (200, False)):
        commit = Commit(0, 1.5, ((proof, proof),) * stages)
        lease = await leases.add("state", 0, Snapshot(1, {"w": torch.zeros(2)}, last_commit=commit))
        assert (lease.opened.last_commit == commit) is is_said
        assert len(leases.read_by("reader", lease).header) <= MAX_HEADER_BYTES


async def test_a_peer_keeps_no_saved_version_open_that_nobody_reads(saving: Source) -> None:
    """Unlike a keeper, whose device needs no memory: `test_a_keeper_reads_each_version_once`."""
    await saving.open(version=2)
    await asyncio.sleep(2 * state_leases.LEASE_S)
    assert not saving.server.of("saved")


@pytest.mark.parametrize(
    ("method", "message"),
    [("saved", AskSaved(run="other")), ("close", CloseLease(run="other", lease=""))],
)
async def test_another_run_is_refused(source: Source, method: str, message: object) -> None:
    with pytest.raises(Refused) as caught:
        await source.call(method, message)
    assert caught.value.text == f"this peer serves run {RUN.id}, not 'other'"


async def test_a_reader_has_no_results_kept_that_its_source_holds_no_more(source: Source) -> None:
    """It opens that of each step, and reads on: the peer would keep the gradients of all steps."""
    for t in range(6):
        vector = torch.zeros(4)
        content = Snapshot(version=t, tensors={"gradient": vector})
        await source.server.lend("reader", "held", (-1, None, None), content, vector)
        source.step()
    assert [lease.opened.version for lease in source.server.of("held")] == [3, 4, 5]


async def test_what_a_meeting_had_is_read_until_the_next_one(source: Source) -> None:
    """An island that comes late reads it when the others have taken many steps."""
    vector = torch.zeros(4)
    content = Snapshot(version=0, tensors={"gradient": vector})
    source.core.met = OpenStep(0, Ledger(0, 4))
    await source.server.lend("reader", "held", (-1, None, None), content, vector)
    for _ in range(6):
        source.step()
        source.server._drop_old()
    assert len(source.server.of("held")) == 1
    source.core.met = None
    source.server._drop_old()
    assert not source.server.of("held")


async def test_who_asks_again_and_again_what_is_saved_has_it_read_seldom() -> None:
    """A keeper of 32 stages had a second to do for 80 questions, and was late for a stage that was lost."""

    class Counted(SavedHere):
        looks = 0

        def versions(self) -> Sequence[int]:
            self.looks += 1
            return super().versions()

    source = Source(store := Counted(3))
    asked = [source.call("saved", AskSaved(run=RUN.id), by=f"peer {number % 8}") for number in range(200)]
    assert len({answer.header for answer in await asyncio.gather(*asked)}) == store.looks == 1
    await asyncio.sleep(SAID_S)
    await source.call("saved", AskSaved(run=RUN.id))
    assert store.looks == 2
    source.core.close()
    await source.network.close()


@pytest.mark.parametrize("closes", [True, False])
async def test_two_that_close_or_open_what_they_read_again_and_again_lose_their_places_too(
    source: Source, clock: Clock, closes: bool
) -> None:
    """They were new readers each time: nobody else got the state, for ever."""
    await half_read(source)
    leases = {f"reader{number}": lease.opened for number, lease in enumerate(source.server.of("live"))}
    began, joined = clock.now, False
    while not joined and clock.now < began + 300.0:
        for name, lease in leases.items():
            with contextlib.suppress(SwarmError):
                if closes:
                    await source.call("close", CloseLease(run=RUN.id, lease=lease.lease), name)
                else:
                    await source.open(name, lease.version)
                await source.read(lease, name)
        try:
            joined = bool(await source.open("joiner"))
        except NotReady:
            clock.now += 1.0
    assert joined and clock.now - began <= 30.0


async def test_of_a_crowd_of_readers_those_that_read_last_are_known() -> None:
    """A keeper has a version open for as long as its file: it remembered each identity that ever read it."""
    network = CalmNetwork()
    leases = Leases(RUN, network.join("keeper").transport)
    lease = await leases.add("saved", 0, Snapshot(version=0, tensors={"a": torch.zeros(4)}))
    for number in range(MAX_READERS + 5):
        leases.read_by(f"stranger {number}", lease)
        if number % 3 == 0:
            leases.read_by("reader", lease)
    assert len(lease.readers) == MAX_READERS and "reader" in lease.readers
    assert "stranger 0" not in lease.readers
    await network.close()


async def test_what_is_known_of_a_reader_is_a_bit_for_each_chunk() -> None:
    """Of a crowd that read a keeper's checkpoints all of its memory was full of what each had read."""
    network = CalmNetwork()
    leases = Leases(RUN, network.join("keeper").transport)
    lease = await leases.add("saved", 0, Snapshot(version=0, tensors={"a": torch.zeros(4)}))
    reader = lease.reader("stranger", 0.0)
    for index in (*range(10_000), 5, 9_999):
        reader.reads(index, 3, 0.0)
    assert reader.read_bytes == 30_000 and sys.getsizeof(reader.chunks) < 2000
    await network.close()


def test_who_asks_for_chunks_without_end_holds_up_nothing_else() -> None:
    """To pack those of an exact sum took half of a peer's time, for one that gives up each."""

    class Alone:
        def serve(self, method: str, handler: Handler) -> None:
            handlers[method] = handler

    handlers: dict[str, Handler] = {}

    async def turns() -> int:
        """Of all else, while 20 chunks are asked for."""
        leases, count = Leases(RUN, Alone()), 0  # type: ignore[arg-type]
        content = Snapshot(version=0, tensors={"sum": torch.arange(1 << 17)})
        lease = await leases.add("held", None, content)
        header = pack(FetchChunk(run=RUN.id, lease=lease.opened.lease, index=0))
        asked = [asyncio.ensure_future(handlers["chunk"](Asked(header))) for _ in range(20)]  # type: ignore
        while not all(one.done() for one in asked):
            count += 1
            await asyncio.sleep(0)
        return count

    class Asked(NamedTuple):
        header: bytes
        peer: str = "stranger"

    assert asyncio.run(turns()) > 20
