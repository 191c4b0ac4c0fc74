"""A state from several peers at once: each chunk is checked, the load is shared, nothing is fetched twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from peers.ports import Answer, Request
from peers.stage.server import StagePeer
from peers.storage.checkpoint_store import CheckpointStore
from peers.transfer import client, leases
from peers.transfer.client import (
    Download,
    DownloadFailed,
    Offer,
    Partial,
    agreed,
    believed,
    download,
    state_of,
)
from peers.transfer.server import StateLeases
from swarm.digest import DIGEST_BYTES
from swarm.errors import Busy, NotReady, PeerFault
from swarm.ids import Generation
from swarm.manifest import IslandsSpec, audit_run
from swarm.protocol import rounds
from swarm.protocol.rounds import NO_VOICE, Commit, Decision, Plan
from swarm.wire.messages import Opened, TensorForm
from tests.peers.lies import flip_a_bit, offered
from tests.peers.loops import swarm
from tests.peers.network import CalmNetwork
from tests.seeds import some

pytestmark = pytest.mark.virtual_time

RUN = audit_run(stages=1, steps=20, microbatches_per_step=40)
CHUNKS = 14
"""Of the 40 weights, three in each."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "CHUNK_BYTES", 24)
    monkeypatch.setattr(client, "IN_FLIGHT", 3)


def state(version: int, changed: int = 0) -> dict[str, torch.Tensor]:
    """Of each version other weights. `changed`: so many of them, the first ones, are invented."""
    made = torch.Generator().manual_seed(version)
    weights = torch.randn(40, generator=made, dtype=torch.float64)
    weights[:changed] += 1
    return {"weights": weights}


class Saved:
    """A shelf in memory."""

    def __init__(self, *versions: int, changed: int = 0) -> None:
        self.states = {version: state(version, changed) for version in versions}

    def versions(self) -> Sequence[int]:
        return sorted(self.states)

    def load(self, version: int) -> Mapping[str, torch.Tensor]:
        return self.states[version]


class Net(CalmNetwork):
    """`give("a", Saved(4))`: somebody who has that state. `get("a", "b")`: download it from them."""

    def __init__(self, *, latency_s: float = 0.0) -> None:
        super().__init__(silence_s=0.05, latency_s=latency_s)
        self.me = self.join("me")
        self.faults: list[PeerFault] = []
        self.progress: list[tuple[int, int, int]] = []
        self.act: dict[tuple[str, int], Callable[[], None]] = {}
        self.on_deliver = self._delivered
        self.chunks: Counter[str] = Counter()

    def give(self, name: str, saved: Saved) -> Saved:
        StateLeases(RUN, self.join(name).transport, {0: saved})
        return saved

    def when(self, name: str, nth: int, act: Callable[[], None]) -> None:
        """Do `act` when the n-th chunk is asked of `name`."""
        self.act[name, nth] = act

    def _delivered(self, caller: str, callee: str, method: str) -> None:
        if method == "chunk":
            self.chunks[callee] += 1
            self.act.pop((callee, self.chunks[callee]), lambda: None)()

    def tamper(self, name: str, method: str, change: Callable[[Answer], Answer]) -> None:
        """From now on the answers of `name` to `method` pass through `change`."""
        transport = self.peers[name].transport
        honest, limit = transport.handlers[method]

        async def handle(request: Request) -> Answer:
            return change(await honest(request))

        transport.serve(method, handle, max_body_bytes=limit)

    async def get(
        self,
        *sources: str,
        version: int = -1,
        partial: Partial | None = None,
        voice: Mapping[str, int] = NO_VOICE,
    ) -> Download:
        return await download(
            self.me.transport, state_of(RUN, 0, version), sources, voice=voice, partial=partial,
            progress=lambda *told: self.progress.append(told), on_fault=self.faults.append,
        )  # fmt: skip

    async def fails(self, *sources: str, **options: Any) -> DownloadFailed:
        with pytest.raises(DownloadFailed) as caught:
            await self.get(*sources, **options)
        return caught.value

    def blamed(self) -> list[tuple[str, str]]:
        return [(fault.peer, fault.text) for fault in self.faults]


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    built = Net(latency_s=0.001)
    yield built
    await built.close()


