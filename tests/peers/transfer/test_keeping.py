"""A keeper among real stage peers in memory: what it keeps outlives them, and it believes nobody."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from peers.clock import now_s
from peers.events import Checkpointed, Event, Kept, Note, Serving, StateFetched, Trouble
from peers.ports import Answer, Request
from peers.programs.trained import collect
from peers.stage import joining
from peers.stage.settings import Checkpoints
from peers.storage import atomic_file as atomic
from peers.storage import checkpoint
from peers.storage.transcript import TranscriptWriter, path_of
from peers.storage.weights import find_run
from peers.transfer.keeper import ELSEWHERE_S, MAX_COMPLAINTS, CheckpointKeeper, KeepingSettings
from peers.transfer.leases import CHUNK_BYTES
from swarm.errors import BadAnswer, SetupError, SwarmError
from swarm.manifest import IslandsSpec, Run, audit_run, demo_run
from swarm.model.stage import StageCompute
from swarm.policy.timeouts import LEAST_BYTES_PER_S
from swarm.records import NO_STAGE
from swarm.wire.messages import AskStatus, Opened, OpenState, PeerStatus, Saved, SavedStage, pack
from tests.peers.lies import flip_a_bit
from tests.peers.loops import Swarm, swarm
from tests.peers.sybils import add_liar

pytestmark = pytest.mark.virtual_time

RUN = replace(audit_run(stages=2, steps=4, microbatches_per_step=4), checkpoint_every=2)


def add_keeper(s: Swarm, folder: Path, name: str = "keeper", **settings: Any) -> CheckpointKeeper:
    end = s.network.join(name)
    chosen = KeepingSettings(folder=folder, **settings)
    keeper = CheckpointKeeper(s.run, end.transport, end.directory, chosen, s.events.append)
    s.start(end, keeper.run())
    return keeper


async def trained_with_keeper(s: Swarm, folder: Path) -> CheckpointKeeper:
    """A keeper that was there since the start, once all steps are taken."""
    keeper = add_keeper(s, folder)
    await s.until_serving()
    await s.until(lambda: s.network.records.get("keeper") is not None)
    s.add_trainer("trainer")
    await s.until_finished()
    return keeper


async def test_a_keeper_keeps_what_a_meeting_of_islands_leaves_and_what_all_of_them_signed(
    tmp_path: Path,
) -> None:
    islands = IslandsSpec(count=2, local_steps=2, outer_lr=1.0, outer_momentum=0.0)
    run = replace(audit_run(stages=2, steps=6, microbatches_per_step=4), islands=islands)
    async with swarm(run, replicas=1) as s:
        keeper = add_keeper(s, tmp_path)
        await s.until_serving()
        for number in range(2):
            s.add_trainer(f"trainer {number}", island=number)
        await s.until_finished()
        await s.until(lambda: keeper.version == 6, limit_s=60.0)
        assert find_run(tmp_path, None) == run
        assert [path.name for path in tmp_path.iterdir()] == [run.id]
        written = TranscriptWriter(tmp_path, run)
        await s.until(lambda: path_of(tmp_path, run).exists(), limit_s=60.0)
        await s.until(lambda: written.append() or written.ends == dict.fromkeys(range(4), 6), limit_s=60.0)


@asynccontextmanager
async def trained(folder: Path, run: Run = RUN, *, replicas: int = 1) -> AsyncIterator[Swarm]:
    """All steps taken, with a keeper in `folder` since the start."""
    async with swarm(run, replicas=replicas) as s:
        await trained_with_keeper(s, folder)
        yield s


def assert_counted(folder: Path, stages: range, version: int, run: Run = RUN) -> None:
    """The folder holds that version of those stages, each microbatch counted once a step."""
    for stage in stages:
        tensors = checkpoint.Checkpoint(folder, run, stage, version).load()
        counted = -tensors["weights"] * run.M
        assert torch.equal(counted, torch.full((run.M,), float(version), dtype=torch.float64))


async def test_a_keeper_holds_what_peers_without_a_disk_had_in_memory(tmp_path: Path) -> None:
    async with trained(tmp_path) as s:
        await s.until(lambda: [event for event in s.seen(Kept) if event.version == RUN.steps])
        assert s.seen(Kept)[-1].words() == "keeps version 4 of stages 0 1"
        assert {(e.stage, e.step) for e in s.seen(Checkpointed)} >= {(0, 4), (1, 4)}
        record = s.network.records["keeper"]
        await s.until(lambda: s.network.records["keeper"].version == RUN.steps)
        assert (record.stage, record.state, record.movable) == (NO_STAGE, "keeping", False)
        told = await s.add_stranger().ask("keeper", "status", AskStatus(run=RUN.id), PeerStatus)
        assert (told.stage, told.state, told.version) == (NO_STAGE, "keeping", RUN.steps)
    assert checkpoint.newest_common_step(tmp_path, RUN) == RUN.steps
    assert_counted(tmp_path, range(RUN.S), RUN.steps)


async def test_a_keeper_has_room_for_all_that_it_keeps_at_once(tmp_path: Path) -> None:
    async with swarm(RUN, replicas=1) as s:
        keeper = await trained_with_keeper(s, tmp_path)
        await s.until(lambda: keeper.version == RUN.steps)
        for stage in range(RUN.S):
            question = OpenState(run=RUN.id, stage=stage, version=RUN.steps)
            await s.add_stranger(f"reader {stage}").ask("keeper", "state", question, Opened)
        assert len(keeper.leases.of("saved")) == RUN.S, "each is hashed once, and stays open"


async def test_what_is_kept_outlives_everybody_and_brings_the_run_back(tmp_path: Path) -> None:
    """The whole promise: all peers gone, others without any disk go on from the keeper's."""
    half = replace(RUN, steps=6)
    async with swarm(half, replicas=1) as s:
        add_keeper(s, tmp_path)
        await s.until_serving()
        await s.until(lambda: s.network.records.get("keeper") is not None)
        s.add_trainer("trainer")
        await s.until(lambda: s.seen(Kept))
        for name in ("trainer", "s0p0", "s1p0", "keeper"):
            s.kill(name)
    async with swarm(half, replicas=0) as s:
        add_keeper(s, tmp_path)
        await s.until(lambda: s.seen(Kept))
        version = s.seen(Kept)[-1].version
        assert version > 0
        for stage in range(half.S):
            s.add_peer(f"new{stage}", stage)
        await s.until_serving()
        assert [event.version for event in s.seen(Serving)] == [version] * half.S
        text = f"resumes from the checkpoint of version {version}"
        assert any(text in event.text for event in s.seen(Note))
        s.add_trainer("trainer")
        await s.until_finished()
        s.assert_each_counted_once()


