"""Old messages, said again at any later time: by a stranger, and by the very peer that said them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from peers.ports import Answer, Buffer
from peers.sim.loop import run_virtual
from peers.sim.network import SimTransport
from swarm.errors import SwarmError
from swarm.ids import PeerId
from swarm.manifest import audit_run
from swarm.records import PeerRecord
from swarm.wire.messages import Work, pack, unpack
from tests.peers.admitted import TRAINER, admitting
from tests.peers.loops import Swarm, swarm
from tests.peers.sybils import give_voice

pytestmark = [pytest.mark.virtual_time, pytest.mark.timeout(300)]

Said = tuple[PeerId, PeerId, str, bytes, list[bytes]]
"""Caller, callee, method, header, body."""
MAX_KEPT = 4000


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def overhear(s: Swarm) -> list[Said]:
    """All that is said from now on."""
    said: list[Said] = []
    honest = s.network.call

    async def call(
        caller: SimTransport, peer: PeerId, method: str, header: bytes, body: Sequence[Buffer], limit: Any
    ) -> Answer:
        if len(said) < MAX_KEPT:
            said.append((caller.peer_id, peer, method, header, [bytes(part) for part in body]))
        return await honest(caller, peer, method, header, body, limit)

    s.network.call = call  # type: ignore[method-assign]
    return said


async def repeat(s: Swarm, said: list[Said], liar: PeerId, dice: random.Random, told: Counter[str]) -> None:
    """One old message again: the liar's own to the same peer, or anybody's to any peer."""
    caller, callee, method, header, body = dice.choice(said)
    if caller != liar and dice.random() < 0.5:
        callee = dice.choice(sorted(s.peers))
    if callee == liar or callee not in s.network.transports or s.network.is_dead(liar):
        return
    transport = s.network.transports[liar]
    with contextlib.suppress(SwarmError):
        await asyncio.wait_for(
            transport.call(
                callee, method, header, [memoryview(part) for part in body], max_answer_bytes=1 << 20
            ),
            20.0,
        )
        told[method] += 1


@pytest.mark.parametrize(
    ("liar", "exact"),
    [
        ("s1p1", True),
        *(pytest.param(liar, True, marks=pytest.mark.further) for liar in ("z", "s0p0", TRAINER)),
        *(pytest.param(liar, False, marks=pytest.mark.further) for liar in ("s0p1", "s1p0")),
    ],
)
async def test_what_was_said_before_changes_nothing_when_it_is_said_again(liar: str, exact: bool) -> None:
    run = replace(audit_run(stages=2, steps=5, microbatches_per_step=8), dtype="float32", checkpoint_every=2)
    run = replace(admitting(run, TRAINER), exact_sums=exact)
    dice, told = random.Random(1), Counter[str]()
    async with swarm(run, replicas=3) as s:
        said = overhear(s)
        await s.until_serving()
        if liar == "z":
            end = s.add_stranger("z").end
            await end.directory.announce(
                PeerRecord(peer="z", run=run.id, stage=1, state="joining", version=0)
            )
        s.add_trainer(TRAINER)
        tasks: list[asyncio.Task[None]] = []
        while not s.finished:
            await asyncio.sleep(0.05)
            old = [one for one in said if liar in ("z", one[0]) or dice.random() < 0.1]
            tasks += [asyncio.create_task(repeat(s, old, liar, dice, told)) for _ in range(6 * bool(old))]
        await asyncio.gather(*tasks)
        s.assert_each_counted_once()
        assert sum(told.values()) > 50 and len(told) > 3


async def lasts_s(repeats: int) -> float:
    """Seconds of a run in which one of stage 0 repeats each finished microbatch so often, as if the last
    stage had lost it.
    """
    run = replace(audit_run(stages=3, steps=8, microbatches_per_step=8), dtype="float32")
    async with swarm(admitting(run), replicas=3) as s:
        give_voice(s, *s.peers)
        await s.until_serving()
        transport = s.network.peers["s0p0"].transport
        honest, under_way = transport.call, set[asyncio.Task[None]]()

        async def again(peer: PeerId, header: bytes, body: Sequence[Buffer], more: dict[str, Any]) -> None:
            lost = pack(msgspec.structs.replace(unpack(header, Work), deepest=2))
            with contextlib.suppress(SwarmError):
                for _ in range(repeats):
                    await honest(peer, "work", lost, body, **more)
                    await asyncio.sleep(0.005)

        async def call(
            peer: PeerId, method: str, header: bytes, body: Sequence[Buffer] = (), **more: Any
        ) -> Answer:
            answer = await honest(peer, method, header, body, **more)
            if method == "work":
                under_way.add(asyncio.ensure_future(again(peer, header, body, more)))
            return answer

        transport.call = call  # type: ignore[method-assign]
        began = s.network.loop.now_s
        s.add_trainer(TRAINER)
        await s.until_finished()
        s.assert_each_counted_once()
        return s.network.loop.now_s - began


def test_who_repeats_finished_microbatches_has_nobody_compute_them_again() -> None:
    """Each was computed again, passed on and undone: steps took 13 % longer."""
    assert run_virtual(lasts_s(4)) <= 1.03 * run_virtual(lasts_s(0))