def is_of(got: Download, version: int) -> bool:
    return got.opened.version == version and torch.equal(got.tensors["weights"], state(version)["weights"])


# --- sharing the load ---------------------------------------------------------------------------------------


async def test_sources_share_the_load_and_no_chunk_is_fetched_twice(net: Net) -> None:
    for name in "abc":
        net.give(name, Saved(4))
    got = await net.get("a", "b", "c")
    assert is_of(got, 4)
    assert sorted(got.sources) == ["a", "b", "c"] and not net.faults
    assert sum(net.chunks.values()) == CHUNKS and min(net.chunks.values()) >= 3


async def test_of_a_small_state_too_each_source_gives_its_share(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "IN_FLIGHT", CHUNKS)  # one source could have all of it on its way at once
    net.give("a", Saved(4))
    net.give("b", Saved(4))
    assert is_of(await net.get("a", "b"), 4)
    assert net.chunks == {"a": CHUNKS / 2, "b": CHUNKS / 2}


async def test_progress_is_told_from_nothing_to_everything(net: Net) -> None:
    net.give("a", Saved(4))
    net.give("b", Saved(4))
    await net.get("a", "b")
    done = [here for here, _, _ in net.progress]
    assert done[0] == 0 and done[-1] == 320 and done == sorted(done)
    assert {total for _, total, _ in net.progress} == {320}
    assert max(sources for _, _, sources in net.progress) == 2


async def test_a_fast_source_gives_more_and_takes_over_what_a_slow_one_has(net: Net) -> None:
    net.give("fast", Saved(4))
    net.give("slow", Saved(4))
    for nth in (1, 2, 3):
        net.delay_answer("slow", "chunk", 1000.0, nth)
    got = await net.get("fast", "slow")
    assert is_of(got, 4) and got.sources == ("fast",) and not net.faults
    assert (net.chunks["slow"], net.chunks["fast"]) == (3, CHUNKS)


async def test_a_chunk_that_comes_a_little_later_than_others_is_waited_for(net: Net) -> None:
    net.give("a", Saved(4))
    net.give("b", Saved(4))
    net.delay_answer("b", "chunk", 0.3, 2)
    got = await net.get("a", "b")
    assert is_of(got, 4) and sum(net.chunks.values()) == CHUNKS


async def test_our_own_id_is_no_source_and_nobody_is_asked_twice(net: Net) -> None:
    net.give("a", Saved(4))
    got = await net.get("me", "a", "a")
    assert is_of(got, 4) and got.sources == ("a",)
    assert (await net.fails("me")).text == "could not download stage 0: no peer serves it"


async def test_of_many_sources_a_few_are_asked(net: Net) -> None:
    names = [f"s{number}" for number in range(client.MAX_SOURCES + 1)]
    for name in names:
        net.give(name, Saved(4))
    assert set((await net.get(*names)).sources) <= set(names[:-1])
    assert net.peers[names[-1]].transport.calls["state"] == 0


async def test_leases_are_closed_in_the_end(net: Net) -> None:
    for name in "ab":
        net.give(name, Saved(4))
    net.give("c", Saved(3))
    early: list[int] = []
    net.when("a", 1, lambda: early.append(net.peers["c"].transport.calls["close"]))
    await net.get("a", "b", "c")
    assert early == [1], "who is of no use is let go at once, not when hours have passed"
    await asyncio.sleep(client.CLOSE_S)
    assert [net.peers[name].transport.calls["close"] for name in "abc"] == [1, 1, 1]