async def test_disks_that_hold_one_stage_each_start_the_run_together(tmp_path: Path) -> None:
    run = replace(RUN, steps=6)
    for stage in range(run.S):
        for version in (2, 4):
            state = StageCompute(run, stage).state.copy()
            state["weights"] -= version / run.M
            checkpoint.Checkpoint(tmp_path / f"{stage}", run, stage, version).save(state, keep=9)
    checkpoint.Checkpoint(tmp_path / "1", run, 1, 5).save(StageCompute(run, 1).state.copy(), keep=9)
    async with swarm(run, replicas=0) as s:
        for stage in range(run.S):
            s.add_peer(f"p{stage}", stage, checkpoints=Checkpoints(folder=tmp_path / f"{stage}"))
        await s.until_serving()
        assert [event.version for event in s.seen(Serving)] == [4, 4]
        s.add_trainer("trainer")
        await s.until_finished()
        s.assert_each_counted_once()


async def test_a_run_that_starts_with_an_empty_keeper_waits_for_nothing(tmp_path: Path) -> None:
    async with swarm(RUN, replicas=0) as s:
        add_keeper(s, tmp_path)
        await s.until(lambda: s.network.records.get("keeper") is not None)
        began = now_s()
        s.add_peer("p0", 0)
        await s.until_serving()
        assert now_s() - began < 1.0 < joining.LOST_S


async def test_a_second_keeper_copies_from_the_first_when_no_peer_is_left(tmp_path: Path) -> None:
    async with trained(tmp_path / "first") as s:
        await s.until(lambda: checkpoint.newest_common_step(tmp_path / "first", RUN) == RUN.steps)
        s.kill_and_forget("trainer", "s0p0", "s1p0")
        add_keeper(s, tmp_path / "second", "other", stages=(1,))
        await s.until(lambda: [e for e in s.seen(Kept) if e.stages == (1,)])
    assert checkpoint.saved_steps(tmp_path / "second", RUN, 1)[0] == RUN.steps
    assert checkpoint.saved_steps(tmp_path / "second", RUN, 0) == []
    assert_counted(tmp_path / "second", range(1, 2), RUN.steps)


