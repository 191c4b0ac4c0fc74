"""Checkpoints of real processes: a run stopped completely goes on with others; a full disk stops nobody."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest

from peers.events import Checkpointed, Note, Serving, StepDone, Trouble
from peers.storage import checkpoint
from swarm.model.reference import SingleProcess
from tests.process.faults.test_exact import farthest, tiny
from tests.process.swarm_processes import Swarm

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_run_that_was_killed_whole_is_resumed_by_others_to_the_same_weights(tmp_path: Path) -> None:
    """Also: a peer whose disk is full says so, trains on, and saves again once there is room."""
    run = replace(tiny(dtype="float64", codec="none", steps=8), checkpoint_every=2)
    common, full = tmp_path / "common", tmp_path / "full"
    with Swarm(tmp_path, run) as swarm:
        swarm.bootstrap()
        peers = [swarm.peer(stage, "--checkpoint-dir", str(common)) for stage in range(run.S)]
        unlucky = swarm.peer(0, "--checkpoint-dir", str(full))
        swarm.all_serve()
        # Larger files cannot be written: for the process the same as a disk without room.
        _, hard = resource.prlimit(unlucky.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        swarm.train_to(3)
        trouble = swarm.hear(unlucky, Trouble)
        assert trouble.text.startswith("no checkpoint of version 2: cannot save the checkpoint of stage 0")
        assert "choose another folder. Earlier checkpoints are intact" in trouble.text
        assert not [path for path in full.rglob("*") if path.is_file() and path.name != "run.toml"]
        resource.prlimit(unlucky.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
        swarm.train_to(5)
        for peer in peers:
            swarm.hear(peer, Checkpointed, 2)
        assert swarm.hear(unlucky, Checkpointed).step == 4
        for program in list(swarm.programs):
            if program.returncode is None:
                swarm.kill(program)
    assert checkpoint.newest_common_step(common, swarm.run) == 4

    with Swarm(tmp_path, run) as others:
        assert others.run == swarm.run
        others.bootstrap()
        peers = [others.peer(stage, "--checkpoint-dir", str(common)) for stage in range(run.S)]
        others.all_serve()
        for stage, peer in enumerate(peers):
            assert peer.heard(Serving)[0].version == 4
            said = [note.text for note in peer.heard(Note)]
            assert f"stage {stage} resumes from the checkpoint of version 4" in said
        trainer = others.trainer()
        others.ends(trainer)
        assert [event.t for event in trainer.heard(StepDone)] == [4, 5, 6, 7]
        for peer in peers:
            others.until(
                lambda peer=peer: peer.heard(Checkpointed) and peer.heard(Checkpointed)[-1].step == run.steps,
                "the last checkpoint is not saved",
            )
        weights = others.weights()

    assert checkpoint.newest_common_step(common, others.run) == run.steps
    single = SingleProcess(others.run, others.data.batch)
    for t in range(run.steps):
        single.step(t)
    assert farthest(weights, single) < 1e-9