async def test_a_source_that_is_busy_is_asked_again(net: Net) -> None:
    net.give("a", Saved(4))
    transport = net.peers["a"].transport
    honest, _ = transport.handlers["chunk"]
    busy = iter([True, True, False, True])

    async def handle(request: Request) -> Answer:
        if next(busy, False):
            raise Busy("many calls of yours are pending already", retry_after_s=0.001)
        return await honest(request)

    transport.serve("chunk", handle)
    assert is_of(await net.get("a"), 4)


async def test_a_source_that_stays_busy_is_not_waited_for_as_long_as_it_says(net: Net) -> None:
    """It has more voice than the other one, and offers something else: 20 minutes."""
    net.give("a", Saved(4))
    net.give("liar", Saved(4, changed=1))

    async def never(request: Request) -> Answer:
        raise Busy("not now", retry_after_s=60.0)

    net.peers["liar"].transport.serve("chunk", never)
    began_s = net.loop.now_s
    assert is_of(await net.get("a", "liar", voice={"a": 5, "liar": 9}), 4)
    assert net.loop.now_s - began_s < 60.0


async def test_a_download_that_is_cancelled_leaves_nothing_running(net: Net) -> None:
    net.give("a", Saved(4))
    net.give("b", Saved(3))
    reached = asyncio.Event()
    net.when("a", 4, reached.set)
    before = asyncio.all_tasks()
    task = asyncio.create_task(net.get("a", "b"))
    await reached.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    await net.close()
    assert asyncio.all_tasks() == before


# --- sources that die ---------------------------------------------------------------------------------------


async def test_a_source_that_is_killed_gives_its_chunks_back(net: Net) -> None:
    for name in "abc":
        net.give(name, Saved(4))
    net.when("b", 2, lambda: net.kill("b"))
    got = await net.get("a", "b", "c")
    assert is_of(got, 4)
    assert net.blamed() == [("b", "peer b: the connection broke")]


async def test_a_source_that_hangs_gives_its_chunks_back(net: Net) -> None:
    for name in "ab":
        net.give(name, Saved(4))
    net.when("b", 1, lambda: net.stop("b"))
    assert is_of(await net.get("a", "b"), 4)


async def test_when_all_die_what_came_is_not_fetched_again(net: Net) -> None:
    for name in "ab":
        net.give(name, Saved(4))
        net.when(name, 5, lambda name=name: net.kill(name))
    partial = Partial()
    failed = await net.fails("a", "b", partial=partial)
    assert failed.reasons == {name: f"peer {name}: the connection broke" for name in "ab"}
    assert failed.text == (
        "could not download stage 0: " + "; ".join(failed.reasons[name] for name in failed.reasons)
    )
    here, before = net.progress[-1][0], len(net.progress)
    assert 0 < here < 320
    net.give("c", Saved(4))
    got = await net.get("c", partial=partial)
    assert is_of(got, 4) and net.progress[before][0] == here
    assert net.chunks["c"] == CHUNKS - here // 24
    # What was handed out is not given a second time.
    got.tensors["weights"].zero_()
    assert is_of(await net.get("c", partial=partial), 4)


async def test_what_came_of_another_version_is_used_where_the_bytes_are_the_same(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "IN_FLIGHT", 1)  # one after another: the first nine come
    old, new = net.give("old", Saved(4)), Saved(5)
    new.states[5]["weights"][:12] = old.states[4]["weights"][:12]
    net.give("new", new)
    net.when("old", 10, lambda: net.kill("old"))
    partial = Partial()
    await net.fails("old", partial=partial)
    assert net.progress[-1][0] == 9 * 24
    got = await net.get("new", partial=partial)
    assert torch.equal(got.tensors["weights"], new.states[5]["weights"])
    assert net.chunks["new"] == CHUNKS - 4


async def test_when_the_believed_sources_die_others_with_another_version_are_read(net: Net) -> None:
    net.give("a", Saved(4))
    net.give("b", Saved(4))
    net.give("c", Saved(5))
    net.when("a", 2, lambda: net.kill("a"))
    net.when("b", 3, lambda: net.kill("b"))
    assert is_of(await net.get("a", "b", "c"), 5)