async def test_a_keeper_that_comes_late_takes_what_is_on_the_peers_disks(tmp_path: Path) -> None:
    async with swarm(RUN, replicas=0) as s:
        for stage in range(RUN.S):
            s.add_peer(f"p{stage}", stage, checkpoints=Checkpoints(folder=tmp_path / f"of{stage}", keep=9))
        s.add_trainer("trainer")
        await s.until_finished()
        for each in range(RUN.S):
            of = tmp_path / f"of{each}"
            await s.until(lambda e=each, of=of: RUN.steps in checkpoint.saved_steps(of, RUN, e))
        add_keeper(s, tmp_path / "kept")
        await s.until(lambda: [event for event in s.seen(Kept) if event.version == RUN.steps])
        assert_counted(tmp_path / "kept", range(RUN.S), RUN.steps)
        # Older versions are of no use any more: they were not fetched.
        assert checkpoint.found_steps(tmp_path / "kept", RUN, 0) == [RUN.steps]


async def test_a_keeper_that_leaves_says_so_and_what_it_kept_is_verified_when_it_returns(
    tmp_path: Path,
) -> None:
    async with trained(tmp_path) as s:
        await s.until(lambda: checkpoint.newest_common_step(tmp_path, RUN) == RUN.steps)
        s.kill_and_forget("s0p0")  # what it had is in the keeper's folder only
        (file,) = (tmp_path / RUN.id / "step-000000004").glob("stage-0-*.safetensors")
        s.kill("keeper")
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
        s.events.clear()
        again = add_keeper(s, tmp_path)
        await s.until(lambda: s.seen(Trouble))
        assert s.seen(Trouble)[0].text.startswith("not kept: the checkpoint file ")
        assert "is damaged: its bytes are not those that were saved" in s.seen(Trouble)[0].text
        await s.until(lambda: (r := s.network.records.get("keeper")) is not None and r.state == "keeping")
        assert again.version != RUN.steps
        again.leave()
        await s.until(s.tasks["keeper"].done)
        assert s.network.records["keeper"].state == "left"


async def test_a_keeper_that_is_told_to_leave_at_the_end_fetches_the_last_version_first(
    tmp_path: Path,
) -> None:
    """Whoever trained presses Ctrl-C everywhere, a moment after the last step."""
    run = replace(RUN, checkpoint_every=0)
    async with swarm(run, replicas=1) as s:
        keeper = await trained_with_keeper(s, tmp_path)
        keeper.leave()
        await s.until(s.tasks["keeper"].done)
        said = [event.text for event in s.seen(Note)]
        text = "version 4 of stage 1 is fetched before this keeper leaves, within 25 s; again to leave now"
        assert text in said and said[-1] == "this keeper leaves with version 4"
        assert checkpoint.newest_common_step(tmp_path, run) == run.steps
        assert not s.seen(Trouble)


async def test_a_keeper_that_leaves_without_the_last_version_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(RUN, checkpoint_every=0)
    async with swarm(run, replicas=1) as s:
        keeper = await trained_with_keeper(s, tmp_path)

        async def never(*_: object) -> bool:
            await asyncio.sleep(1000.0)
            return False

        monkeypatch.setattr(keeper, "_fetch", never)
        keeper.leave()
        await s.until(s.tasks["keeper"].done)
        assert [event.text for event in s.seen(Trouble)] == [
            "this keeper leaves with nothing; version 4 is with the peers only. Start the keeper again "
            "before they leave, or give them --checkpoint-dir"
        ]


async def test_what_is_removed_from_a_keepers_disk_is_fetched_again_and_not_said_to_be_kept(
    tmp_path: Path,
) -> None:
    """It said until its end that it had the run's last version, and told it to all who look."""
    async with swarm(RUN, replicas=1) as s:
        keeper = await trained_with_keeper(s, tmp_path)
        await s.until(lambda: keeper.version == RUN.steps)
        s.events.clear()
        shutil.rmtree(tmp_path / RUN.id)
        await s.until(lambda: s.seen(Kept))
        assert "version 4 is gone or damaged: fetching it again" in s.seen(Trouble)[0].text
        assert checkpoint.newest_common_step(tmp_path, RUN) == RUN.steps
        s.kill_and_forget("s0p0", "s1p0")
        shutil.rmtree(tmp_path / RUN.id)
        await s.until(lambda: s.network.records["keeper"].version == 0)
        keeper.leave()
        await s.until(s.tasks["keeper"].done)
        assert [event.text for event in s.seen(Note)][-1] == "this keeper leaves with nothing"


