"""A stage that loses all of its members is brought back, and the run goes on to the same result (I5)."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from peers.clock import now_s
from peers.events import Note, RolledBack, StageLost, Stepped, Trouble
from peers.stage.settings import Checkpoints
from peers.storage.checkpoint_store import CheckpointStore
from swarm.errors import SetupError
from swarm.ids import Generation
from swarm.manifest import audit_run
from swarm.model.stage_io import input_metas
from swarm.protocol.messages import Directive
from swarm.protocol.protocol import LED_S
from swarm.wire.messages import Work, WorkDone
from tests.peers.loops import Swarm, swarm
from tests.seeds import seeds, some

pytestmark = pytest.mark.virtual_time


def lose(built: Swarm, stage: int) -> None:
    """Kill every peer of a stage at once."""
    for name in built.of_stage(stage):
        built.kill(name)


@pytest.mark.asyncio
@pytest.mark.parametrize("stage", some([0, 1, 2], quick=[0]))
async def test_without_any_checkpoint_the_run_begins_again_by_itself(stage: int) -> None:
    run = audit_run(stages=3, steps=6, microbatches_per_step=4)
    async with swarm(run) as built:
        await built.until_serving()
        built.add_trainer("trainer")
        await built.until_version(2)
        lose(built, stage)
        built.add_peer("late", stage)
        await built.until_finished(limit_s=60)
        built.assert_each_counted_once()
        assert any(event.stage == stage for event in built.seen(StageLost))
        assert {event.step for event in built.seen(RolledBack)} == {0}


@pytest.mark.asyncio
@pytest.mark.parametrize("stage", some([0, 1, 2], quick=[1]))
@pytest.mark.slow
async def test_all_stages_go_back_to_the_newest_checkpoint_that_they_share(
    stage: int, tmp_path: Path
) -> None:
    run = replace(audit_run(stages=3, steps=9, microbatches_per_step=4), checkpoint_every=2)
    async with swarm(run, replicas=0) as built:
        saves = Checkpoints(folder=tmp_path)
        for s in range(run.S):
            for replica in range(2):
                built.add_peer(f"s{s}p{replica}", s, checkpoints=saves)
        await built.until_serving()
        built.add_trainer("trainer")
        await built.until_version(5)
        lose(built, stage)
        built.add_peer("late", stage, checkpoints=saves)
        await built.until_finished(limit_s=60)
        built.assert_each_counted_once()
        back = {event.step for event in built.seen(RolledBack)}
        assert len(back) <= 1 and back <= {2, 4, 6, 8}, back


@pytest.mark.asyncio
async def test_two_that_come_at_once_settle_it(tmp_path: Path) -> None:
    """They see different disks, so each would go back to another version: the greater generation holds."""
    run = replace(audit_run(stages=2, steps=8, microbatches_per_step=4), checkpoint_every=2)
    async with swarm(run, replicas=0) as built:
        saves = Checkpoints(folder=tmp_path)
        for s in range(run.S):
            built.add_peer(f"s{s}p0", s, checkpoints=saves)
        await built.until_serving()
        built.add_trainer("trainer")
        await built.until_version(3)
        lose(built, 1)
        built.add_peer("with", 1, checkpoints=saves)
        built.add_peer("without", 1)
        await built.until_finished(limit_s=60)
        built.assert_each_counted_once()


@pytest.mark.asyncio
async def test_a_checkpoint_that_turns_out_damaged_is_gone_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage 0 says that it has version 2, and cannot read it when all go back to it: then to an older one."""
    run = replace(audit_run(stages=2, steps=10, microbatches_per_step=4), checkpoint_every=2)
    honest = CheckpointStore.load

    def load(self: CheckpointStore, version: int) -> object:
        if self._stage == 0 and version:  # type: ignore
            raise SetupError("the disk is scratched")
        return honest(self, version)

    monkeypatch.setattr(CheckpointStore, "load", load)
    async with swarm(run, replicas=0) as built:
        saves = Checkpoints(folder=tmp_path, keep=9)
        for s in range(run.S):
            built.add_peer(f"s{s}p0", s, checkpoints=saves)
        await built.until_serving()
        built.add_trainer("trainer")
        # Between two checkpoints: from one of just its version the run would go on.
        await built.until(lambda: all(p.core.version >= 5 and p.core.version % 2 for _, p in built.live()))
        lose(built, 1)
        built.add_peer("late", 1, checkpoints=saves)
        await built.until_finished(limit_s=60)
        built.assert_each_counted_once()
        assert any(isinstance(e, Trouble) and "the disk is scratched" in e.text for e in built.events)
        assert 0 in {event.step for event in built.seen(RolledBack)}


