"""Processes that hang or lose their p2pd: others notice in time, and they come back by themselves.

Detection is measured from the events' times, and printed (`pytest -s`): the longest time without a step
after a process was stopped, and when others said that it is lost. On two idle cores both are below 5 s;
asserted are bounds that a busy machine keeps too.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from peers.events import Note, PeerLost, Serving, StateFetched, StepDone, Stepped
from peers.net.timings import DEFAULT_TIMINGS
from tests.process.swarm_processes import Program, Training, eventually

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

NOTICED_S = 25.0
"""On an idle machine 5 s, most of it the wait for heartbeats; on two busy cores 18 and 20 s were seen. It is
measured in docs/benchmarks/recovery.md."""


class Running(Training):
    """With what is said of who stops and continues. It is mostly waited with, so it steps seldom."""

    job_s = 0.15

    def by_rank(self, stage: int) -> list[Program]:
        """The peers of a stage, its coordinator first."""
        return sorted(self.serving(stage), key=lambda p: p.heard(Serving)[0].at)

    def stall_s(self, since: float, steps: int = 5) -> float:
        """The longest time without a step from `since` on, once so many steps were taken after it."""

        def times() -> list[float]:
            done = {e.t: e.at for p in self.living("trainer") for e in p.heard(StepDone)}
            return [at for _, at in sorted(done.items()) if at > since]

        # The steps that were all but taken when it stopped do not show that others go on.
        self.until(lambda: len([at for at in times() if at > since + 1.0]) >= steps, "no steps are taken")
        told = [since, *times()]
        return max(after - before for before, after in itertools.pairwise(told))

    def lost_s(self, peer: Program, since: float) -> str:
        """When others said that `peer` is lost, for a person to read."""
        said = [
            f"{program.name}: {event.at - since:.2f} s"
            for program in self.programs
            for event in program.heard(PeerLost)
            if event.peer == peer.peer_id and event.at > since
        ]
        return "; ".join(said[:4]) or "nobody had to call it"

    def gets_work(self, peer: Program) -> None:
        """Wait until microbatches of `peer` count again."""
        now = self.version()
        self.until(
            lambda: any(event.t >= now and event.microbatches for event in peer.heard(Stepped)),
            f"{peer.name} gets no work",
        )

    def resynchronised(self, peer: Program, since: float) -> list[str]:
        """How `peer` learned, after `since`, that its step is stale, and came up to the others."""
        fetched = [e.words() for e in peer.heard(StateFetched) if e.at > since]
        notes = [e.words() for e in peer.heard(Note) if e.at > since]
        return fetched + [words for words in notes if "with the gradient" in words]


@pytest.fixture(scope="module")
def module_swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("swarm")) as swarm:
        yield swarm


@pytest.fixture
def swarm(module_swarm: Running) -> Iterator[Running]:
    module_swarm.make_whole()
    yield module_swarm
    module_swarm.assert_each_counted_once()


def test_a_stopped_coordinator_is_routed_around_and_known_again_though_its_record_ran_out(
    swarm: Running,
) -> None:
    """Other moments, and other roles, are in tests/peers/runs/test_loops.py."""
    peer, trainer = swarm.by_rank(0)[0], swarm.living("trainer")[0]
    stopped = time.time()
    peer.stop()
    stall_s = swarm.stall_s(stopped)
    print(f"\nSTOPPED the coordinator of stage 0: no step for {stall_s:.2f} s; {swarm.lost_s(peer, stopped)}")
    assert stall_s < NOTICED_S
    # Its record runs out: the trainer counts one peer less.
    swarm.until(lambda: trainer.heard(StepDone)[-1].peers[0] == 1, "its record does not run out")
    continued = time.time()
    peer.signal(signal.SIGCONT)
    swarm.takes_part(peer)
    swarm.gets_work(peer)
    back_s = next(e.at for e in peer.heard(Stepped) if e.at > continued) - continued
    print(f"CONTINUED after {continued - stopped:.1f} s: first step after {back_s:.2f} s")
    swarm.until(lambda: trainer.heard(StepDone)[-1].peers[0] == 2, "its record does not come back")
    assert swarm.resynchronised(peer, continued), peer.story()
    assert len(peer.heard(Serving)) == 1


def test_a_peer_whose_p2pd_is_stopped_is_routed_around_and_serves_again(swarm: Running) -> None:
    peer = swarm.by_rank(1)[0]
    p2pd = peer.family().p2pd
    stopped = time.time()
    p2pd.suspend()
    stall_s = swarm.stall_s(stopped)
    print(f"\nSTOPPED p2pd of a coordinator: no step for {stall_s:.2f} s; {swarm.lost_s(peer, stopped)}")
    assert stall_s < NOTICED_S
    continued = time.time()
    p2pd.resume()
    swarm.takes_part(peer)
    swarm.gets_work(peer)
    back_s = next(e.at for e in peer.heard(Stepped) if e.at > continued) - continued
    print(f"CONTINUED after {continued - stopped:.1f} s: first step after {back_s:.2f} s")
    assert peer.family().p2pd.pid == p2pd.pid


def test_a_peer_whose_p2pd_dies_again_and_again_gives_up_with_the_reason(swarm: Running) -> None:
    peer = swarm.peer(1)
    swarm.hear(peer, Serving)
    peer.sentenced = True
    killed: set[int] = set()

    def kill_p2pd() -> bool:
        if peer.returncode is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(peer.pid).children(recursive=True):
                    if child.name() == "p2pd" and child.pid not in killed:
                        killed.add(child.pid)
                        child.kill()
        return peer.returncode is not None

    eventually(kill_p2pd, peer.story)
    assert peer.wait() == 3, peer.story()
    assert 3 <= len(killed) <= DEFAULT_TIMINGS.revivals + 1
    # What it logs and what it says last come on two streams, in any order.
    reason = "p2pd, which connects this process to the others, could not be started again"
    assert any(reason in line and "See that nothing kills it" in line for line in peer.errors), peer.story()
    swarm.goes_on()