async def test_a_keeper_says_what_it_leaves_with_though_the_peers_left_before(tmp_path: Path) -> None:
    async with swarm(replace(RUN, checkpoint_every=0), replicas=1) as s:
        keeper = await trained_with_keeper(s, tmp_path)
        for name in ("s0p0", "s1p0"):
            s.kill_and_forget(name)
        keeper.leave()
        await s.until(s.tasks["keeper"].done)
        assert [event.text for event in s.seen(Note)][-1] == "this keeper leaves with nothing"


async def test_the_last_version_is_collected_from_peers_without_a_disk(tmp_path: Path) -> None:
    run = replace(RUN, checkpoint_every=0)
    async with swarm(run, replicas=1) as s:
        end = s.network.join("collector")
        await s.until_serving()
        with pytest.raises(SetupError) as none:
            await collect(run, end.transport, end.directory, tmp_path, s.events.append, limit_s=0.0)
        assert none.value.text.startswith(
            "no version of all stages could be fetched (on offer: stage 0: none; stage 1: none). Before its"
        )
        said: list[Event] = []
        with pytest.raises(SetupError, match="no version of all stages"):
            await collect(run, end.transport, end.directory, tmp_path, said.append)
        assert [event.words() for event in said] == [
            "no version of all stages could be fetched (on offer: stage 0: none; stage 1: none): asked again "
            "for 15 s"
        ]
        s.add_trainer("trainer")
        await s.until_finished()
        assert await collect(run, end.transport, end.directory, tmp_path, s.events.append) == run.steps
        assert not [record for record in await end.directory.refresh() if record.peer == "collector"]
    assert_counted(tmp_path, range(run.S), run.steps, run)


# --- the disk


async def test_a_full_disk_is_said_the_old_is_kept_and_the_new_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in range(RUN.S):
        checkpoint.Checkpoint(tmp_path, RUN, each, 2).save(StageCompute(RUN, each).state.copy())
    original, full = atomic.write_all, True

    def write_all(file: Any, data: Any) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(file, data)

    monkeypatch.setattr(atomic, "write_all", write_all)
    async with trained(tmp_path) as s:
        await s.until(lambda: len(s.seen(Trouble)) > 1)
        text = s.seen(Trouble)[0].text
        assert "cannot save the checkpoint of stage" in text and "the disk is full" in text
        assert "Make room or choose another folder" in text
        assert text.endswith("; what is kept stays, next try in 60 s")
        assert checkpoint.newest_common_step(tmp_path, RUN) == 2
        assert not s.tasks["keeper"].done()
        full = False
        await s.until(lambda: checkpoint.newest_common_step(tmp_path, RUN) == RUN.steps)


async def test_nothing_is_downloaded_that_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage(NamedTuple):
        free: int

    async with swarm(RUN, replicas=1) as s:
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: Usage(free=1000))
            add_keeper(s, tmp_path)
            await s.until_serving()
            await s.until(lambda: s.network.records.get("keeper") is not None)
            s.add_trainer("trainer")
            await s.until_finished()
            await s.until(lambda: len(s.seen(Trouble)) > 1)
            assert not s.seen(StateFetched)
            assert s.seen(Trouble)[0].text.startswith("no room for version ")
            assert "it takes 1 MiB, and 0 MiB are free. Make room or choose another --dir; nothing is" in (
                s.seen(Trouble)[0].text
            )
        await s.until(lambda: checkpoint.newest_common_step(tmp_path, RUN) == RUN.steps)


async def test_a_folder_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with trained(tmp_path / "file") as s:
        await s.until(lambda: s.seen(Trouble))
        assert "cannot keep anything in" in s.seen(Trouble)[0].text
        assert not s.tasks["keeper"].done()


# --- liars


def answers(s: Swarm, name: str, method: str, change: Callable[[Answer], Answer]) -> None:
    """From now on the answers of a peer to `method` pass through `change`."""
    transport = s.network.peers[name].transport
    honest, limit = transport.handlers[method]

    async def handle(request: Request) -> Answer:
        return change(await honest(request))

    transport.serve(method, handle, max_body_bytes=limit)


