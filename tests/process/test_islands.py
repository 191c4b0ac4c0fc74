"""Islands of real processes that are killed equal the same run in a single process."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from peers.events import StepDone
from swarm.manifest import IslandsSpec
from tests.process.swarm_processes import Swarm, farthest
from tests.process.test_exact import tiny

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]


def test_weights_equal_a_single_process_whoever_of_which_island_was_killed(tmp_path: Path) -> None:
    """float32, coded differences: the last bits too. Replicas die, then a whole cell, then a whole island."""
    base = tiny(dtype="float32", codec="blockwise8", steps=36)
    run = replace(
        base,
        model=replace(base.model, layers=2, stages=2),
        islands=IslandsSpec(count=2, local_steps=5, codec="blockwise8"),
    )
    with Swarm(tmp_path, run) as swarm:
        swarm.bootstrap()
        doomed = [swarm.peer(1, kill_at="backward:9"), swarm.peer(2, kill_at="prepared:3")]
        swarm.peers(2)
        trainer = swarm.trainer("--window", "6")
        for program in doomed:
            swarm.dies(program)
        swarm.goes_on()
        swarm.kill(*swarm.serving(3))
        swarm.peer(3)
        swarm.goes_on()
        swarm.kill(*swarm.serving(0), *swarm.serving(1))
        threading.Event().wait(0.5)
        swarm.peer(0)
        swarm.peer(1)
        swarm.ends(trainer)
        told = trainer.heard(StepDone)
        weights = swarm.audited_weights()
    single = swarm.single_process(run.steps)
    assert farthest(weights, single) == 0.0
    assert [event.t for event in told][-1] == run.steps - 1
