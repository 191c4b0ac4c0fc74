"""Kill any one process of a running swarm: nothing of it is left, and the run goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest

from peers.events import PeerLost, Serving, StateFetched, StepDone, Stepped
from tests.process.swarm_processes import Family, Training, eventually

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def module_swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    with Training(tmp_path_factory.mktemp("swarm")) as swarm:
        yield swarm


@pytest.fixture
def swarm(module_swarm: Training) -> Iterator[Training]:
    module_swarm.make_whole()
    yield module_swarm
    module_swarm.assert_each_counted_once()


def test_a_killed_peer_leaves_nothing_and_another_takes_its_state_and_its_place(swarm: Training) -> None:
    victim, killed = swarm.serving(0)[0], time.time()
    swarm.kill(victim)
    swarm.goes_on()
    told = [event for program in swarm.programs for event in program.heard(PeerLost) if event.at > killed]
    # By its broken connection, also on a busy machine; its silence would be noticed after 3.5 s only.
    assert min(event.at for event in told if event.peer == victim.peer_id) - killed < 3.0
    before = swarm.version()
    joiner = swarm.peer(0)
    assert swarm.hear(joiner, StateFetched).version >= before
    assert swarm.hear(joiner, Serving).version >= before
    swarm.until(
        lambda: any(event.microbatches for event in joiner.heard(Stepped)), "the joiner gets no microbatch"
    )
    swarm.takes_part(joiner)


@pytest.mark.parametrize(("role", "victim"), [("peer", "p2pd"), ("trainer", "watchdog")])
def test_a_killed_p2pd_or_watchdog_takes_the_other_with_it_and_both_are_replaced(
    swarm: Training, role: str, victim: str
) -> None:
    program = swarm.serving(1)[0] if role == "peer" else swarm.living("trainer")[0]
    before = program.family()
    own = Family([process for process in before.processes if process.pid != program.pid])
    assert len(own.directories) == 1
    killed: psutil.Process = getattr(before, victim)
    killed.kill()
    own.assert_gone()
    eventually(lambda: "p2pd" in program.family().names, lambda: "no new p2pd is started")
    if role == "peer":
        swarm.takes_part(program)
    else:
        told = len(program.heard(StepDone))
        swarm.hear(program, StepDone, told + 2)
    after = program.family()
    assert after.p2pd.pid != before.p2pd.pid
    assert after.watchdog.pid != before.watchdog.pid


def test_without_the_bootstrap_the_run_goes_on_and_others_join_at_any_peer(swarm: Training) -> None:
    swarm.kill(swarm.living("bootstrap")[0])
    swarm.goes_on()
    joiner = swarm.peer(1)
    swarm.hear(joiner, Serving)
    swarm.takes_part(joiner)
    swarm.leaves(joiner)


def test_a_trainer_dies_and_another_that_started_meanwhile_goes_on(swarm: Training) -> None:
    (first,) = swarm.living("trainer")
    second = swarm.trainer("--window", "2")
    swarm.hear(second, StepDone)
    swarm.kill(first)
    told = len(second.heard(StepDone))
    swarm.hear(second, StepDone, told + 3)


def test_a_run_without_trainers_waits_for_one(swarm: Training) -> None:
    (trainer,) = swarm.living("trainer")
    swarm.kill(trainer)
    swarm.make_whole()