async def test_what_is_here_of_another_form_of_state_is_forgotten(net: Net) -> None:
    net.give("a", Saved(4))
    net.when("a", 9, lambda: net.kill("a"))
    partial = Partial()
    await net.fails("a", partial=partial)
    partial.fit({"weights": torch.zeros(7)})
    net.give("b", Saved(4))
    assert is_of(await net.get("b", partial=partial), 4)
    assert net.chunks["b"] == CHUNKS


async def test_each_source_that_cannot_give_says_why(net: Net) -> None:
    net.give("none", Saved())
    net.join("stranger")
    assert (await net.fails("none", "stranger", "dead")).reasons == {
        "dead": "peer dead: cannot be reached",
        "none": "peer none: no version of stage 0 is saved here yet",
        "stranger": "peer ranger: no such method: 'state'",
    }


# --- several versions ---------------------------------------------------------------------------------------


async def test_what_most_sources_have_is_taken_and_the_newest_if_as_many_have_it(net: Net) -> None:
    for name, version in {"a": 4, "b": 4, "c": 5}.items():
        net.give(name, Saved(version))
    assert is_of(await net.get("a", "b", "c"), 4)
    assert is_of(await net.get("a", "c"), 5)
    assert is_of(await net.get("c", "b"), 5)


def stuck(net: Net, name: str, after: int) -> None:
    """So many chunks come from it, and no more."""
    for nth in range(after + 1, 2 * CHUNKS):
        net.delay_answer(name, "chunk", 1000.0, nth)


async def test_a_source_at_another_version_helps_if_it_still_has_the_believed_one(net: Net) -> None:
    for name in ("a", "b"):
        net.give(name, Saved(4))
        stuck(net, name, after=2)
    net.give("ahead", Saved(4, 5))
    got = await net.get("a", "b", "ahead")
    assert is_of(got, 4) and sorted(got.sources) == ["a", "ahead", "b"]


@pytest.mark.parametrize("before", [(4,), ()], ids=["at an earlier version", "with nothing yet"])
async def test_a_source_that_is_a_little_behind_helps_as_soon_as_it_is_there(
    net: Net, before: tuple[int, ...]
) -> None:
    net.give("a", Saved(5))
    stuck(net, "a", after=5)
    behind = net.give("behind", Saved(*before))
    net.when("a", 5, lambda: behind.states.update({5: state(5)}))
    got = await net.get("a", "behind")
    assert is_of(got, 5) and set(got.sources) == {"a", "behind"}


async def test_a_source_whose_bytes_of_the_believed_version_are_others_is_left_alone(net: Net) -> None:
    """It may compute on another kind of device: no fault, and of no use."""
    net.give("a", Saved(4))
    net.give("b", Saved(4))
    net.give("other kind", Saved(4, 5, changed=40))
    assert is_of(await net.get("a", "b", "other kind"), 4)
    assert net.chunks["other kind"] == 0 and not net.faults
    # Asked once more on the way, unless all was here before.
    assert net.peers["other kind"].transport.calls["close"] in (1, 2)


async def test_a_saved_version_is_read_from_all_who_have_it(net: Net) -> None:
    net.give("a", Saved(2, 4))
    net.give("b", Saved(2))
    net.give("c", Saved(4))
    got = await net.get("a", "b", "c", version=2)
    assert is_of(got, 2) and set(got.sources) == {"a", "b"}
    failed = await net.fails("b", "c", version=3)
    assert failed.reasons == {
        "b": "peer b: version 3 of stage 0 is not here; saved are: 2",
        "c": "peer c: version 3 of stage 0 is not here; saved are: 4",
    }