@pytest.mark.asyncio
async def test_a_keeper_that_is_away_is_waited_for(tmp_path: Path) -> None:
    """Going back to the beginning would lose more than waiting: the disk comes a little later."""
    run = replace(audit_run(stages=2, steps=16, microbatches_per_step=4), checkpoint_every=2)
    async with swarm(run, replicas=0) as built:
        saves = Checkpoints(folder=tmp_path, keep=9)
        built.add_peer("s0p0", 0, checkpoints=saves)
        built.add_peer("s1p0", 1, checkpoints=saves)
        await built.until_serving()
        built.add_trainer("trainer")
        await built.until_version(9)
        built.kill("s1p0")
        built.add_peer("without", 1)
        waits = "waits for a checkpoint newer than version 0"
        await built.until(lambda: any(waits in event.words() for event in built.events))
        built.add_peer("with", 1, checkpoints=saves)
        await built.until_finished(limit_s=60)
        built.assert_each_counted_once()
        assert all(event.step >= 6 for event in built.seen(RolledBack))


@pytest.mark.slow
@pytest.mark.asyncio
async def test_how_long_the_run_waits_before_it_goes_far_back_is_said_again_and_again() -> None:
    run = replace(audit_run(stages=2, steps=12, microbatches_per_step=4), checkpoint_every=2)
    async with swarm(run, replicas=1) as built:
        await built.until_serving()
        built.add_trainer("trainer")
        await built.until_version(7)
        built.kill("s1p0")
        built.add_peer("late", 1)
        await built.until_finished()
        said = [re.search(r"goes back to 0 in (\d+) s", event.text) for event in built.seen(Trouble)]
        left_s = [int(found[1]) for found in said if found]
        assert len(left_s) >= 4 and left_s[0] > 50 and left_s[-1] < 15
        assert all(13 <= before - after <= 17 for before, after in pairwise(left_s))
        built.assert_each_counted_once()


@pytest.mark.asyncio
async def test_a_request_of_before_the_run_went_back_counts_once_as_any_other() -> None:
    """Requests name no generation: what `(t, m)` gives follows from the manifest."""
    run = audit_run(stages=2, steps=6, microbatches_per_step=4)
    async with swarm(run, replicas=1) as built:
        await built.until_serving()
        trainer, stranger = built.add_trainer("trainer"), built.add_stranger()
        await built.until_version(3)
        trainer.leave()
        lose(built, 1)
        built.add_peer("late", 1)
        first = built.peers["s0p0"]
        await built.until(lambda: first.core.generation.number == 1 and first.core.joined)
        assert first.core.version == 0
        for m in (1, 1, 3):  # as they were sent before, and one of them twice
            sent = Work(run=run.id, t=0, m=m, version=0, tensors=input_metas(run, 0))
            done = await stranger.ask("s0p0", "work", sent, WorkDone, stranger.tokens(0, m, built.batches))
            assert len(done.hops) == 2
        assert built.done("s0p0") == built.done("late") == 0b1010
        built.add_trainer("another")
        await built.until_finished()
        built.assert_each_counted_once()


