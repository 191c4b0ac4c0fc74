"""A peer with which a step takes longer stands by, and serves when no other peer of its stage does."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from peers.events import Note, Paused, RolledBack, Serving
from peers.stage.pause import ABSENT
from peers.stage.status import ANNOUNCE_S
from peers.status_query import ask_status
from peers.transfer.spare import words_of
from swarm.manifest import Run, audit_run
from swarm.policy.spares import SpareDecision
from swarm.protocol.messages import Directive
from tests.peers.loops import Swarm, swarm

pytestmark = pytest.mark.virtual_time

SLOW_BPS = 50.0
"""The sum of a stage takes minutes."""
JOB_S = 0.04
"""So few microbatches take as long as usual steps: what is waited for here is a time."""


def run_of(steps: int) -> Run:
    run = audit_run(stages=2, steps=steps, microbatches_per_step=4)
    return replace(run, rebalance_every_s=20, checkpoint_every=20)


async def stands_by(s: Swarm, name: str = "home") -> None:
    await s.until(lambda: name in s.network.records and s.network.records[name].spare)
    await s.until(lambda: s.owners[name].doing == "paused")


async def test_who_limits_an_upload_gets_microbatches_by_it() -> None:
    """Two peers of stage 0 compute alike; the upload of one takes longer for each than its device.

    Lines carry more here than it says, and it is believed as far as its answers take as long.
    """
    run = replace(run_of(6), rebalance_every_s=0)
    async with swarm(run, replicas=1) as s:
        s.add_peer("home", 0, upload_bps=SLOW_BPS)
        await s.until_serving()
        s.add_trainer("trainer")
        await s.until_finished()
        done = {name: s.peers[name].core.computed for name in ("s0p0", "home")}
        assert 0 < 2 * done["home"] < done["s0p0"]


async def test_a_newcomer_that_would_make_steps_longer_stands_by_and_is_told_why() -> None:
    async with swarm(run_of(8), replicas=2, job_s=JOB_S) as s:
        await s.until_serving()
        s.add_trainer("trainer")
        await s.until_version(1)
        s.add_peer("home", 1, upload_bps=SLOW_BPS)
        await stands_by(s)
        assert "home" not in {said.peer for said in s.seen(Serving)}
        [said] = s.seen(Paused)
        assert "it is a spare: a step would take about" in said.why
        assert "would let it take part" in said.why
        status = (await ask_status(s.run, s.network.peers["s0p0"].transport, ["home"]))["home"]
        assert status.state == "paused" and "it is a spare" in status.rebalance
        await s.until_finished()
        assert not any(s.network.peers["home"].transport.calls[method] for method in ABSENT)


async def test_a_spare_serves_when_the_others_of_its_stage_die_and_nothing_counts_twice() -> None:
    async with swarm(run_of(36), replicas=2, job_s=JOB_S) as s:
        await s.until_serving()
        s.add_trainer("trainer", window=1)
        s.add_peer("home", 1, upload_bps=SLOW_BPS)
        await stands_by(s)
        await s.until(lambda: s.network.records["home"].version == 20)
        for name in ("s1p0", "s1p1"):
            s.kill(name)
        await s.until(lambda: s.of_stage(1) == ["home"] and s.peers["home"].core.joined)
        await s.until_finished()
        assert {back.step for back in s.seen(RolledBack)} == {20}, "a checkpoint, which the spare had fetched"
        assert all((row == s.run.steps).all() for row in s.count_matrix().values())


async def test_who_would_stand_by_serves_if_the_others_are_dead_by_then() -> None:
    """Its records say that another serves; what counts is that it answers."""
    async with swarm(run_of(20), replicas=1, job_s=JOB_S) as s:
        await s.until_serving()
        s.add_trainer("trainer")
        await s.until_version(1)
        s.on_call("status", lambda caller, callee: s.kill("s1p0"), nth=2, to="s1p0", by="home")
        home = s.add_peer("home", 1, upload_bps=SLOW_BPS)
        await s.until(lambda: home.core.life == "serving")
        assert "it serves: too few replicas of stage 1 answer" in home.moving.decided
        await s.until_finished()


async def test_a_peer_that_resumes_knows_its_upload_from_before() -> None:
    async with swarm(run_of(60), replicas=2, job_s=JOB_S) as s:
        await s.until_serving()
        before = s.peers["s1p0"].all_reduce
        before.bandwidth_bps = 5e7
        s.owners["s1p0"].pause("by hand", "swarm pause")
        await s.until(lambda: s.owners["s1p0"].doing == "paused")
        s.owners["s1p0"].resume()
        await s.until(lambda: s.owners["s1p0"].doing == "serving")
        assert s.peers["s1p0"].all_reduce is not before
        assert s.peers["s1p0"].all_reduce.bandwidth_bps == 5e7


async def test_an_upload_that_was_measured_for_a_moment_only_makes_nobody_a_spare() -> None:
    """On a busy machine both peers of a stage looked slow in the first exchange; one never came back."""
    async with swarm(run_of(60), replicas=2, job_s=JOB_S) as s:
        await s.until_serving()
        reduced = s.peers["s1p0"].all_reduce
        reduced.bandwidth_bps, reduced.measured_s = SLOW_BPS, 0.9
        s.add_trainer("trainer", window=1)
        await asyncio.sleep(2 * ANNOUNCE_S)
        assert not s.seen(Paused) and s.network.records["s1p0"].bandwidth_bps == 0.0
        reduced.measured_s = 1.0
        await s.until(lambda: s.network.records["s1p0"].bandwidth_bps == SLOW_BPS)


async def test_one_that_is_left_out_says_what_it_sent_in_the_round_that_was_given_up() -> None:
    """Nothing else is known of the upload of a newcomer for which rounds waited: so it learns why."""
    async with swarm(run_of(60), replicas=2, job_s=JOB_S) as s:
        await s.until_serving()
        peer = s.peers["s1p0"]
        peer.all_reduce.last_bps = SLOW_BPS
        assert peer.status.record().bandwidth_bps == 0.0
        left_out = Directive(run=s.run.id, stage=1, version=0, coordinator="s1p1", left_out=("s1p0",))
        peer.coordination.protocol.directive = left_out
        assert peer.status.record().bandwidth_bps == SLOW_BPS


@pytest.mark.parametrize("voice", [("home",), ("home", "s1p0", "s1p1")])
async def test_nobody_with_voice_stands_by_for_two_or_for_those_without(voice: tuple[str, ...]) -> None:
    """One that says of itself that it is fast would be alone, or one of two."""
    async with swarm(run_of(6), replicas=2, job_s=JOB_S) as s:
        await s.until_serving()
        home = s.add_peer("home", 1, upload_bps=SLOW_BPS)
        home.core.voices.of = lambda *_, **__: dict.fromkeys(voice, 3)  # type: ignore[method-assign]
        s.add_trainer("trainer")
        await s.until_finished()
        assert not s.network.records["home"].spare


async def test_a_crowd_that_says_it_is_as_fast_as_can_be_ends_no_peer() -> None:
    """What follows from their speeds was too large a number to add up, in a loop that has to go on."""
    async with swarm(run_of(12), replicas=2, job_s=JOB_S) as s:
        await s.until_serving()
        s.add_trainer("trainer")
        s.add_peer("home", 1, upload_bps=SLOW_BPS)
        like = s.network.records["s1p0"]
        for number in range(8):
            said = structs.replace(
                like, peer=f"x{number}", stage=number % 2, speed=1.7e308, bandwidth_bps=1e10
            )
            s.network.dht.put(said)
        await s.until_finished()


async def test_where_no_upload_is_known_nobody_stands_by() -> None:
    async with swarm(run_of(6), replicas=3, job_s=JOB_S) as s:
        await s.until_serving()
        s.add_trainer("trainer")
        await s.until_finished()
        assert not any(record.spare for record in s.network.records.values())


async def test_a_spare_comes_back_when_its_owner_resumes_it_and_is_judged_again() -> None:
    async with swarm(run_of(60), replicas=2, job_s=JOB_S) as s:
        await s.until_serving()
        s.add_trainer("trainer")
        s.add_peer("home", 1, upload_bps=SLOW_BPS)
        await stands_by(s)
        s.owners["home"].resume()
        await s.until(lambda: len(s.seen(Paused)) == 2)
        await stands_by(s)
        assert not [note for note in s.seen(Note) if "another" in note.text]


@pytest.mark.parametrize(
    ("upload_bps", "words"),
    [(10_412e6, " of 10,400 Mbit/s or more"), (2.345e6, " of 2.35 Mbit/s or more"), (0.0, " like theirs")],
)
def test_the_upload_that_would_let_a_spare_take_part_is_said_in_plain_figures(
    upload_bps: float, words: str
) -> None:
    verdict = SpareDecision(spare=True, with_s=1.2, without_s=0.1, upload_bps=upload_bps)
    assert f"; one{words} would let it take part" in words_of(verdict)