def claims(*versions: int, stage: int = 1) -> Callable[[Answer], Answer]:
    return lambda _: Answer(pack(Saved(stages=(SavedStage(stage=stage, versions=versions),))))


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (claims(99), "not believed: peer s1p0: offers impossible versions of stage 1: [99] of 4"),
        (claims(4, stage=0), "not believed: peer s1p0: serves stage 1 and offers checkpoints of 0"),
    ],
)
async def test_what_cannot_be_is_not_believed_and_the_honest_replica_is_asked(
    tmp_path: Path, lie: Callable[[Answer], Answer], words: str
) -> None:
    async with swarm(RUN, replicas=2) as s:
        answers(s, "s1p0", "saved", lie)
        add_keeper(s, tmp_path)
        await s.until_serving()
        await s.until(lambda: s.network.records.get("keeper") is not None)
        s.add_trainer("trainer")
        await s.until_finished()
        await s.until(lambda: checkpoint.newest_common_step(tmp_path, RUN) == RUN.steps)
        assert [event.text for event in s.seen(Trouble)].count(words) == 1
    assert_counted(tmp_path, range(RUN.S), RUN.steps)


async def test_a_crowd_that_says_what_cannot_be_is_not_remembered_for_ever(tmp_path: Path) -> None:
    async with swarm(RUN, replicas=0) as s:
        keeper = add_keeper(s, tmp_path)
        for number in range(2 * MAX_COMPLAINTS):
            for text in ("lies", "lies in another way"):
                keeper._not_believed(BadAnswer(f"a{number}", text))
            for text in ("lies", "lies in another way"):
                keeper._not_believed(BadAnswer(f"a{number}", text))
        assert len(s.seen(Trouble)) == 4 * MAX_COMPLAINTS, "each once, though it says two things in turn"
        assert len(keeper._complaints) == MAX_COMPLAINTS


async def test_a_version_ahead_of_the_run_is_not_even_asked_for(tmp_path: Path) -> None:
    """It would stay for ever: newer than all that comes."""
    run = replace(RUN, steps=50)
    async with swarm(run, replicas=1) as s:
        add_keeper(s, tmp_path)
        await s.until_serving()
        await s.until(lambda: s.network.records.get("keeper") is not None)
        answers(s, "s1p0", "saved", claims(50))
        s.network.dht.put(msgspec.structs.replace(s.network.records["s1p0"], version=50))
        s.add_trainer("trainer")
        await s.until(lambda: s.peers["s0p0"].core.version >= 6)
        asked = s.network.peers["s1p0"].transport.calls["state"]
        assert asked == 0
        assert checkpoint.found_steps(tmp_path, run, 1) == []


async def test_a_keeper_that_lies_about_how_far_the_run_is_moves_nothing(tmp_path: Path) -> None:
    run = replace(RUN, steps=10_000)
    async with swarm(run, replicas=1) as s:
        add_keeper(s, tmp_path / "liar", "liar")
        add_keeper(s, tmp_path / "kept")
        await s.until(lambda: {"liar", "keeper"} <= s.network.records.keys())
        both = tuple(SavedStage(stage=stage, versions=(run.steps,)) for stage in range(run.S))
        answers(s, "liar", "saved", lambda _: Answer(pack(Saved(stages=both))))
        s.add_trainer("trainer")
        calls = s.network.peers["liar"].transport.calls
        await s.until(lambda: s.peers["s0p0"].core.version >= 6 and calls["saved"])
        assert s.network.peers["liar"].transport.calls["state"] == 0