@pytest.mark.asyncio
async def test_who_takes_the_lead_of_a_lost_stage_goes_on_counting() -> None:
    """Else each newcomer with a smaller id would wait its own minute before the run goes far back."""
    async with swarm(audit_run(stages=1, steps=3), replicas=1) as built:
        await built.until_serving()
        protocol, now = built.peers["s0p0"].coordination.protocol, now_s() + LED_S
        directive = Directive(run=built.run.id, stage=0, coordinator="a", version=0, behind_s=50)
        protocol.directive_came(directive, now=now)
        assert 50 <= protocol.stuck_s(now=now) < 60
        protocol.directive_came(msgspec.structs.replace(directive, number=1, behind_s=-(10**9)), now=now)
        assert protocol.stuck_s(now=now) == 0
        protocol.directive_came(msgspec.structs.replace(directive, number=2, behind_s=10**18), now=now)
        assert protocol.stuck_s(now=now) < 3700


@pytest.mark.asyncio
@pytest.mark.slow
async def test_with_delayed_updates_it_goes_back_too(tmp_path: Path) -> None:
    base = audit_run(stages=2, steps=8, microbatches_per_step=4)
    run = replace(base, checkpoint_every=3, delayed_updates=True)
    async with swarm(run, replicas=0) as built:
        saves = Checkpoints(folder=tmp_path)
        for s in range(run.S):
            built.add_peer(f"s{s}p0", s, checkpoints=saves)
        await built.until_serving()
        built.add_trainer("trainer")
        await built.until_version(5)
        lose(built, 0)
        built.add_peer("late", 0, checkpoints=saves)
        await built.until_finished(limit_s=60)
        built.assert_each_counted_once()


@pytest.mark.asyncio
@pytest.mark.parametrize("stage", seeds(2, quick=1))
async def test_when_a_stage_was_only_asleep_all_agree_on_a_generation_again(stage: int) -> None:
    """Its replica is ahead by version, and behind by generation; the others leave theirs, and follow it."""
    run = audit_run(stages=2, steps=6, microbatches_per_step=4)
    async with swarm(run, replicas=1) as built:
        await built.until_serving()
        built.add_trainer("trainer")
        await built.until_version(2)
        built.network.stop(f"s{stage}p0")
        built.add_peer("late", stage)
        others = [built.peers["late"].core, built.peers[f"s{1 - stage}p0"].core]
        await built.until(lambda: all(core.generation.number == 1 for core in others), limit_s=30)
        built.network.go_on(f"s{stage}p0")
        await built.until_finished(limit_s=60)
        built.assert_each_counted_once()
        assert len({peer.core.generation for _, peer in built.live()}) == 1


@pytest.mark.asyncio
@pytest.mark.slow
async def test_it_happens_again_and_again() -> None:
    run = audit_run(stages=2, steps=5, microbatches_per_step=4)
    async with swarm(run, replicas=1) as built:
        await built.until_serving()
        built.add_trainer("trainer")
        for turn, stage in enumerate([0, 1, 0]):
            took = len(built.seen(Stepped))
            await built.until(lambda took=took: len(built.seen(Stepped)) >= took + 4)
            lose(built, stage)
            built.add_peer(f"late{turn}", stage)
        await built.until_finished(limit_s=90)
        built.assert_each_counted_once()
        assert all(peer.core.generation.number >= 1 for _, peer in built.live())


@pytest.mark.asyncio
async def test_who_alone_is_in_a_generation_leaves_it_and_keeps_its_weights() -> None:
    """It was told that a stage is lost, and nobody else was; or the one that told it lied."""
    async with swarm(audit_run(stages=3, steps=6, microbatches_per_step=4), replicas=2) as built:
        await built.until_serving()
        built.add_trainer("trainer")
        await built.until_version(1)
        misled = built.peers["s1p0"]
        claimed = Generation(1, 0, 2, misled.core.version)
        misled.coordination.protocol.lost_stage_told(claimed, {}, {}, now=now_s())
        misled.core.enter(claimed)
        await built.until_finished(limit_s=60)
        built.assert_each_counted_once()
        assert "stage 1: generation 1 was started in error, and is left" in [e.text for e in built.seen(Note)]
        assert not built.seen(RolledBack)
