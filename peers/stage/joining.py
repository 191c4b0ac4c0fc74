"""How a newcomer gets the weights of its stage: from replicas, a checkpoint, or version 0 from the seed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from peers import events
from peers.clock import now_s
from peers.stage.recovery import Recovery
from peers.stage.state import StageCore
from peers.storage import checkpoint
from peers.storage.checkpoint_store import CheckpointStore
from peers.transfer.catalog import is_keeper
from peers.transfer.leases import Snapshot
from swarm.errors import SwarmError
from swarm.ids import PeerId, Position
from swarm.protocol.protocol import LOST_S
from swarm.protocol.rollback import Join, furthest, join_by
from swarm.protocol.voice import heard, weight
from swarm.records import PeerRecord

RETRY_S = 0.5
VOICED_S = 30.0
"""How long replicas without voice are not believed while the directory has one with voice, which does not
answer: longer than the records of the dead live."""


async def join(
    core: StageCore, recovery: Recovery, store: CheckpointStore, folder: Path | None, kept: Snapshot | None
) -> None:
    """Get a stage peer its first weights; its steps are open then.

    `folder`: whose checkpoints it starts from, if any. `kept`: the weights of before a pause.
    """
    lost_since: float | None = None
    voiced_until = now_s() + VOICED_S
    if kept is not None:
        await core.load(Position(kept.generation, kept.version), kept.tensors)
        core.remember(kept.last_commit)
    records = await core.directory.lookup_all()
    if await _resume(core, recovery, store, folder, records):
        records = await core.directory.refresh()
    while True:
        seen = await _ask_others(core, records)
        slow = seen.counted and seen.silent and now_s() < voiced_until  # those with voice may yet answer
        by = None if slow else join_by(core.position, seen.counted, seen.run)
        if by is Join.SERVE or (by is Join.DOWNLOAD and await recovery.follow(seen.replicas)):
            break
        if by is Join.LOST:
            if lost_since is None:
                lost_since = now_s()
                core.emit(events.StageLost(stage=core.stage, version=seen.run.version))
            waited_s = now_s() - lost_since
            if waited_s > LOST_S and await recovery.restore(seen.run, waited_s=waited_s):
                break
        await asyncio.sleep(RETRY_S)
        records = await core.directory.refresh()
    await core.open_steps()


class _Seen(NamedTuple):
    """What the other peers say of the run, and of the stage that is joined."""

    run: Position
    replicas: dict[PeerId, Position]
    counted: list[Position]
    """Of the replicas whose word counts."""
    silent: bool
    """Replicas with voice are announced, and none of them answers."""


async def _ask_others(core: StageCore, records: Sequence[PeerRecord]) -> _Seen:
    others = [r for r in records if r.peer != core.me and r.state in ("serving", "joining", "leaving")]
    said = await core.ask(others)
    told = {peer: status.position for peer, status in said.items()}
    there = [r.peer for r in others if r.stage == core.stage and r.state != "joining"]
    replicas = {peer: told[peer] for peer in there if peer in told}
    of_all, voice = core.voices.of_all(), core.voice()
    counting = heard(told, of_all)
    serve = [(told[p], weight(p, of_all)) for p in counting if said[p].state == "serving"]
    run = furthest(serve) if serve and of_all else max((told[p] for p in counting), default=Position())
    counted = [replicas[peer] for peer in heard(replicas, voice)]
    silent = not voice.keys().isdisjoint(there) and voice.keys().isdisjoint(replicas)
    return _Seen(run, replicas, counted, silent)


async def _resume(
    core: StageCore, recovery: Recovery, store: CheckpointStore, folder: Path | None,
    records: Sequence[PeerRecord],
) -> bool:  # fmt: skip
    """Start from a checkpoint of this peer's folder; or, if no peer serves the run, of others'.

    Whether that took a while: `records` are old then.
    """
    step = None
    if folder is not None:
        step = await asyncio.to_thread(checkpoint.newest_common_step, folder, core.run, tell=store.damaged)
        if step is not None and step > core.version:
            saved = checkpoint.Checkpoint(folder, core.run, core.stage, step)
            try:
                await core.load(Position(core.generation, step), await asyncio.to_thread(saved.load))
                _say_resumed(core)
                return True
            except SwarmError as error:  # removed by another peer meanwhile, or its numbers cannot be
                store.damaged(error.text)
    mine = await asyncio.to_thread(store.versions)
    others = await asyncio.to_thread(checkpoint.other_runs, folder, core.run) if folder is not None else ()
    if others and step is None and not mine:
        text = (
            f"{folder} has no checkpoint of run {core.run.id} that could be used, only of "
            f"run {', '.join(others[:3])}: stage {core.stage} starts without one"
        )
        core.emit(events.Trouble(text=text))
    until = now_s() + LOST_S
    while now_s() < until:  # those of other stages come a moment later, with their disks
        if not mine and not any(map(is_keeper, records)):
            return False
        serving = [r for r in records if r.state == "serving" and r.peer != core.me]
        if await core.ask(serving):
            return True
        resumed = await recovery.resume()
        if resumed:
            _say_resumed(core)
        if resumed or resumed is None:
            return True
        await asyncio.sleep(RETRY_S)
        records = await core.directory.lookup_all()
    return True


def _say_resumed(core: StageCore) -> None:
    core.emit(events.Note(text=f"stage {core.stage} resumes from the checkpoint of version {core.version}"))
