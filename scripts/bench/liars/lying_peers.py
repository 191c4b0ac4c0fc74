"""Peers that lie, in processes: the fork server of `adversary_processes.py` imports this before it forks.

`SWARM_LIE="sign flip:32"` in the environment of `swarm peer`: from step 32 on it lies so, and prints when it
began, how many microbatches it has answered, and each step that it takes. Unset, a peer is as honest as any:
the product knows of nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

from peers.events import Note
from peers.ports import Answer, Request
from peers.stage import server
from peers.stage.server import StagePeer
from peers.storage.checkpoint_store import CheckpointStore
from peers.transfer import keeper
from peers.transfer.keeper import CheckpointKeeper
from scripts.bench.liars.adversary import ADDED, ANSWERS, SUMS, begin
from scripts.bench.liars.sybils import SYBILS, Sybils
from swarm.errors import Refused
from swarm.records import PeerRecord

LIE = "SWARM_LIE"
BEGAN, ANSWERED, TOOK = "lies from step", "has answered", "is at version"
"""How the lines of a liar begin."""
TRICKLE_BPS = 2_000.0
"""What a tarpit sends: an answer of 32 kB takes two minutes."""


def refuse(liar: StagePeer) -> None:
    async def refused(request: Request) -> Answer:
        raise Refused("not by me")

    _serve(liar, "work", refused)


def never_answer(liar: StagePeer) -> None:
    """It takes what it is sent, and gives signs of life."""
    _serve(liar, "work", _never)


def trickle(liar: StagePeer) -> None:
    liar.core.transport.limit_upload(TRICKLE_BPS)  # type: ignore[attr-defined]


def send_no_part(liar: StagePeer) -> None:
    _serve(liar, "part", _never)


async def _never(request: Request) -> Answer:
    await request.accept()
    return await asyncio.get_running_loop().create_future()


def _serve(liar: StagePeer, method: str, handler: Callable[..., object]) -> None:
    liar.core.transport.serve(method, handler, max_body_bytes=1 << 24)  # type: ignore[arg-type]


HOLDING_UP: dict[str, Callable[[StagePeer], None]] = {
    "refuser": refuse,
    "never answers": never_answer,
    "tarpit": trickle,
    "sends no part": send_no_part,
}
KEEPER = "keeper"
LIES = (*ANSWERS, *ADDED, *SUMS, *HOLDING_UP)


class MaybeLying(StagePeer):
    """A peer that lies if its environment says so."""

    def __init__(self, *known: Any, **more: Any) -> None:
        super().__init__(*known, **more)
        self._net_directory, self._left = known[4], asyncio.Event()

    def leave(self) -> None:
        self._left.set()
        super().leave()

    async def run(self) -> None:
        name, _, step = os.environ.get(LIE, "").rpartition(":")
        if name in SYBILS:
            await Sybils(self, self._net_directory, name, int(step)).run(self._left)
            return
        lying = asyncio.create_task(self._lie(name, int(step))) if name else None
        try:
            await super().run()
        finally:
            if lying is not None:
                lying.cancel()

    async def _lie(self, name: str, step: int) -> None:
        while self.core.version < step:
            await asyncio.sleep(0.02)
        if name in HOLDING_UP:
            HOLDING_UP[name](self)
        else:
            begin(None, self, name)
        self._emit(Note(text=f"{BEGAN} {self.core.version}"))
        told: dict[str, int] = {}
        while True:
            for what, now in ((ANSWERED, self.microbatches.answered), (TOOK, self.core.version)):
                if told.get(what) != now:
                    told[what] = now
                    self._emit(Note(text=f"{what} {now}"))
            await asyncio.sleep(0.05)


server.StagePeer = MaybeLying


class MaybeLyingKeeper(CheckpointKeeper):
    """A keeper that, if its environment says so, gives out flipped weights from a step on: of each version up
    to the one where the run is.
    """

    async def _announce(self) -> None:
        name, _, step = os.environ.get(LIE, "").rpartition(":")
        newest = max((record.version for record in self._directory.peers()), default=0)
        if name == KEEPER and newest >= int(step) and self.version:
            for store in self._stores.values():
                if not hasattr(store, "false"):
                    make_up(store, self.version, lambda: self._directory.peers())
            self._emit(Note(text=f"{BEGAN} {newest}"))
        await super()._announce()


def make_up(store: CheckpointStore, version: int, records: Callable[[], Sequence[PeerRecord]]) -> None:
    false = {name: -tensor for name, tensor in store.load(version).items()}

    def versions() -> list[int]:
        newest = max((record.version for record in records() if record.stage >= 0), default=version)
        return list(range(max(1, newest - 20), newest + 2))

    store.false = False  # type: ignore[attr-defined]
    store.versions, store.load = versions, lambda at: false  # type: ignore[method-assign]


keeper.CheckpointKeeper = MaybeLyingKeeper
