"""Whole swarms in memory, with faults: whatever happens, each microbatch counts once.

The audit model's weights *are* the count (`swarm.model.gpt.AuditStage`), in float64 and exactly.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as remade

from peers.clock import now_s
from peers.events import Note, PeerLost, Replayed, StateFetched, StepDone, Undone
from peers.stage import actions
from peers.stage import all_reduce as reduce
from peers.stage import next_stage as downstream
from peers.transfer import leases
from swarm.ids import Microbatch
from swarm.manifest import audit_run
from swarm.model.reference import SingleProcess
from swarm.protocol import rounds
from swarm.protocol.ledger import Bitmap, Claim, Ledger
from swarm.protocol.rounds import FINISHES_LEAST_S, Decision, Plan, StepReport
from tests.model.chain import batch_of, tiny_run, weights_of
from tests.peers.loops import Swarm, swarm
from tests.peers.network import calm
from tests.seeds import cases, some

pytestmark = pytest.mark.virtual_time

REAL_DECIDE, REAL_COMMIT = rounds.decide, rounds.decide_commit


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def retries_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry goes to just any peer, not to the one that has the microbatch already."""

    async def nowhere(*_: object, **__: object) -> list[str]:
        return []

    monkeypatch.setattr(downstream.NextStage, "holders", nowhere)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of several chunks, though the audit model has 8 weights."""
    monkeypatch.setattr(reduce, "CHUNK_ELEMENTS", 2)
    monkeypatch.setattr(leases, "CHUNK_BYTES", 24)


async def finishes(s: Swarm, *, limit_s: float = 600.0) -> None:
    await s.until_finished(limit_s=limit_s)
    s.assert_each_counted_once()


# --- no faults ----------------------------------------------------------------------------------------------


async def test_every_microbatch_counts_once_and_nothing_is_done_twice() -> None:
    async with swarm() as s:
        await s.until_serving()
        feeding = s.add_trainer("trainer")
        await finishes(s)
        assert (s.undone, s.replayed, s.voids()) == (0, 0, [])
        assert sum(peer.core.computed for peer in s.peers.values()) == 3 * s.run.S * s.run.M
        await s.until(lambda: len(s.seen(StepDone)) == 3)
        # The loss of the audit model is the sum of one weight a stage: -t / M after t steps.
        assert [event.loss for event in s.seen(StepDone)] == [-s.run.S * t / s.run.M for t in range(3)]
        assert feeding.step_losses == {t: -s.run.S * t / s.run.M for t in range(3)}


async def test_the_weights_are_those_of_the_formula() -> None:
    async with swarm() as s:
        s.add_trainer("trainer")
        await s.until_finished()
        for _, peer in s.live():
            weights = weights_of(peer.core.compute).popitem()[1]
            assert torch.equal(weights, torch.full((s.run.M,), -s.run.steps / s.run.M, dtype=torch.float64))


async def test_one_peer_a_stage_is_a_swarm() -> None:
    async with swarm(replicas=1) as s:
        s.add_trainer("trainer")
        await finishes(s)


async def test_a_single_stage_is_a_swarm() -> None:
    async with swarm(stages=1, replicas=3) as s:
        s.add_trainer("trainer")
        await finishes(s)


async def test_parts_of_several_chunks_are_put_together(small_chunks: None) -> None:
    async with swarm(replicas=3) as s:
        s.add_trainer("trainer")
        await finishes(s)
        assert s.network.peers["s0p0"].transport.calls["part"] > 2 * 3


async def test_two_trainers_that_race_share_the_work() -> None:
    async with swarm() as s:
        s.add_trainer("one", window=3)
        s.add_trainer("two", window=3)
        await finishes(s)


async def test_a_window_that_is_found_while_running_works_too() -> None:
    async with swarm() as s:
        s.add_trainer("trainer", window=None)
        await finishes(s)


async def test_a_trainer_whose_steps_are_taken_already_says_what_steps_count() -> None:
    async with swarm() as s:
        s.add_trainer("trainer")
        await s.until_version(2)
        late = s.add_trainer("late", steps=1)
        await s.tasks["late"]
        [said] = [note.text for note in s.seen(Note)]
        assert not late.losses
        assert re.fullmatch(
            r"the run has taken \d+ steps, so --steps 1 is reached: it counts the run's .*", said
        )
        await finishes(s)


async def test_peers_with_room_for_one_microbatch_say_busy_and_all_is_done_all_the_same() -> None:
    run = audit_run(stages=2, steps=2, microbatches_per_step=8)
    async with swarm(run, replicas=0) as s:
        for number in range(2):
            for replica in range(2):
                s.add_peer(f"s{number}p{replica}", number, max_inflight=1)
        s.add_trainer("trainer", window=6)
        await finishes(s)


@pytest.mark.parametrize("killed", some([None, "s0p0", "s1p0", "s2p0"], quick=["s2p0"]))
async def test_delayed_updates_count_each_once_too(killed: str | None) -> None:
    run = replace(audit_run(stages=3, steps=5, microbatches_per_step=8), delayed_updates=True)
    async with swarm(run) as s:
        s.add_trainer("trainer")
        if killed:
            s.on_call("work", lambda *_: s.kill(killed), to=killed, nth=8)
        await finishes(s)


# --- peers die ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nth"),
    some(
        [("s0p0", 1), ("s0p1", 4), ("s1p0", 4), ("s1p1", 1), ("s2p0", 1), ("s2p1", 4)],
        quick=[("s1p0", 4)],
    ),
)
async def test_a_peer_that_is_killed_while_it_computes_is_replaced(name: str, nth: int) -> None:
    async with swarm() as s:
        await s.until_serving()
        s.add_trainer("trainer")
        s.on_call("work", lambda *_: s.kill(name), to=name, nth=nth)
        await finishes(s)
        assert nth > 1 or name not in dict(s.live()), "how many come to one peer depends on its speed"


@pytest.mark.parametrize("number", some([0, 1, 2], quick=[1]))
async def test_what_a_dead_peer_had_in_its_sum_is_run_again(number: int) -> None:
    run = audit_run(stages=3, steps=1, microbatches_per_step=32)
    killed: list[str] = []

    def strike(caller: str, callee: str) -> None:
        if not killed:
            killed.append(callee)
            s.kill(callee)

    async with swarm(run) as s:
        await s.until_serving()
        for name in s.of_stage(number):  # the first to get a third one has done two
            s.on_call("work", strike, to=name, nth=3)
        s.add_trainer("trainer", window=1)
        await finishes(s)
        assert s.seen(Replayed)


async def test_all_but_one_members_of_every_stage_may_die_at_once() -> None:
    async with swarm(replicas=3) as s:
        s.add_trainer("trainer", window=2)
        await s.until(lambda: any(s.peers[f"s1p{i}"].core.computed for i in range(3)))
        for number in range(3):
            s.kill(f"s{number}p0")
            s.kill(f"s{number}p2")
        await finishes(s)


ABOUT_A_STEP = ("part", "directive", "report", "summary", "run", "held")
SIDES = ("caller", "callee")


@pytest.mark.parametrize(
    ("method", "side"),
    cases(
        [*product(ABOUT_A_STEP, SIDES)],
        name="{0}-{1}",
        quick=lambda method, side: (method, side) == ("part", "caller"),
    ),
)
async def test_a_peer_may_die_in_any_conversation_about_a_step(
    method: str, side: str, small_chunks: None
) -> None:
    async with swarm(replicas=3) as s:
        if method == "held":  # nobody asks for a held gradient unless a round half-failed
            s.network.drop_answer("s1p0", "part", nth=3)
        s.on_call(method, lambda caller, callee: s.kill(caller if side == "caller" else callee), nth=2)
        s.add_trainer("trainer")
        await finishes(s)


async def test_a_coordinator_that_dies_is_followed_by_the_next() -> None:
    async with swarm(replicas=3) as s:
        s.add_trainer("trainer")

        def coordinator_peer() -> str | None:
            directive = s.peers["s1p2"].coordination.directive
            return None if directive is None else directive.coordinator

        await s.until(lambda: coordinator_peer() == "s1p0")
        s.kill("s1p0")
        await s.until(lambda: coordinator_peer() == "s1p1")
        await finishes(s)


@pytest.mark.slow
async def test_a_run_coordinator_that_dies_with_the_commit_is_followed_by_one_that_says_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits: list[rounds.Commit] = []
    async with swarm() as s:

        def decide_commit(*args: object) -> rounds.Commit | None:
            commit = REAL_COMMIT(*args)  # type: ignore[arg-type]
            if commit is not None:
                if not commits:
                    asyncio.get_running_loop().call_soon(s.kill, "s0p0")
                commits.append(commit)
            return commit

        monkeypatch.setattr(rounds, "decide_commit", decide_commit)
        s.add_trainer("trainer")
        await finishes(s)
        assert len({commit for commit in commits if commit.t == 0}) == 1
        assert "s0p0" not in dict(s.live())


async def test_a_run_coordinator_that_dies_after_telling_one_stage_is_followed_to_the_same_step() -> None:
    async with swarm(stages=4) as s:
        s.add_trainer("trainer")
        await s.until(lambda: any(p.core.version >= 1 for n, p in s.live() if p.stage > 0))
        s.kill("s0p0")
        await finishes(s)


@pytest.mark.slow
async def test_one_stage_after_another_loses_peers_and_gets_new_ones() -> None:
    run = audit_run(stages=3, steps=6, microbatches_per_step=8)
    async with swarm(run) as s:
        s.add_trainer("trainer")
        for t, number in enumerate((1, 0, 2)):
            await s.until_version(t + 1)
            s.kill(f"s{number}p0")
            s.add_peer(f"s{number}new", number)
        await finishes(s)


# --- answers are lost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fault"),
    some(
        [*((f"s{stage}p0", "drop_answer") for stage in range(3)), ("s1p0", "corrupt_answer")],
        quick=[("s1p0", "corrupt_answer")],
    ),
)
async def test_work_whose_answer_is_lost_still_counts_once(name: str, fault: str) -> None:
    async with swarm() as s:
        for nth in (1, 2, 5):
            getattr(s.network, fault)(name, "work", nth)
        s.add_trainer("trainer", window=2)
        await finishes(s)
        assert s.seen(PeerLost)


async def test_a_retry_at_the_peer_that_has_it_computes_nothing() -> None:
    async with swarm(replicas=1) as s:
        for name in ("s1p0", "s2p0"):
            s.network.drop_answer(name, "work", 1)
        s.add_trainer("trainer", window=1)
        await finishes(s)
        lost = s.seen(PeerLost)
        assert len(lost) == 2 and not any(event.words().count(event.peer) > 1 for event in lost), lost
        waits = "; it may wait for a later stage"
        assert {event.stage: event.why.endswith(waits) for event in lost} == {1: True, 2: False}, lost
        assert [p.core.computed for _, p in s.live()] == [3 * s.run.M] * 3


async def test_a_trainer_does_not_repeat_what_the_ledgers_say_is_done() -> None:
    async with swarm(silence_s=1.0) as s:
        await s.until_serving()
        s.network.drop_answer("s0p0", "work", 1)
        s.add_trainer("trainer", window=1)
        await finishes(s)
        assert s.seen(PeerLost)
        assert s.undone == 0


async def test_a_duplicate_is_undone(retries_do_not_ask: None) -> None:
    """The peer whose answer was lost has it, and so has the one that was called instead."""
    async with swarm() as s:
        await s.until_serving()
        s.network.drop_answer("s1p0", "work", 1)
        s.add_trainer("trainer", window=1)
        await finishes(s)
        undone = [(event.stage, event.t, event.count) for event in s.seen(Undone)]
        assert (1, 0, 1) in undone
        assert s.undone == len(undone) <= 2, "perhaps they called different peers of the last stage, too"


@pytest.mark.slow
async def test_duplicates_everywhere_are_undone(retries_do_not_ask: None) -> None:
    async with swarm(replicas=3) as s:
        for name in ("s0p0", "s1p0", "s1p1", "s2p0", "s2p1", "s2p2"):
            for nth in (1, 3):
                s.network.drop_answer(name, "work", nth)
        s.add_trainer("trainer", window=2)
        await finishes(s)
        assert s.undone >= 3


@pytest.mark.parametrize("name", some(["s0p0", "s1p0", "s2p0"], quick=["s1p0"]))
async def test_an_answer_that_comes_after_its_retry_succeeded_changes_nothing(name: str) -> None:
    """The peer hangs with its work, another does it, and then the first wakes up and has it too."""
    async with swarm(replicas=2) as s:
        s.on_call("work", lambda *_: s.network.stop(name), to=name)
        s.add_trainer("trainer")
        await s.until(lambda: any(event.peer == name for event in s.seen(PeerLost)))
        other = name[:-1] + "1"
        await s.until(lambda: s.peers[other].core.computed >= 2)
        s.network.go_on(name)
        await finishes(s)


# --- reduces fail -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "nth"),
    some(
        [*(("drop_answer", nth) for nth in (1, 2, 4)), ("corrupt_answer", 2)],
        quick=[("corrupt_answer", 2)],
    ),
)
async def test_a_reduce_that_fails_anywhere_is_void_and_starts_again(
    fault: str, nth: int, small_chunks: None
) -> None:
    async with swarm() as s:
        for number in range(3):
            getattr(s.network, fault)(f"s{number}p{number % 2}", "part", nth)
        s.add_trainer("trainer")
        await finishes(s)
        # A member that misses an answer while the others have all theirs takes the result from them.
        assert fault == "drop_answer" or s.voids()


@pytest.mark.parametrize(("late_s", "fetches"), [(0.5, False), (10.0, True)])
async def test_who_is_about_to_end_its_own_reduce_takes_no_result_from_a_replica(
    late_s: float, fetches: bool
) -> None:
    assert 0.5 < FINISHES_LEAST_S < 10.0
    async with swarm(stages=1) as s:
        # The other one has everything, and says so, while this one still waits for its last part.
        s.network.delay_answer("s0p0", "part", late_s)
        s.add_trainer("trainer")
        await finishes(s)
        taken = sum(peer.transport.calls["held"] for peer in s.network.peers.values())
        assert (taken > 0) == fetches


async def test_every_first_reduce_of_every_step_may_fail(small_chunks: None) -> None:
    async with swarm(stages=2) as s:
        for nth in (1, 4, 8):
            s.network.drop_answer("s0p0", "part", nth)
            s.network.corrupt_answer("s1p1", "part", nth)
        s.add_trainer("trainer")
        await finishes(s)


async def test_two_members_that_cannot_reach_each_other_average_through_a_third(
    small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []

    def decide(*args: object, **owner: object) -> Decision:
        decision = REAL_DECIDE(*args, **owner)  # type: ignore[arg-type]
        if isinstance(decision, Plan) and args[1] == 1:
            plans.append(decision)
        return decision

    monkeypatch.setattr(rounds, "decide", decide)
    async with swarm(stages=2, replicas=3) as s:
        await s.until_serving()
        s.network.cut({"s1p1"}, {"s1p2"})
        s.add_trainer("trainer")
        await finishes(s)
        assert any(plan.number == 1 and plan.parts == (s.run.M, 0, 0) for plan in plans)
        assert len(s.voids()) >= 2


async def test_a_partition_that_heals_leaves_no_trace() -> None:
    async with swarm(replicas=2) as s:
        s.add_trainer("trainer")
        await s.until(lambda: s.peers["s1p0"].core.computed)
        s.network.cut({"s0p0", "s1p0"}, {"s0p1", "s1p1", "s2p1"})
        await s.until(lambda: s.seen(PeerLost))
        s.network.heal()
        await finishes(s)


# --- peers hang, join, leave --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "stage"),
    some(
        [("forward", 0), ("backward", 2), ("frozen", 0), ("reduce", 1), ("prepared", 1), ("took", 2)],
        quick=[("prepared", 1)],
    ),
)
async def test_a_peer_that_hangs_at_any_point_is_left_out_and_catches_up_when_it_wakes(
    point: str, stage: int
) -> None:
    async with swarm() as s:
        name = f"s{stage}p1"
        s.at_point(point, s.network.stop, when=lambda passing: passing == name)
        s.add_trainer("trainer")
        others = [peer for other, peer in s.live() if other != name]
        await s.until(lambda: s.network.peers[name].process.stopped)
        await s.until(lambda: all(peer.core.version >= 2 for peer in others))
        s.network.go_on(name)
        await finishes(s)


async def test_a_coordinator_and_a_run_coordinator_that_hang_are_left_out() -> None:
    async with swarm(replicas=3) as s:
        s.add_trainer("trainer")
        await s.until_version(1)
        s.network.stop("s0p0")
        s.network.stop("s1p0")
        others = [peer for name, peer in s.live() if name not in ("s0p0", "s1p0")]
        await s.until(lambda: all(peer.core.version == 3 for peer in others))
        s.network.go_on("s0p0")
        s.network.go_on("s1p0")
        await finishes(s)


async def test_coordinators_of_all_stages_that_hang_at_once_believe_those_who_went_on() -> None:
    """Nobody but their members can tell them how far the run is: the summaries are their own."""
    run = audit_run(stages=2, steps=8, microbatches_per_step=8)
    async with swarm(run) as s:
        await s.until_serving()
        s.network.stop("s0p0")
        s.network.stop("s1p0")
        s.add_trainer("trainer")
        others = [s.peers["s0p1"], s.peers["s1p1"]]
        await s.until(lambda: all(peer.core.version >= 5 for peer in others))
        s.network.go_on("s0p0")
        s.network.go_on("s1p0")
        await finishes(s)


@pytest.mark.parametrize("number", some([0, 1, 2], quick=[0]))
async def test_a_joiner_takes_the_state_of_a_replica_and_then_takes_part(
    number: int, small_chunks: None
) -> None:
    run = audit_run(stages=3, steps=6, microbatches_per_step=8)
    async with swarm(run) as s:
        s.add_trainer("trainer")
        await s.until_version(2)
        s.add_peer("joiner", number)
        await s.until(lambda: s.seen(StateFetched))
        await finishes(s)
        assert {event.stage for event in s.seen(StateFetched)} == {number}


async def test_a_joiner_whose_source_dies_takes_another(small_chunks: None) -> None:
    run = audit_run(stages=2, steps=3, microbatches_per_step=8)
    async with swarm(run, replicas=2) as s:
        s.add_trainer("trainer")
        await s.until_finished()  # so that no gradient would do instead of the state
        s.on_call("chunk", lambda caller, callee: s.kill(callee), nth=2)
        s.add_peer("joiner", 1)
        await finishes(s)
        assert len(s.of_stage(1)) == 2


async def test_a_joiner_that_is_lied_to_by_a_broken_line_asks_again(small_chunks: None) -> None:
    run = audit_run(stages=2, steps=3, microbatches_per_step=8)
    async with swarm(run) as s:
        s.add_trainer("trainer")
        await s.until_finished()  # so that no gradient would do instead of the state
        for name in s.of_stage(1):
            s.network.corrupt_answer(name, "chunk", 2)
        s.add_peer("joiner", 1)
        await finishes(s)


async def test_a_peer_that_leaves_takes_nothing_with_it() -> None:
    run = audit_run(stages=3, steps=6, microbatches_per_step=8)
    async with swarm(run) as s:
        s.add_trainer("trainer")
        await s.until(lambda: s.peers["s1p0"].core.computed >= 2)
        s.peers["s1p0"].leave()
        await s.until(lambda: s.tasks["s1p0"].done())
        await finishes(s)
        assert s.of_stage(1) == ["s1p1"]


async def test_a_trainer_that_dies_is_followed_by_any_other() -> None:
    async with swarm() as s:
        s.add_trainer("first")
        await s.until(lambda: s.peers["s2p0"].core.computed or s.peers["s2p1"].core.computed)
        s.kill("first")
        s.add_trainer("second")
        await finishes(s)


@pytest.mark.slow
async def test_a_trainer_that_dies_while_another_works_is_not_missed() -> None:
    async with swarm() as s:
        s.add_trainer("first", window=4)
        s.add_trainer("second", window=2)
        s.on_call("work", lambda *_: s.kill("first"), by="first", nth=6)
        await finishes(s)


# --- chaos --------------------------------------------------------------------------------------------------


def stay(s: Swarm, stage: int) -> set[str]:
    """Who serves a stage, and was not told to leave."""
    return {n for n in s.of_stage(stage) if s.peers[n].core.joined and not s.peers[n].core.leaving}


async def disturb(s: Swarm, dice: random.Random, number: int) -> str:
    """One random fault; what it was."""
    live = [name for name, _ in s.live()]
    kinds = ["kill", "kill", "leave", "leave", "move", "lose", "join", "trainer", "drop", "delay", "corrupt"]
    kind = dice.choice([*kinds, "hang", "cut"])
    name = dice.choice(live)
    number_of = s.peers[name].stage
    if kind == "kill":
        replicas = stay(s, number_of) - {name}
        if not replicas:
            return "nothing"
        s.kill(name)
    elif kind in ("leave", "move"):
        replicas = stay(s, number_of) - {name}
        if not replicas:
            return "nothing"
        if kind == "move":
            s.peers[name].moving_to = (number_of + 1) % s.run.S
        s.peers[name].leave()
    elif kind == "lose":
        for replica in s.of_stage(number_of):
            s.kill(replica)
        s.add_peer(f"s{number_of}back{number}", number_of)
        name = f"stage {number_of}"
    elif kind == "join":
        name = f"s{number_of}j{number}"
        s.add_peer(name, number_of)
    elif kind == "trainer":
        for old in [n for n in s.trainers if not s.tasks[n].done()][:1]:
            s.kill(old)
        s.add_trainer(f"trainer{number}")
    elif kind == "hang":
        s.network.stop(name)
        asyncio.get_running_loop().call_later(dice.random(), s.network.go_on, name)
    elif kind == "cut":
        other = dice.choice(live)
        if other != name:
            s.network.cut({name}, {other})
            asyncio.get_running_loop().call_later(dice.random(), s.network.heal)
    else:
        method = dice.choice(
            [
                "work",
                "part",
                "report",
                "directive",
                "summary",
                "run",
                "held",
                "chunk",
            ]
        )
        nth = dice.randint(1, 3)
        if kind == "drop":
            s.network.drop_answer(name, method, nth)
        elif kind == "corrupt":
            s.network.corrupt_answer(name, method, nth)
        else:
            s.network.delay_answer(name, method, dice.random() / 2, nth)
        kind = f"{kind} {method}"
    return f"{kind} {name}"


@pytest.mark.slow  # others are in tests/sim/test_shipped_schedules.py, and two thousand in a file beside it
@pytest.mark.parametrize("seed", range(4))
async def test_any_schedule_of_faults_leaves_each_counted_once(seed: int, small_chunks: None) -> None:
    dice = random.Random(seed)
    run = replace(audit_run(stages=3, steps=4), delayed_updates=dice.random() < 0.3)
    log: list[str] = []
    try:
        async with swarm(run, replicas=3) as s:
            s.network.lines = calm(dice.choice([0.0, 0.001, 0.005]))
            s.add_trainer("trainer")
            if dice.random() < 0.5:
                s.add_trainer("another")
            for number in range(dice.randint(3, 8)):
                # The moments are not repeatable; that faults come at all moments is the point.
                await asyncio.sleep(dice.random() * 0.15)
                log.append(await disturb(s, dice, number))

            def over() -> bool:
                if all(s.tasks[n].done() for n in s.trainers):  # the run may go back after they saw its end
                    s.add_trainer(f"after{len(s.trainers)}")
                return s.finished

            await s.until(over, limit_s=100.0)
            s.assert_each_counted_once()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {log}\n{error}") from error


# --- the count is trustworthy: leaving a rule out turns it red ----------------------------------------------


def always_new(self: Ledger, m: int) -> Claim:
    self.in_progress |= 1 << m
    return Claim.NEW


def record_unchecked(self: Ledger, m: int) -> None:
    self.done |= 1 << m


def decide_blindly(*args: object, **_: object) -> Decision:
    """`decide`, without its look for duplicates."""
    reports: dict[str, StepReport] = args[5]  # type: ignore[assignment]
    seen, single = 0, dict[str, StepReport]()
    for peer, report in sorted(reports.items()):
        single[peer] = remade(report, done=Bitmap(report.done & ~seen))
        seen |= report.done
    decision = REAL_DECIDE(*args[:5], single, None, {})  # type: ignore[arg-type]
    if isinstance(decision, Plan):
        run, number, t = args[:3]
        ledgers = tuple(reports[peer].done for peer in decision.members)
        name = rounds.round_id(run, number, t, 0, decision.members, ledgers, decision.parts)  # type: ignore[arg-type]
        return Plan(name, 0, decision.members, ledgers, decision.parts)
    return decision


async def lost_answer_then_retry_to_the_same_peer(s: Swarm) -> None:
    s.network.drop_answer("s1p0", "work", 1)
    s.add_trainer("trainer", window=1)  # the step cannot be complete before the retry
    await s.until_finished()


async def lost_answer_then_retry_to_another_peer(s: Swarm) -> None:
    s.network.drop_answer("s1p0", "work", 1)
    s.add_trainer("trainer", window=1)
    await s.until_finished()


@pytest.mark.slow
async def test_without_the_ledgers_check_for_duplicates_the_count_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with swarm(replicas=1) as s:
        await lost_answer_then_retry_to_the_same_peer(s)
        s.assert_each_counted_once()
    monkeypatch.setattr(Ledger, "claim", always_new)
    monkeypatch.setattr(Ledger, "may_add", lambda self, m: self.frozen_for is None)
    monkeypatch.setattr(Ledger, "record", record_unchecked)
    async with swarm(replicas=1) as s:
        await lost_answer_then_retry_to_the_same_peer(s)
        with pytest.raises(AssertionError):
            s.assert_each_counted_once()
        counts = s.count_matrix()
        assert counts["s1p0"].max() > s.run.steps
        assert (counts["s0p0"] == s.run.steps).all(), "the stage before it computed once and asked twice"


@pytest.mark.slow  # of the mutations of both checks quick tests tell
async def test_without_the_rounds_check_for_duplicates_the_count_is_wrong(
    monkeypatch: pytest.MonkeyPatch, retries_do_not_ask: None
) -> None:
    async with swarm() as s:
        await lost_answer_then_retry_to_another_peer(s)
        s.assert_each_counted_once()
        assert s.undone
    monkeypatch.setattr(rounds, "decide", decide_blindly)
    monkeypatch.setattr(actions, "check_plan", lambda plan, **_: None)
    async with swarm() as s:
        await lost_answer_then_retry_to_another_peer(s)
        with pytest.raises(AssertionError):
            s.assert_each_counted_once()
        assert s.count_matrix()["s1p0"].max() == s.run.steps + 1
        assert sum(peer.core.ledger_counts.duplicated for _, peer in s.live()) > 0, "the counts show it too"


async def test_without_the_coordinators_check_alone_members_refuse_and_nothing_is_applied(
    monkeypatch: pytest.MonkeyPatch, retries_do_not_ask: None
) -> None:
    monkeypatch.setattr(rounds, "decide", decide_blindly)
    async with swarm() as s:
        s.network.drop_answer("s1p0", "work", 1)
        s.add_trainer("trainer", window=1)
        await s.until(lambda: any("is in two ledgers" in why for why in s.voids()))
        assert all(peer.core.version == 0 for _, peer in s.live())


# --- parity -------------------------------------------------------------------------------------------------


class Text:
    """The bytes that the single process reads too."""

    def __init__(self, batch: Callable[[list[int]], np.ndarray]) -> None:
        self.batch = batch


async def test_a_transformer_with_deaths_equals_a_single_process_to_rounding() -> None:
    """float64, codec none: what differs is the order of additions, and so the last bits."""
    run = tiny_run()
    single = SingleProcess(run, batch_of(run))
    losses = [single.step(t) for t in range(run.steps)]
    async with swarm(run, batches=Text(batch_of(run))) as s:
        trainer = s.add_trainer("trainer")
        s.on_call("work", lambda *_: s.kill("s1p0"), to="s1p0", nth=2)
        s.on_call("part", lambda *_: s.kill("s2p1"), to="s2p1", nth=1)
        s.on_call("work", lambda *_: s.kill("s0p1"), to="s0p1", nth=4)
        await s.until_finished(limit_s=40.0)
        await s.until(lambda: len(trainer.step_losses) == run.steps)
        assert [len(s.of_stage(number)) for number in range(3)] == [1, 1, 1]
        for t in range(run.steps):
            assert trainer.step_losses[t] == pytest.approx(sum(losses[t]) / run.M, rel=1e-9)
        reference = single.named_weights()
        for _, peer in s.live():
            for name, weight in weights_of(peer.core.compute).items():
                far = (weight - reference[name]).norm() / reference[name].norm()
                assert far < 1e-9, f"{name} is {far:.2e} away"


async def test_with_quantized_boundaries_every_loss_stays_within_a_thousandth() -> None:
    codec = {"forward": "blockwise8", "backward": "blockwise8"}
    run = tiny_run(dtype="float32", codec=codec, optimizer={"lr": 2e-3, "warmup_steps": 0})
    single = SingleProcess(run, batch_of(run))
    losses = [single.step(t) for t in range(run.steps)]
    async with swarm(run, batches=Text(batch_of(run))) as s:
        trainer = s.add_trainer("trainer")
        s.on_call("work", lambda *_: s.kill("s2p0"), to="s2p0", nth=3)
        found: dict[Microbatch, float] = {}
        while any(peer.core.version < run.steps for _, peer in s.live()):
            found.update(trainer.losses)
            await s.until(lambda: trainer.losses.keys() - found.keys() or s.tasks["trainer"].done())
            if s.tasks["trainer"].done():
                break
        await s.until_finished()
        for (t, m), loss in found.items():
            assert abs(loss - losses[t][m]) < 1e-3
        for t, loss in trainer.step_losses.items():
            assert abs(loss - sum(losses[t]) / run.M) < 1e-3
        assert trainer.step_losses.keys() == set(range(run.steps))


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param({}, marks=pytest.mark.further),
        {
            "optimizer": {
                "name": "muon", "muon": ("layers.*",), "schedule": "wsd", "decay_steps": 2, "warmup_steps": 0,
                "groups": ("tokens.* lr=0.5", "*.up.* lr=2.0 weight_decay=0.0"),
            },
            "model": {"z_loss": 0.01},
        },
    ],
    ids=["adamw", "muon, groups, wsd, z-loss"],
)  # fmt: skip
async def test_with_a_top_k_at_one_boundary_deaths_leave_every_bit_as_it_is(recipe: dict[str, Any]) -> None:
    codec = {"forward": ("none", "topk:0.2+blockwise8"), "backward": "blockwise8"}
    run = tiny_run(dtype="float32", codec=codec, **deepcopy(recipe))
    single = SingleProcess(run, batch_of(run))
    losses = [single.step(t) for t in range(run.steps)]
    async with swarm(run, batches=Text(batch_of(run))) as s:
        trainer = s.add_trainer("trainer")
        s.on_call("work", lambda *_: s.kill("s1p0"), to="s1p0", nth=2)
        s.on_call("work", lambda *_: s.kill("s2p1"), to="s2p1", nth=4)
        await s.until_finished(limit_s=40.0)
        await s.until(lambda: len(trainer.step_losses) == run.steps)
        assert trainer.step_losses == {t: sum(losses[t]) / run.M for t in range(run.steps)}
        reference = single.named_weights()
        for _, peer in s.live():
            for name, weight in weights_of(peer.core.compute).items():
                assert torch.equal(weight, reference[name]), name


async def test_while_a_stage_has_no_peer_no_microbatch_is_said_to_run_again() -> None:
    """What stage 0 has and stage 1 lost is due for as long as nobody serves stage 1."""
    async with swarm(audit_run(stages=2, steps=9, microbatches_per_step=8), replicas=1) as s:
        await s.until_serving()
        trainer = s.add_trainer("trainer", window=2)
        await s.until_version(1)
        s.kill_and_forget("s1p0")
        await s.until(lambda: trainer._served == {0})  # type: ignore
        said, t = len(s.seen(Replayed)), trainer._watch.version  # type: ignore
        for _ in range(20):
            trainer._todo.lacking(t, [0, 255], now=now_s())  # type: ignore
            await asyncio.sleep(1.0)
        assert len(s.seen(Replayed)) == said, "a line for each attempt, some a second"
