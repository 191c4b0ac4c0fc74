"""A peer that starts from a folder of checkpoints says what it passed over, and where it resumes."""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from peers.events import Checkpointed, Note, Serving, Trouble
from peers.stage.settings import Checkpoints
from peers.storage import checkpoint
from peers.transfer.catalog import ask_saved
from peers.transfer.client import download, state_of
from swarm.manifest import audit_run
from swarm.model.stage import StageCompute
from tests.peers.loops import swarm

pytestmark = pytest.mark.virtual_time

RUN = replace(audit_run(stages=2, steps=9, microbatches_per_step=4), checkpoint_every=2)


def saved(folder: Path, *versions: int) -> None:
    for version in versions:
        for stage in range(RUN.S):
            checkpoint.Checkpoint(folder, RUN, stage, version).save(StageCompute(RUN, stage).state.copy())


async def test_damaged_checkpoints_are_named_before_an_older_one_is_resumed(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    [damaged] = (tmp_path / RUN.id / "step-000000004").glob("stage-1-*.safetensors")
    os.truncate(damaged, 50)
    async with swarm(RUN, replicas=0) as built:
        for stage in range(RUN.S):
            built.add_peer(f"s{stage}p0", stage, checkpoints=Checkpoints(folder=tmp_path))
        await built.until_serving()
        said = [event.text for event in built.seen(Trouble)]
        assert len(said) == 2 and all(
            f"passed over: the checkpoint file {damaged} is damaged" in t for t in said
        )
        assert sorted(event.text for event in built.seen(Note)) == [
            f"stage {stage} resumes from the checkpoint of version 2" for stage in range(RUN.S)
        ]


async def test_what_is_whole_and_cannot_be_loaded_is_passed_over_as_well(tmp_path: Path) -> None:
    """Nor does a checkpoint that another peer of the folder removes just then end who resumes."""
    saved(tmp_path, 2, 4)
    state = StageCompute(RUN, 1).state.copy()
    state["weights"][0] = math.nan
    checkpoint.Checkpoint(tmp_path, RUN, 1, 4).save(state)
    async with swarm(RUN, replicas=0) as built:
        for stage in range(RUN.S):
            built.add_peer(f"s{stage}p0", stage, checkpoints=Checkpoints(folder=tmp_path))
        await built.until_serving()
        await built.until(lambda: all(peer.core.version == 2 for _, peer in built.live()), limit_s=60.0)
        said = [event.text for event in built.seen(Trouble)]
        assert any("passed over: the checkpoint file" in text and "is not finite" in text for text in said)


async def test_a_folder_of_another_run_is_said_to_be_of_no_use(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    run = replace(RUN, seed=RUN.seed + 1)
    async with swarm(run, replicas=0) as built:
        built.add_peer("s0p0", 0, checkpoints=Checkpoints(folder=tmp_path))
        built.add_peer("s1p0", 1)
        await built.until_serving()
        assert [event.text for event in built.seen(Trouble)] == [
            f"{tmp_path} has no checkpoint of run {run.id} that could be used, only of run {RUN.id}: "
            "stage 0 starts without one"
        ]


# --- the end of a run


async def test_peers_without_a_folder_save_the_last_version_and_nothing_before_it(tmp_path: Path) -> None:
    run = replace(RUN, steps=4)
    async with swarm(run, replicas=0) as built:
        for stage in range(run.S):
            results = Checkpoints(folder=tmp_path, keep=1, only_last=True)
            built.add_peer(f"s{stage}p0", stage, checkpoints=results)
        await built.until_serving()
        built.add_trainer("trainer")
        await built.until(lambda: len(built.seen(Checkpointed)) == run.S)
        assert [event.step for event in built.seen(Checkpointed)] == [4, 4]
        assert checkpoint.newest_common_step(tmp_path, run) == 4
        assert (
            "the run is complete: all 4 steps are taken. This peer gives out version 4 of stage 0 until "
            f"Ctrl-C; it goes to {tmp_path} too"
        ) in [event.text for event in built.seen(Note)]
    # A result is no checkpoint: the same manifest started again begins at version 0.
    async with swarm(run, replicas=0) as built:
        for stage in range(run.S):
            results = Checkpoints(folder=tmp_path, keep=1, only_last=True)
            built.add_peer(f"s{stage}p0", stage, checkpoints=results)
        await built.until_serving()
        assert [event.version for event in built.seen(Serving)] == [0, 0]


async def test_peers_of_a_finished_run_offer_its_last_version_without_any_disk() -> None:
    run = replace(RUN, steps=2, checkpoint_every=0)
    async with swarm(run, replicas=1) as built:
        await built.until_serving()
        stranger = built.add_stranger()
        records = await stranger.end.directory.lookup_all()
        assert (await ask_saved(run, stranger.end.transport, records)).sources == {0: {}, 1: {}}
        built.add_trainer("trainer")
        await built.until_finished()
        await asyncio.sleep(1.0)  # an answer is given again for half a second
        found = (await ask_saved(run, stranger.end.transport, records)).sources
        assert found == {0: {2: ["s0p0"]}, 1: {2: ["s1p0"]}}
        got = await download(stranger.end.transport, state_of(run, 1, 2), found[1][2])
        assert (-got.tensors["weights"] * run.M == run.steps).all()
        assert any("it is saved nowhere: export it before" in event.text for event in built.seen(Note))
