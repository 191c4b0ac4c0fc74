"""Weights that lie on two stages: one peer of the other stage says alone what its stage found of them."""

from __future__ import annotations

import zlib
from itertools import count

import pytest
import torch

from peers.ports import Answer, Request
from peers.transfer.leases import Snapshot
from swarm.manifest import Run
from swarm.model.layout import shared_terms
from swarm.wire.messages import OpenHeld, unpack
from tests.peers.loops import Swarm, swarm
from tests.peers.runs.test_brought import Text, check, llama_run, one_process
from tests.peers.sybils import TRAINER, admitting, give_voice

pytestmark = [pytest.mark.virtual_time, pytest.mark.timeout(240)]


def tied_run() -> Run:
    run = admitting(llama_run(dtype="float32", steps=3))
    assert shared_terms(run, 0)[2]
    return run


def asked_first(askers: list[str], others: list[str]) -> str:
    """A name that all of some peers ask before others: a liar tries keys until it has one."""

    def order(asker: str, peer: str) -> int:
        return zlib.crc32(f"{asker} {peer}".encode())

    names = (f"liar{number}" for number in count())
    return next(
        name
        for name in names
        if all(order(a, name) < min(order(a, other) for other in others) for a in askers)
    )


def gives_other_parts(s: Swarm, liar: str) -> None:
    """At once, and to all that ask, of each step: numbers that nobody found. Its own sum stays true."""
    states = s.peers[liar]._states  # type: ignore

    async def held(request: Request) -> Answer:
        wanted = unpack(request.header, OpenHeld)
        if wanted.shared_with < 0:
            return await states._serve_held(request)  # type: ignore
        core = s.peers[liar].core
        numel = core.compute.shared.numel(wanted.shared_with)
        made_up = torch.full((numel,), 0.5, dtype=core.compute.state.dtype)
        content = Snapshot(version=wanted.t, tensors={"gradient": made_up})
        return await states.lend(request.peer, "held", ("made up", wanted.t), content, made_up)

    s.network.peers[liar].transport.serve("held", held)


@pytest.mark.parametrize("late_s", [0.0, 6.0], ids=["at once", "late"])
async def test_one_peer_does_not_say_alone_what_its_stage_found_of_a_tied_weight(late_s: float) -> None:
    """`late_s`: so much later the other replicas of its stage have what they found."""
    run = tied_run()
    data = Text(run)
    async with swarm(run, batches=data) as s:
        others = [name for name in s.peers if name[:2] == "s0"]
        liar = asked_first([name for name in s.peers if name[:2] == "s2"], others)
        give_voice(s, *s.peers, liar)
        s.add_peer(liar, 0)
        await s.until_serving()
        await s.until(lambda: s.network.records[liar].state == "serving")
        gives_other_parts(s, liar)
        for name in others if late_s else ():
            s.network.delay_answer(name, "part", late_s)
        s.add_trainer(TRAINER)
        await s.until_finished(limit_s=300.0)
        check(s, one_process(run, data), tolerance=0.0)
