"""Bringing a member up to date: every chunk is checked, and what does not fit is refused with its reason."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from peers.events import PeerLost, StateFetched
from peers.ports import Answer, Request
from peers.programs.trained import NoRoom, collect
from peers.stage.state import StageCore
from peers.storage import RESULTS_ENV
from peers.storage.weights import read_stage
from peers.transfer import leases
from peers.transfer.client import DownloadFailed
from peers.transfer.gradient import fetch_gradient
from swarm.errors import NotNow, PeerFault, Refused
from swarm.manifest import audit_run
from swarm.wire.messages import (
    FetchChunk,
    Opened,
    OpenHeld,
    OpenState,
    unpack,
)
from tests.model.chain import weights_of
from tests.peers.lies import flip_a_bit, offered
from tests.peers.loops import Stranger, Swarm, swarm

pytestmark = pytest.mark.virtual_time

RUN = audit_run(stages=2, steps=3, microbatches_per_step=8)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of 8 weights in three chunks."""
    monkeypatch.setattr(leases, "CHUNK_BYTES", 24)


async def trained(s: Swarm) -> Stranger:
    """Take all steps; a stranger that may ask for the result."""
    s.add_trainer("trainer")
    await s.until_finished()
    await s.until(lambda: all(peer.core.digest for _, peer in s.live()))
    return s.add_stranger()


async def refusal(stranger: Stranger, method: str, message: msgspec.Struct) -> str:
    with pytest.raises((Refused, NotNow)) as caught:
        await stranger.send("s1p0", method, message)
    return caught.value.text


def tampered(s: Swarm, name: str, method: str, change: Callable[[Answer], Answer]) -> None:
    """From now on the answers of a peer to `method` pass through `change`."""
    transport = s.network.peers[name].transport
    honest, limit = transport.handlers[method]

    async def handle(request: Request) -> Answer:
        return change(await honest(request))

    transport.serve(method, handle, max_body_bytes=limit)


# --- in a swarm ---------------------------------------------------------------------------------------------


async def test_a_joiner_that_gets_a_corrupted_chunk_takes_the_state_of_another() -> None:
    async with swarm(RUN, replicas=2) as s:
        await trained(s)
        tampered(s, "s1p0", "chunk", flip_a_bit)
        joiner = s.add_peer("joiner", 1)
        await s.until(lambda: joiner.core.version == RUN.steps and s.seen(StateFetched))
        s.assert_each_counted_once()
        assert [event.source for event in s.seen(StateFetched)] == ["s1p1"]
        assert "s1p0" in [event.peer for event in s.seen(PeerLost)]


@pytest.mark.parametrize(
    ("method", "message", "text"),
    [
        ("state", OpenState(run="other", stage=1), f"this peer serves run {RUN.id}, not 'other'"),
        ("state", OpenState(run=RUN.id, stage=0), "this peer serves stage 1, not 0"),
        (
            "chunk",
            FetchChunk(run="other", lease="", index=0),
            f"this peer serves run {RUN.id}, not 'other'",
        ),
        (
            "chunk",
            FetchChunk(run=RUN.id, lease="x" * 99, index=0),
            f"no such download: '{'x' * 20}'; open one again",
        ),
        ("held", OpenHeld(run="other", t=2), f"this peer serves run {RUN.id}, not 'other'"),
        ("held", OpenHeld(run=RUN.id, t=1), "no such sum of step 1 is held here"),
        (
            "held",
            OpenHeld(run=RUN.id, t=2, shared_with=0),
            "stage 0 shares no weights with stage 1",
        ),
        ("held", OpenHeld(run=RUN.id, t=2, shared_of=0), "no such sum of step 2 is held here"),
    ],
)
async def test_what_is_not_to_be_had_is_refused_with_its_reason(
    method: str, message: msgspec.Struct, text: str
) -> None:
    async with swarm(RUN, replicas=1) as s:
        assert await refusal(await trained(s), method, message) == text


async def test_a_chunk_that_is_not_there_is_refused() -> None:
    async with swarm(RUN, replicas=1) as s:
        stranger = await trained(s)
        opened = await stranger.ask("s1p0", "state", OpenState(run=RUN.id, stage=1), Opened)
        for index in (-1, 3):
            chunk = FetchChunk(run=RUN.id, lease=opened.lease, index=index)
            assert await refusal(stranger, "chunk", chunk) == f"there is no chunk {index} of 3"


async def test_a_peer_that_joins_itself_gives_no_state() -> None:
    async with swarm(RUN, replicas=1) as s:
        stranger = await trained(s)
        s.peers["s1p0"].core.joined = False
        assert (
            await refusal(stranger, "state", OpenState(run=RUN.id, stage=1)) == "this peer is joining itself"
        )
        s.peers["s1p0"].core.joined = True


# --- the gradient of one step -------------------------------------------------------------------------------


def seen_by(stranger: Stranger, core: StageCore) -> StageCore:
    """The same stage at another peer."""
    other = copy.copy(core)
    other.transport = stranger.end.transport
    return other