async def test_a_pinned_version_is_given_out() -> None:
    async with swarm(audit_run(stages=1, steps=3), stages=1, replicas=1) as s:
        s.add_trainer("trainer")
        await s.until_finished()
        peer = s.peers["s0p0"]
        pinned = {"weights": torch.full((s.run.M,), 0.5, dtype=torch.float64)}
        peer.store.pin(2, pinned)
        end = s.add_stranger().end
        now = peer.core.compute.state.copy()
        got = await download(end.transport, state_of(s.run, 0, 2), ["s0p0"])
        assert got.opened.version == 2 and torch.equal(got.tensors["weights"], pinned["weights"])
        newest = await download(end.transport, state_of(s.run, 0), ["s0p0"])
        assert newest.opened.version == 3 and torch.equal(newest.tensors["weights"], now["weights"])


def test_a_pinned_version_takes_the_place_of_the_one_before() -> None:
    store = CheckpointStore(RUN, 0, None)
    store.pin(2, state(2))
    store.pin(4, state(4))
    assert store.versions() == [4]


def test_what_islands_have_in_common_is_kept_beside_what_they_have_not() -> None:
    run = replace(RUN, islands=IslandsSpec(count=2, local_steps=1))
    store = CheckpointStore(run, 0, None)
    for version, kept in ((2, [2]), (3, [2, 3]), (5, [2, 5]), (4, [4])):
        store.pin(version, state(version))
        assert store.versions() == kept


# --- liars --------------------------------------------------------------------------------------------------


def with_body(nbytes: int) -> Callable[[Answer], Answer]:
    return lambda answer: Answer(answer.header, [bytes(nbytes)] if nbytes else [])


VIRUS = TensorForm(name="virus", numel=1 << 60, dtype="float64")
TWICE = TensorForm(name="weights", numel=40, dtype="float64")
NOT_ITS_OWN = "offers something that is not stage 0: "


@pytest.mark.parametrize(
    ("method", "change", "why"),
    [
        ("chunk", flip_a_bit, "chunk 0 of stage 0 does not fit its digest"),
        ("chunk", lambda answer: Answer(b"\xc1", answer.body), "malformed Ack header"),
        (
            "chunk",
            lambda answer: Answer(answer.header, []),
            "a chunk came in buffers of [] bytes; expected [24]",
        ),
        ("chunk", with_body(23), "a chunk came in buffers of [23] bytes; expected [24]"),
        ("chunk", lambda answer: Answer(answer.header, [bytes(25)]), "an answer of 25 bytes; at most 24 fit"),
        ("state", offered(tensors=()), NOT_ITS_OWN + "[]"),
        ("state", offered(tensors=(VIRUS,)), NOT_ITS_OWN + "['virus']"),
        ("state", offered(tensors=(TWICE, TWICE)), NOT_ITS_OWN + "['weights', 'weights']"),
        ("state", offered(version=21), "offers version 21 of a run of 20 steps"),
        ("state", offered(version=-1), "offers version -1 of a run of 20 steps"),
        (
            "state",
            offered(generation=Generation(1, 21)),
            "offers version 4 of an impossible generation: Generation(number=1, start=21",
        ),
        ("state", offered(generation=Generation(-1, 0)), "offers version 4 of an impossible generation"),
        (
            "state",
            offered(generation=Generation(1, 0, lost_stage=9)),
            "offers version 4 of an impossible generation",
        ),
        ("state", lambda answer: Answer(b""), "malformed Opened header"),
        ("state", with_body(1 << 20), "an answer of 1048576 bytes; at most 448 fit"),
        ("state", with_body(0), "0 bytes of chunks' hashes; expected 448"),
        ("state", with_body(447), "447 bytes of chunks' hashes; expected 448"),
    ],
)
async def test_a_state_that_does_not_fit_is_the_sources_fault(
    net: Net, method: str, change: Callable[[Answer], Answer], why: str
) -> None:
    net.give("liar", Saved(4))
    net.give("honest", Saved(4))
    net.tamper("liar", method, change)
    failed = await net.fails("liar")
    assert failed.reasons["liar"].startswith(f"peer liar: {why}")
    assert [peer for peer, _ in net.blamed()] == ["liar"]
    net.faults.clear()
    assert is_of(await net.get("liar", "honest"), 4)
    assert net.blamed() and {peer for peer, _ in net.blamed()} == {"liar"}