async def test_bytes_that_do_not_fit_their_hash_are_not_kept(tmp_path: Path) -> None:
    async with swarm(RUN, replicas=0) as s:
        folders = [tmp_path / f"{number}" for number in range(4)]
        for number, folder in enumerate(folders):
            s.add_peer(f"s{number // 2}p{number % 2}", number // 2, checkpoints=Checkpoints(folder=folder))
        answers(s, "s1p0", "chunk", flip_a_bit)
        await s.until_serving()
        s.add_trainer("trainer")
        await s.until_finished()
        for number, folder in enumerate(folders):  # so that the keeper asks the liar too
            saved = lambda n=number, f=folder: checkpoint.saved_steps(f, RUN, n // 2)  # noqa: E731
            await s.until(lambda saved=saved: RUN.steps in saved())
        add_keeper(s, tmp_path / "kept")
        await s.until(lambda: checkpoint.newest_common_step(tmp_path / "kept", RUN) == RUN.steps)
        assert any("not believed: peer s1p0: " in event.text for event in s.seen(Trouble))
    assert_counted(tmp_path / "kept", range(RUN.S), RUN.steps)


async def test_a_state_that_is_not_finite_is_not_kept_though_its_hashes_fit(tmp_path: Path) -> None:
    async with swarm(RUN, replicas=1) as s:
        add_keeper(s, tmp_path)
        await s.until_serving()
        await s.until(lambda: s.network.records.get("keeper") is not None)
        compute = s.peers["s1p0"].core.compute
        honest = compute.state.copy
        compute.state.copy = lambda: {  # type: ignore[method-assign]
            name: tensor * float("nan") for name, tensor in honest().items()
        }
        s.add_trainer("trainer")
        await s.until_finished()
        why = "could not download stage 1: peer s1p0: a chunk is not finite"
        text = f"version {RUN.steps} of stage 1 is not kept: {why}"
        await s.until(lambda: text in [event.text for event in s.seen(Trouble)])
        asked = s.network.peers["s1p0"].transport.calls["state"]
        await s.until(lambda: s.network.peers["s1p0"].transport.calls["state"] > asked + 1)
        assert [event.text for event in s.seen(Trouble)].count(text) == 1  # said once, tried again
        assert checkpoint.found_steps(tmp_path, RUN, 1) == []
        assert not s.tasks["keeper"].done()


@pytest.mark.parametrize(
    ("every", "when"), [(2, "every 2 steps"), (0, "at the end of the run only (checkpoint_every = 0)")]
)
async def test_a_keeper_of_nothing_says_what_it_waits_for(tmp_path: Path, every: int, when: str) -> None:
    async with swarm(replace(RUN, checkpoint_every=every), replicas=0) as s:
        add_keeper(s, tmp_path)
        text = f"nothing is kept in {tmp_path} yet: peers save a version {when}"
        await s.until(lambda: text in [note.text for note in s.seen(Note)])


async def test_another_run_is_refused(tmp_path: Path) -> None:
    async with swarm(RUN, replicas=1) as s:
        add_keeper(s, tmp_path)
        await s.until(lambda: s.network.records.get("keeper") is not None)
        stranger = s.add_stranger()
        with pytest.raises(SwarmError, match=f"this peer serves run {RUN.id}, not 'other'"):
            await stranger.send("keeper", "status", AskStatus(run="other"))


async def test_a_peer_that_dies_in_the_middle_costs_only_time(tmp_path: Path) -> None:
    async with swarm(RUN, replicas=2) as s:
        add_keeper(s, tmp_path)
        await s.until_serving()
        await s.until(lambda: s.network.records.get("keeper") is not None)
        s.add_trainer("trainer")
        await s.until_finished()
        s.on_call("chunk", lambda _, callee: s.kill(callee), by="keeper")
        await s.until(lambda: checkpoint.newest_common_step(tmp_path, RUN) == RUN.steps)
    assert_counted(tmp_path, range(RUN.S), RUN.steps)


async def test_a_peer_that_gives_a_version_slowly_does_not_keep_it_from_those_that_offer_it_later(
    tmp_path: Path,
) -> None:
    """It had 64 kB/s, which no caller gives up: hours for the state of a large stage."""
    model = replace(demo_run().model, layers=1, stages=1, hidden=512, ffn_hidden=2048)
    run = replace(demo_run(), model=model)
    async with swarm(run, replicas=0) as s:
        await add_liar(s, "first", 0, 4, saved=(2, 3, 4))
        transport, free_s = s.network.peers["first"].transport, now_s()
        honest, _ = transport.handlers["chunk"]

        async def slowly(request: Request) -> Answer:
            nonlocal free_s
            free_s = max(free_s, now_s()) + CHUNK_BYTES / LEAST_BYTES_PER_S
            await asyncio.sleep(free_s - now_s())
            return await honest(request)

        transport.serve("chunk", slowly)
        keeper, began_s = add_keeper(s, tmp_path), now_s()
        await asyncio.sleep(30.0)
        await add_liar(s, "second", 0, 4)  # it has the same
        await s.until(lambda: keeper.version == 4, limit_s=1000.0)
        assert ELSEWHERE_S < now_s() - began_s < ELSEWHERE_S + 30.0
