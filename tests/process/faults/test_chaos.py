"""Faults of every kind against processes: only time is lost. Long form: scripts/bench/recovery/chaos.py."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from peers.ports import Answer
from scripts.bench.recovery.chaos import WEIGHTS, Options, deck, play, quick, speaker, verdict
from swarm.manifest import demo_run
from swarm.wire.messages import PeerStatus, pack
from tests.process.swarm_processes import Swarm


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_faults_of_every_kind_change_no_weight_and_leave_nothing() -> None:
    """Each kind once: each microbatch counts once, and the weights are those of one process, to 1e-9."""
    found = play(quick(Options(seed=11)), speaker())
    assert verdict(found) == ""
    assert found["faults"] >= len(WEIGHTS) - len(found["skipped_kinds"])
    assert not found["cells_without_audit"]


def test_a_seed_deals_the_same_faults_and_every_kind_of_them() -> None:
    def dealt(seed: int) -> list[str]:
        return list(itertools.islice(deck(random.Random(seed), WEIGHTS), 200))

    assert dealt(1) == dealt(1) != dealt(2)
    assert Counter(dealt(1)).keys() == WEIGHTS.keys()


class Told:
    """A program that has said where it is, and runs."""

    returncode, addresses = None, ()

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id

    def heard(self, kind: type) -> list[Told]:
        return [self]


def test_a_spare_need_not_be_where_those_are_that_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that was slow when all came to rest holds version 75 of 93: the newest that was saved."""
    said = {"a": ("serving", 93), "b": ("paused", 75), "c": ("joining", 80)}

    async def call(peer: str, method: str, header: bytes) -> Answer:
        state, version = said[peer]
        told = PeerStatus(
            peer=peer, stage=0, state=state, version=version, device="cpu", since=0.0
        )  # fmt: skip
        return Answer(pack(told))

    addresses = SimpleNamespace(learn=lambda peer, at: None)
    transport = SimpleNamespace(call=call, addresses=addresses)
    swarm = Swarm.__new__(Swarm)
    swarm.run = demo_run()
    swarm.programs = list(map(Told, said))  # type: ignore[arg-type]
    node = SimpleNamespace(transport=transport)
    monkeypatch.setattr(swarm, "as_a_node", lambda ask: asyncio.run(ask(node)))
    assert sorted(swarm.versions().values()) == [80, 93]


def test_what_is_not_as_it_must_be_is_said() -> None:
    fine = {"weights_differ": 1e-12, "wrong_audits": {}, "survived": 9, "faults": 9}
    assert verdict(fine) == ""
    assert verdict({**fine, "weights_differ": 2e-9}) == "the weights differ by 2.00e-09"
    assert "counted twice: {'stage 1 step 4': [(0, 1)]}" in verdict(
        {**fine, "wrong_audits": {"stage 1 step 4": [(0, 1)]}}
    )
    assert verdict({**fine, "survived": 7}) == "2 faults were the last ones of the run"
