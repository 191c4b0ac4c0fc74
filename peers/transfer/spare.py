"""A spare: a peer with which a step would take longer. Whether it is one, and what it holds meanwhile."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from peers.events import Emit, Note
from peers.ports import Directory, Transport
from peers.transfer.catalog import ask_saved
from peers.transfer.client import Partial, download, state_of
from peers.transfer.leases import Snapshot
from peers.voices import Voices
from swarm.errors import SwarmError
from swarm.manifest import Run
from swarm.model.layout import reduce_bytes
from swarm.policy.spares import Exchange, SpareDecision, judge
from swarm.records import PeerRecord

SPARE = "spare"
"""The reason of its pause."""


async def judged(run: Run, directory: Directory, me: PeerRecord) -> SpareDecision | None:
    """What the records that this peer sees now say of it. In a thread: a large run has thousands of them."""
    exchange = Exchange(
        stages=run.S, microbatches=run.M, delayed_updates=run.delayed_updates,
        gradient_share=reduce_bytes(run, me.stage) / max(1, me.state_bytes),
    )  # fmt: skip
    return await asyncio.to_thread(judge, me, list(directory.peers()), exchange)


def words_of(verdict: SpareDecision) -> str:
    """Why a peer is a spare, and what would change that."""
    mbps = float(f"{verdict.upload_bps / 1e6:.3g}") if verdict.upload_bps else None
    enough = " like theirs" if mbps is None else f" of {mbps:,.9g} Mbit/s or more"
    return (
        f"it is a spare: a step would take about {verdict.with_s:.3g} s with it and "
        f"{verdict.without_s:.3g} s without, since all wait for its upload to exchange gradients; one"
        f"{enough} would let it take part. It holds the state of its stage, and serves when no other does"
    )


class Spare(NamedTuple):
    """Of a paused peer: when it is to come back, and the newest saved version until then."""

    run: Run
    record: PeerRecord
    """As it was when it served, as a spare."""
    why: str

    async def is_needed(self, directory: Directory) -> bool:
        """Whether it is to serve: no other peer of its stage does, or a step takes no longer with it."""
        found = await judged(self.run, directory, self.record)
        return found is not None and not found.spare

    async def newest(
        self, kept: Snapshot | None, transport: Transport, directory: Directory, emit: Emit
    ) -> Snapshot | None:
        """A saved version of its stage, if there is one that is newer than what is kept.

        A stage that was lost goes on from a version that all stages have saved; others are of no use.
        """
        stage, run = self.record.stage, self.run
        voice = Voices(run, transport.signer, directory).of(stage)
        found = await ask_saved(run, transport, list(directory.peers()), voice=voice)
        version = max(found.sources[stage], default=-1)
        if version <= (kept.version if kept is not None else -1):
            return None
        try:
            got = await download(
                transport, state_of(run, stage, version, found.signed[stage].get(version, ())),
                found.sources[stage][version], voice=voice, partial=Partial(),
            )  # fmt: skip
        except SwarmError as error:
            emit(Note(text=error.text))
            return None
        return Snapshot(version=version, tensors=got.tensors, generation=got.opened.generation)