async def test_who_answers_with_another_version_than_was_asked_for_is_at_fault(net: Net) -> None:
    net.give("liar", Saved(4))
    net.tamper("liar", "state", offered(version=5))
    assert (await net.fails("liar", version=4)).text.endswith("offers version 5 instead of 4")


async def test_who_sends_one_bad_chunk_is_not_asked_again(net: Net) -> None:
    net.give("liar", Saved(4))
    net.give("honest", Saved(4))
    answers = iter(range(99))
    net.tamper("liar", "chunk", lambda a: flip_a_bit(a) if next(answers) == 2 else a)
    got = await net.get("liar", "honest")
    assert is_of(got, 4)
    assert len(net.faults) == 1 and "of stage 0 does not fit its digest" in net.faults[0].text
    # What was on its way when the lie was found, and no more.
    assert net.chunks["liar"] <= 3 + client.IN_FLIGHT
    assert sum(net.chunks.values()) <= CHUNKS + client.IN_FLIGHT


async def test_a_liar_whose_hashes_fit_its_lie_loses_against_a_majority(net: Net) -> None:
    net.give("a liar", Saved(4, changed=1))
    net.give("b", Saved(4))
    net.give("c", Saved(4))
    got = await net.get("a liar", "b", "c")
    assert is_of(got, 4) and set(got.sources) == {"b", "c"}
    assert net.chunks["a liar"] == 0


VOICE = {"x": 30, "y": 20}


def strangers(net: Net, many: int, *, changed: int = 1, version: int = 4) -> list[str]:
    """So many of one opinion, each before those with voice in the order of the names."""
    names = [f"a{number}" for number in range(many)]
    for name in names:
        net.give(name, Saved(version, changed=changed))
    return names


@pytest.mark.parametrize("many", [3, client.MAX_SOURCES])
@pytest.mark.parametrize("late_s", [0.0, 2 * client.GATHER_S])
async def test_those_with_voice_are_believed_however_many_others_answered_first(
    net: Net, many: int, late_s: float
) -> None:
    names = strangers(net, many)
    for name in VOICE:
        net.give(name, Saved(4))
        for nth in range(1, 20):  # whenever it is asked: it has gigabytes to copy
            net.delay_answer(name, "state", late_s, nth)
    net.silence_s = 100.0
    got = await net.get(*names, *VOICE, voice=VOICE)
    assert is_of(got, 4) and set(got.sources) == set(VOICE)
    assert not any(net.chunks[name] for name in names)


async def test_of_those_with_voice_the_most_voice_is_believed_not_the_most_heads(net: Net) -> None:
    for name in ("v", "w"):
        net.give(name, Saved(4, changed=1))
    net.give("x", Saved(4))
    assert is_of(await net.get("v", "w", "x", voice={"v": 30, "w": 20, "x": 60}), 4)


async def test_what_others_say_of_the_generation_does_not_count(net: Net) -> None:
    for name in [*strangers(net, 3, changed=0), *VOICE]:
        if name not in net.peers:
            net.give(name, Saved(4))
        else:
            net.tamper(name, "state", offered(generation=Generation(7, 2)))
    got = await net.get("a0", "a1", "a2", *VOICE, voice=VOICE)
    assert is_of(got, 4) and got.opened.generation == Generation()


async def test_strangers_that_say_the_same_give_their_share_and_stop_nothing_by_giving_none(net: Net) -> None:
    names = strangers(net, 3, changed=0)
    for name in names[1:]:
        stuck(net, name, after=0)
    net.give("x", Saved(4))
    got = await asyncio.wait_for(net.get(*names, "x", voice=VOICE), 10.0)
    assert is_of(got, 4) and set(got.sources) == {"a0", "x"}


