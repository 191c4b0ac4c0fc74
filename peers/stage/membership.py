"""Which peers of a stage to ask, and which replicas of this stage answer just now."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

from peers.clock import now_s
from peers.ports import Directory
from peers.stage.state import StageCore
from peers.status_query import ask_status
from peers.voices import Voices
from swarm.ids import PeerId, Stage
from swarm.protocol.voice import heard
from swarm.records import PeerRecord
from swarm.wire.messages import PeerStatus

MAX_ASKED = 16
MAX_REPLICAS_ASKED = 12
"""Peers that are asked for their status at once, and how many of them are replicas of this stage."""


def others_to_ask(core: StageCore, stage: Stage, directory: Directory, voices: Voices) -> list[PeerId]:
    """Other peers of a stage, with voice if any has it, for each asking peer in another order."""
    now, me = now_s(), core.me
    found = [r.peer for r in directory.at(stage) if r.state in ("serving", "leaving") and r.peer != me]
    awake = [peer for peer in found if not core.backoff.in_backoff(peer, now=now)]
    awake = heard(awake, voices.of(stage))
    return sorted(awake, key=lambda peer: zlib.crc32(f"{me} {peer}".encode()))


def announced(core: StageCore) -> list[PeerRecord]:
    """The records of the other replicas that serve. They outlive their peers, so what counts is asked."""
    return [r for r in core.directory.at(core.stage) if r.state == "serving" and r.peer != core.me]


async def ask(core: StageCore, records: Sequence[PeerRecord]) -> dict[PeerId, PeerStatus]:
    """What those peers say of themselves; of very many, the replicas and the furthest, voices first."""
    voice = core.voices.of_all()
    order = sorted(records, key=lambda r: (r.peer not in voice, -r.version, r.peer))
    asked = [r.peer for r in order if r.stage == core.stage][:MAX_REPLICAS_ASKED]
    asked += [r.peer for r in order if r.stage != core.stage]
    return await ask_status(core.run, core.transport, asked[:MAX_ASKED])


async def keep_stage(core: StageCore, *, going: Collection[PeerId] = (), least: int = 1) -> bool:
    """Whether so many replicas that stay have the weights of this stage (I6). `going`: those that leave too.

    Where this stage has voice, this peer's included, those without it do not say so.
    """
    voice, staying = core.voice(), [one for one in announced(core) if one.peer not in going]
    told = await ask(core, [one for one in staying if one.peer in voice or not voice])
    keeping = [
        replica.state == "serving"
        and replica.generation == core.generation
        and replica.version >= core.version - 1
        for replica in told.values()
    ]
    return sum(keeping) >= least
