"""The audit model through real processes that are killed at every point: each microbatch counts once."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.manifest import audit_run
from tests.process.swarm_processes import Program, Swarm

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]


def test_the_count_matrix_holds_ones_whatever_is_killed_where(tmp_path: Path) -> None:
    """3 stages × 2 peers, three of them killed at a time, and one of two trainers.

    Afterwards each weight of each peer says how often its microbatch index counted in all steps.
    """
    run = audit_run(stages=3, steps=100_000, microbatches_per_step=8)
    with Swarm(tmp_path, run) as swarm:
        swarm.bootstrap()

        def train_until_dead(peers: list[Program], doomed_trainer: str = "") -> None:
            """All stages have another peer. Ends with a run at rest."""
            swarm.all_serve()
            doomed = peers
            if doomed_trainer:
                doomed = [*peers, swarm.trainer("--window", "6", kill_at=doomed_trainer)]
            trainer = swarm.trainer("--window", "6")
            for program in doomed:
                swarm.dies(program)
            swarm.goes_on()
            swarm.leaves(trainer)

        doomed = [swarm.peer(0, kill_at="forward:9"), swarm.peer(1, kill_at="backward:9")]
        doomed.append(swarm.peer(2, kill_at="reduce:3"))
        swarm.peers(1)
        train_until_dead(doomed, "trainer:25")

        doomed = [swarm.peer(0, kill_at="prepared:2"), swarm.peer(1, kill_at="reduce:6")]
        train_until_dead([*doomed, swarm.peer(2, kill_at="backward:3")])

        doomed = [swarm.peer(0, kill_at="reduce:2"), swarm.peer(1, kill_at="forward")]
        train_until_dead([*doomed, swarm.peer(2, kill_at="prepared")])

        steps = swarm.version() + 3  # what was in flight may have made one more than the trainers heard of
        swarm.train_to(steps)
        swarm.until_all_stepped()
        assert swarm.assert_each_counted_once() == steps
        audits = swarm.audits()
        cells = {(stage, t) for stage in range(run.S) for t in range(steps)}
        # Who averaged knows the ledgers, and may take that to the grave; who came since adopts the result.
        killed = [p for p in swarm.programs if p.sentenced and p.name.startswith("peer")]
        assert audits.keys() <= cells and len(cells - audits.keys()) <= len(killed), cells - audits.keys()
        assert {audit for found in audits.values() for audit in found} == {(0, 0)}
