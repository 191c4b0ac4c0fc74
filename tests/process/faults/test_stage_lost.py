"""Every peer of one stage is killed at once: the run goes on by itself, to the same weights."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from peers.events import RolledBack, Serving, StageLost, StateFetched, StepDone
from tests.process.faults.test_exact import farthest, tiny
from tests.process.swarm_processes import Swarm

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_stage_that_was_killed_whole_comes_back_from_a_checkpoint_to_the_same_weights(
    tmp_path: Path,
) -> None:
    """The disk of one peer of each stage is left, and another machine has it."""
    run = replace(tiny(dtype="float64", codec="none", steps=1000), checkpoint_every=5)
    disk = tmp_path / "disk"
    with Swarm(tmp_path, run) as swarm:
        swarm.bootstrap()
        for stage in range(run.S):
            swarm.peer(stage, "--checkpoint-dir", str(disk))
            swarm.peer(stage)
        swarm.all_serve()
        trainer = swarm.trainer("--window", "3")
        doomed = swarm.serving(1)

        def strike() -> bool:
            """Not just after a checkpoint, from which the run would go on without going back."""
            if swarm.version() < 12 or swarm.version() % 5 not in (1, 2):
                return False
            for program in doomed:
                program.sentenced = True
                program.signal(signal.SIGKILL)
            return True

        swarm.until(strike, "no moment to strike")
        for program in doomed:
            program.wait()
        back = swarm.peer(1, "--checkpoint-dir", str(disk))
        assert swarm.hear(back, StageLost).stage == 1
        start = swarm.hear(back, Serving).version
        assert start >= 5 and start % 5 == 0  # what all had on the disk when the stage died
        others = [program for stage in (0, 2) for program in swarm.serving(stage)]
        for program in others:  # who hears of it after its replica went back takes the replica's state
            swarm.until(
                lambda program=program: (
                    any(e.step == start for e in program.heard(RolledBack))
                    or any(e.version >= start for e in program.heard(StateFetched))
                ),
                f"{program.name} does not go back to version {start}",
            )
        seen = len(trainer.heard(StepDone))
        swarm.until(lambda: len(trainer.heard(StepDone)) > seen + 3, "the run does not go on")
        swarm.leaves(trainer)
        steps = max(event.t for event in trainer.heard(StepDone)) + 3
        swarm.train_to(steps)
        weights = swarm.audited_weights()
    assert farthest(weights, swarm.single_process(steps)) < 1e-9
