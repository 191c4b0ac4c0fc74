"""Ctrl-C, SIGTERM, both twice, and a parent that is killed: exit codes, last words, and nothing left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peers.events import Contributed, Serving, StageLost, StopNow
from swarm.manifest import audit_run
from tests.process.swarm_processes import ROOT, Swarm, family_of_mark

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]

AT_ONCE_S = 5.0
"""Limit for what takes some 0.2 s. Far below any wait of the protocol that could be what ended it."""


@pytest.mark.usefixtures("executed")
def test_the_first_signal_leaves_in_good_order_and_the_second_at_once(tmp_path: Path) -> None:
    run = audit_run(stages=2, steps=1_000_000, microbatches_per_step=4)
    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.bootstrap()
        swarm.peers(1)
        (first,) = swarm.serving(0)
        replica = swarm.peer(0)
        swarm.hear(replica, Serving)
        trainer = swarm.trainer("--window", "3")
        swarm.until_version(2)

        # Ctrl-C for a peer with a replica: it finishes what it has, and says what it did.
        family = replica.family()
        swarm.leaves(replica)
        family.assert_gone()
        assert [type(event) for event in replica.events if isinstance(event, StopNow | Contributed)] == [
            StopNow,
            Contributed,
        ]
        assert replica.heard(Contributed)[0].steps >= 1
        assert not replica.errors
        swarm.goes_on()

        # The next stage hangs, which takes at least 5 s to be known: a second signal has to help.
        (hangs,) = swarm.serving(1)
        hangs.stop()
        first.signal(signal.SIGTERM)
        swarm.hear(first, StopNow)
        with pytest.raises(AssertionError, match="does not end within 1 s"):
            first.wait(1.0)
        family, began = first.family(), time.monotonic()
        first.sentenced = True
        first.signal(signal.SIGINT)
        assert first.wait() == 130
        assert time.monotonic() - began < AT_ONCE_S
        family.assert_gone()
        assert not first.errors
        hangs.cont()

        for program, number in ((trainer, signal.SIGTERM), (bootstrap, signal.SIGINT)):
            family = program.family()
            program.signal(number)
            swarm.ends(program)
            assert program.heard(StopNow)
            assert not program.errors
            family.assert_gone()


def test_a_peer_that_waits_for_the_state_of_its_stage_leaves_too(tmp_path: Path) -> None:
    run = audit_run(stages=2, steps=1_000_000, microbatches_per_step=4)
    with Swarm(tmp_path, run) as swarm:
        swarm.bootstrap()
        swarm.peers(1)
        swarm.train_to(3)
        swarm.kill(swarm.serving(1)[0])
        joiner = swarm.peer(1)
        swarm.hear(joiner, StageLost)
        family = joiner.family()
        swarm.leaves(joiner)
        family.assert_gone()


CHILD = """
import sys
from pathlib import Path
from swarm.manifest import audit_run
from tests.process.swarm_processes import Swarm

swarm = Swarm(Path(sys.argv[1]), audit_run(stages=1, steps=1_000_000))
print(swarm.mark, flush=True)
swarm.bootstrap()
swarm.peers(1)
swarm.trainer()
swarm.until_version(2)
print("trains", flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_when_their_parent_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as parent:
        assert parent.stdout is not None
        mark = parent.stdout.readline().strip()
        assert parent.stdout.readline() == "trains\n"
        family = family_of_mark(mark)
        assert len([p for p in family.processes if p.name() == "p2pd"]) == 3
        assert len(family.directories) == 3
        parent.kill()
    family.assert_gone()
    assert not family_of_mark(mark).processes
