"""Kill any one process of a running swarm: nothing of it is left, and the run goes on."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from peers.events import Serving, StateFetched, StepDone, Stepped
from swarm.manifest import audit_run
from tests.process.swarm_processes import Family, Program, Swarm, eventually

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]


class Running(Swarm):
    """A swarm that always trains. Each test takes something from it, and the next finds it whole again."""

    job_s = 0.01

    def make_whole(self) -> None:
        """A bootstrap, two peers a stage, a trainer."""
        if not self.living("bootstrap"):
            self.bootstrap()
        if not self.living("trainer"):
            self.trainer("--window", "2")
        self.peers(2)
        self.goes_on()

    def living(self, kind: str) -> list[Program]:
        return [p for p in self.programs if p.name.startswith(kind) and p.returncode is None]

    def takes_part(self, peer: Program) -> None:
        """Wait until `peer` takes two steps that nobody takes yet."""
        now = self.version()
        self.until(
            lambda: any(event.t >= now + 2 for event in peer.heard(Stepped)), f"{peer.name} does not step"
        )


@pytest.fixture(scope="module")
def module_swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    run = audit_run(stages=2, steps=1_000_000, microbatches_per_step=8)
    with Running(tmp_path_factory.mktemp("swarm"), run) as swarm:
        yield swarm


@pytest.fixture
def swarm(module_swarm: Running) -> Iterator[Running]:
    module_swarm.make_whole()
    yield module_swarm
    module_swarm.assert_each_counted_once()


def test_a_killed_peer_leaves_nothing_and_another_takes_its_state_and_its_place(swarm: Running) -> None:
    swarm.kill(swarm.serving(0)[0])
    swarm.goes_on()
    before = swarm.version()
    joiner = swarm.peer(0)
    assert swarm.hear(joiner, StateFetched).version >= before
    assert swarm.hear(joiner, Serving).version >= before
    swarm.until(
        lambda: any(event.microbatches for event in joiner.heard(Stepped)), "the joiner gets no microbatch"
    )
    swarm.takes_part(joiner)


@pytest.mark.parametrize("victim", ["watchdog", "p2pd"])
@pytest.mark.parametrize("role", ["peer", "trainer"])
def test_a_killed_p2pd_or_watchdog_takes_the_other_with_it_and_both_are_replaced(
    swarm: Running, role: str, victim: str
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


def test_without_the_bootstrap_the_run_goes_on_and_others_join_at_any_peer(swarm: Running) -> None:
    swarm.kill(swarm.living("bootstrap")[0])
    swarm.goes_on()
    joiner = swarm.peer(1)
    swarm.hear(joiner, Serving)
    swarm.takes_part(joiner)
    swarm.leaves(joiner)


def test_a_trainer_dies_and_another_that_started_meanwhile_goes_on(swarm: Running) -> None:
    (first,) = swarm.living("trainer")
    second = swarm.trainer("--window", "2")
    swarm.hear(second, StepDone)
    swarm.kill(first)
    told = len(second.heard(StepDone))
    swarm.hear(second, StepDone, told + 3)


def test_a_run_without_trainers_waits_for_one(swarm: Running) -> None:
    (trainer,) = swarm.living("trainer")
    swarm.kill(trainer)
    swarm.make_whole()