async def test_the_gradient_of_the_last_step_comes_with_its_go() -> None:
    async with swarm(RUN, replicas=1) as s:
        stranger = await trained(s)
        core = s.peers["s1p0"].core
        vector, held, commit, source = await fetch_gradient(seen_by(stranger, core), ["s1p0"], 2, "")
        assert torch.equal(vector, core.applied.reduced)
        assert (held, commit, source) == (core.applied.prepared, core.applied.commit, "s1p0")


def described(**changes: Any) -> Callable[[Answer], Answer]:
    """What is said of a gradient."""

    def change(answer: Answer) -> Answer:
        prepared = unpack(answer.header, Opened).prepared
        return offered(prepared=msgspec.structs.replace(prepared, **changes))(answer)

    return change


@pytest.mark.parametrize(
    ("method", "change", "why"),
    [
        ("chunk", flip_a_bit, "chunk 0 of the gradient of step 2 does not fit its digest"),
        ("held", described(digest="f" * 32), "the gradient does not fit its digest"),
        ("held", described(sqnorm=0.5), "the gradient does not fit its digest"),
        ("held", offered(prepared=None), "the gradient does not fit its digest"),
        ("held", offered(tensors=()), "offers something that is not the gradient of step 2: []"),
    ],
)
async def test_a_gradient_that_does_not_fit_is_the_sources_fault_and_another_is_asked(
    method: str, change: Callable[[Answer], Answer], why: str
) -> None:
    async with swarm(RUN, replicas=2) as s:
        stranger = await trained(s)
        tampered(s, "s1p0", method, change)
        core, faults = s.peers["s1p0"].core, list[PeerFault]()
        with pytest.raises(DownloadFailed) as caught:
            await fetch_gradient(seen_by(stranger, core), ["s1p0"], 2, "", on_fault=faults.append)
        assert caught.value.text == f"could not download the gradient of step 2: peer s1p0: {why}"
        assert [fault.peer for fault in faults] == ["s1p0"]
        vector, *_ = await fetch_gradient(seen_by(stranger, core), ["s1p0", "s1p1"], 2, "")
        assert torch.equal(vector, core.applied.reduced)


async def test_what_is_held_is_lent_once_and_no_longer_than_it_is_read() -> None:
    async with swarm(RUN, replicas=1) as s:
        stranger = await trained(s)
        transport, lent = stranger.end.transport, s.peers["s1p0"]._states
        opened = [await stranger.ask("s1p0", "held", OpenHeld(run=RUN.id, t=2), Opened) for _ in range(2)]
        assert opened[0].lease == opened[1].lease and len(lent.of("held")) == 1
        await fetch_gradient(seen_by(stranger, s.peers["s1p0"].core), ["s1p0"], 2, "")
        await s.until(lambda: transport.calls["close"] or s.network.peers["s1p0"].transport.calls["close"])
        assert len(lent.of("held")) == 1, "who opens it again finds it hashed"
        await s.until(lambda: not lent.of("held"))


# --- for programs that only look ----------------------------------------------------------------------------


async def test_weights_are_waited_for_while_the_directory_fills(tmp_path: Path) -> None:
    """At first it knows of a peer that died only, and of nobody in the other stage."""
    async with swarm(RUN, replicas=2) as s:
        stranger = await trained(s)
        s.kill("s0p0")
        late = [s.network.records[name] for name in ("s0p1", "s1p0", "s1p1")]
        for record in late:
            s.network.expire(record.peer)
        calls: list[str] = []

        def appear(caller: str, callee: str) -> None:
            calls.append(callee)
            if late:
                s.network.announce(late.pop())

        honest = stranger.end.transport.call

        async def call(peer: str, method: str, *args: Any, **options: Any) -> Answer:
            appear("", peer)
            return await honest(peer, method, *args, **options)

        stranger.end.transport.call = call  # type: ignore[method-assign]
        expected = {n: w for _, p in s.live() for n, w in weights_of(p.core.compute).items()}
        end = stranger.end
        assert await collect(RUN, end.transport, end.directory, tmp_path, s.events.append) == RUN.steps
        for stage in range(RUN.S):
            found = read_stage(tmp_path, RUN, stage, RUN.steps)
            assert all(torch.equal(weights, expected[name]) for name, weights in found.items())
        assert set(calls) == {"s0p0", "s0p1", "s1p0", "s1p1"}


@pytest.mark.parametrize("named", ["SWARM_RESULTS", "TMPDIR"])
async def test_where_a_version_has_no_room_that_is_said_once_and_at_once_with_what_names_the_folder(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said no room six times, and at the end that peers give none."""
    async with swarm(RUN, replicas=1) as s:
        stranger, said = await trained(s), list[Any]()
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        end = stranger.end
        monkeypatch.setenv(RESULTS_ENV, str(tmp_path) if named == RESULTS_ENV else "")
        with pytest.raises(NoRoom, match=rf"^no room for version 3 of .* Make room or set {named} to"):
            await collect(RUN, end.transport, end.directory, tmp_path, said.append)
        assert not said