@pytest.mark.parametrize("busy_s", [10.0, 2 * client.VOICED_S])
async def test_those_with_voice_that_give_to_others_are_waited_for_a_while(net: Net, busy_s: float) -> None:
    strangers(net, 3)
    net.give("x", Saved(4))
    transport, until_s = net.peers["x"].transport, net.loop.now_s + busy_s
    honest, _ = transport.handlers["state"]

    async def handle(request: Request) -> Answer:
        if net.loop.now_s < until_s:
            raise NotReady("others are downloading from this peer", version=4, retry_after_s=1.0)
        return await honest(request)

    transport.serve("state", handle)
    got = await net.get("a0", "a1", "a2", "x", voice=VOICE)
    assert is_of(got, 4) == (busy_s < client.VOICED_S)


async def test_without_any_with_voice_alive_others_are_believed_at_once(net: Net) -> None:
    names = strangers(net, 2, changed=0)
    net.give("x", Saved(4))
    net.kill("x")
    began = net.loop.now_s
    assert is_of(await net.get(*names, "x", voice=VOICE), 4)
    assert net.loop.now_s - began < client.GATHER_S + 1.0


async def test_a_whole_that_does_not_fit_is_not_believed_though_each_chunk_does(net: Net) -> None:
    for name in ("l1", "l2"):
        net.give(name, Saved(4, changed=1))
    net.give("honest", Saved(4))

    def fits(opened: Opened, tensors: Mapping[str, torch.Tensor]) -> str | None:
        return None if torch.equal(tensors["weights"], state(4)["weights"]) else "it is another"

    wanted = replace(state_of(RUN, 0), fits=fits)
    got = await download(net.me.transport, wanted, ["l1", "l2", "honest"], on_fault=net.faults.append)
    assert is_of(got, 4) and set(got.sources) >= {"honest"}
    assert net.blamed() == [(name, f"peer {name}: it is another") for name in ("l1", "l2")]


async def test_of_what_does_not_fit_only_what_is_another_comes_again(net: Net) -> None:
    """Any number of identities could give what the first one gave, each for the price of all of it."""
    crowd = [f"l{number}" for number in range(5)]
    for name in crowd:
        net.give(name, Saved(4, changed=1))
    net.give("true", Saved(4))

    def fits(opened: Opened, tensors: Mapping[str, torch.Tensor]) -> str | None:
        return None if torch.equal(tensors["weights"], state(4)["weights"]) else "it is another"

    wanted, partial = replace(state_of(RUN, 0), fits=fits), Partial()
    for name in crowd:
        with pytest.raises(DownloadFailed, match="it is another"):
            await download(net.me.transport, wanted, [name], partial=partial)
    got = await download(net.me.transport, wanted, ["true"], partial=partial)
    assert is_of(got, 4)
    assert [net.chunks[name] for name in crowd] == [CHUNKS, 0, 0, 0, 0]
    assert net.chunks["true"] == 1


async def test_the_order_of_the_tensors_does_not_matter() -> None:
    like = {"weights": torch.zeros(4), "momentum": torch.zeros(5)}
    values = {"weights": torch.arange(4.0), "momentum": torch.arange(5.0)}

    class Ordered(Saved):
        def __init__(self, *names: str) -> None:
            self.states = {4: {name: values[name] for name in names}}

    network = CalmNetwork()
    for name, order in {"a": ("weights", "momentum"), "b": ("momentum", "weights")}.items():
        StateLeases(RUN, network.join(name).transport, {0: Ordered(*order)})
    me = network.join("me").transport
    got = await download(me, replace(state_of(RUN, 0), like=like), ["a", "b"])
    assert all(torch.equal(got.tensors[name], values[name]) for name in values)
    assert list(got.tensors) == list(like) and set(got.sources) == {"a", "b"}


