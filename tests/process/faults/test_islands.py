"""Islands of real processes that are killed equal the same run in a single process."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peers.events import StageLost, StepDone
from peers.programs.tool_options import VerifyOptions
from peers.programs.verify import run_verify
from peers.storage.transcript import path_of
from swarm.errors import SetupError
from swarm.manifest import IslandsSpec, Run
from tests.process.faults.test_exact import tiny
from tests.process.swarm_processes import Swarm, farthest

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]


def islands_of(base: Run, **spec: Any) -> Run:
    """A run of two stages, so of four cells, whose two islands meet every six steps."""
    model = replace(base.model, layers=2, stages=2)
    return replace(base, model=model, islands=IslandsSpec(count=2, local_steps=5, **spec))


def test_weights_equal_a_single_process_whoever_of_which_island_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """float32, coded differences: the last bits too. Replicas die, then a whole cell, then a whole island.

    A keeper writes down what all signed, and it is what they computed.
    """
    run = islands_of(tiny(dtype="float32", codec="blockwise8", steps=24), codec="blockwise8")
    with Swarm(tmp_path, run) as swarm:
        swarm.bootstrap()
        doomed = [swarm.peer(1, kill_at="backward:5"), swarm.peer(2, kill_at="prepared:3")]
        swarm.peers(2)
        keeper = swarm.keeper(tmp_path / "kept")
        trainer = swarm.trainer("--window", "3")
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
        swarm.leaves(keeper)
    transcript = path_of(tmp_path / "kept", swarm.run)
    # Those that replaced others have no word of steps before, and on a busy machine come for the last few.
    with contextlib.suppress(SetupError):
        assert run_verify(VerifyOptions(transcript=transcript, from_=0, to=run.steps))
    out = capsys.readouterr().out
    assert out.startswith("steps 0 to 23 are what the peers signed, to the last bit\n")
    compared = int(out.splitlines()[1].split()[1])
    assert compared > run.islands.local_steps
    single = swarm.single_process(run.steps)
    assert farthest(weights, single) == 0.0
    assert [event.t for event in told][-1] == run.steps - 1


def test_weights_equal_a_single_process_when_a_stage_of_all_islands_is_lost(tmp_path: Path) -> None:
    """float64, no codec: 1e-9. Replicas die at points of a meeting, then all peers that have stage 1.

    Only the last bits of gradients differ, but the optimizer, which begins anew at each meeting, makes more
    of them where a gradient is as small as its epsilon: 1e-8 after 36 steps, with and without faults.
    """
    base = replace(tiny(dtype="float64", codec="none", steps=24), checkpoint_every=6)
    run, disk = islands_of(base), tmp_path / "disk"
    with Swarm(tmp_path, run) as swarm:
        swarm.bootstrap()
        points = ("encoded", "given", "gathered", "kept")
        doomed = [swarm.peer(cell, kill_at=point) for cell, point in enumerate(points)]
        for cell in range(run.cells):
            swarm.peer(cell, "--checkpoint-dir", str(disk / str(cell)))
        swarm.all_serve()
        trainer = swarm.trainer("--window", "3")
        for program in doomed:
            swarm.dies(program)
        swarm.until_version(13)  # all have a version on their disk
        swarm.kill(*swarm.serving(1), *swarm.serving(3))
        back = [swarm.peer(cell, "--checkpoint-dir", str(disk / str(cell))) for cell in (1, 3)]
        assert {swarm.hear(program, StageLost).stage for program in back} == {1, 3}
        swarm.ends(trainer)
        weights = swarm.audited_weights()
        counted = {(cell, t) for cell, t in swarm.audits() if not run.meets_at(t)}
    trained = [t for t in range(run.steps) if not run.meets_at(t)]
    assert counted == {(cell, t) for cell in range(run.cells) for t in trained}
    assert farthest(weights, swarm.single_process(run.steps)) < 1e-9