# --- whom to believe ----------------------------------------------------------------------------------------


def offer(source: str, version: int, hashes: bytes = b"x", **said: Any) -> Offer:
    opened = Opened(lease="", version=version, last_commit=None, tensors=(TWICE,))
    opened = msgspec.structs.replace(opened, **said)
    return Offer(source=source, opened=opened, hashes=(hashes * DIGEST_BYTES,))


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ([offer("a", 4), offer("b", 4), offer("c", 9)], ["a", "b"]),
        ([offer("a", 4), offer("b", 9)], ["b"]),
        ([offer("a", 9), offer("b", 4, generation=Generation(1, 3))], ["b"]),
        ([offer("b", 4, b"y"), offer("a", 4), offer("c", 4, b"y")], ["b", "c"]),
        ([offer("b", 4, b"y"), offer("a", 4)], ["a"]),
        # The same bytes are the same state, whatever else is said of them.
        ([offer("a", 4, generation=Generation(1, 3)), offer("b", 4), offer("c", 9)], ["a", "b"]),
    ],
)
def test_the_largest_group_is_believed(offers: list[Offer], expected: list[str]) -> None:
    assert [each.source for each in believed(offers, NO_VOICE)] == expected
    assert [each.source for each in believed(offers[::-1], NO_VOICE)] == expected


def test_of_era_and_last_go_what_most_say_is_taken() -> None:
    commit, other = Commit(t=3, total_sqnorm=1.0), Commit(t=3, total_sqnorm=2.0)
    group = [
        offer("a", 4, last_commit=other, generation=Generation(7, 2)),
        offer("b", 4, last_commit=commit),
        offer("c", 4, last_commit=commit),
    ]
    assert (agreed(group, NO_VOICE).generation, agreed(group, NO_VOICE).last_commit) == (Generation(), commit)
    # Nobody's "not known" outvotes what somebody knows; a later generation is told by the next directive.
    group = [offer("a", 4), offer("b", 4, last_commit=commit, generation=Generation(1, 2))]
    assert (agreed(group, NO_VOICE).generation, agreed(group, NO_VOICE).last_commit) == (Generation(), commit)


# --- in a swarm ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some(["joiner", "z"], quick=["joiner"]))
async def test_a_joiner_that_comes_in_the_middle_of_a_reduce_neither_blocks_nor_breaks_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the smallest id or the greatest: neither makes it a coordinator that knows of no reduce."""
    plans, real = set[tuple[str, ...]](), rounds.decide

    def decide(run: str, stage: int, t: int, *rest: Any, **owner: Any) -> Decision:
        decision = real(run, stage, t, *rest, **owner)
        if isinstance(decision, Plan) and (stage, t) == (1, 2):
            plans.add(decision.members)
        return decision

    monkeypatch.setattr(rounds, "decide", decide)
    async with swarm(audit_run(stages=2, steps=6), stages=2, replicas=3) as s:
        joined = asyncio.Event()

        def held_back(peer: StagePeer) -> None:
            """In step 2 no part is taken before the joiner has reported, or was reported to, three times."""
            transport = s.network.peers[peer.core.me].transport
            serve, max_body_bytes = transport.handlers["part"]

            async def serve_part(request: Request) -> Answer:
                if peer.core.version == 2:
                    if name not in s.peers:
                        s.add_peer(name, 1)
                        for side in ("by", "to"):
                            s.on_call("report", lambda *_: joined.set(), nth=3, **{side: name})
                    await joined.wait()
                return await serve(request)

            transport.serve("part", serve_part, max_body_bytes=max_body_bytes)

        for peer in s.peers.values():
            if peer.stage == 1:
                held_back(peer)
        s.add_trainer("trainer")
        await s.until_finished()
        assert joined.is_set() and s.peers[name].core.version == 6
        s.assert_each_counted_once()
        assert s.voids() == [] and plans == {("s1p0", "s1p1", "s1p2")}
