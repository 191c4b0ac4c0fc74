"""Peers that lie, in processes: the fork server of `adversary_processes.py` imports this before it forks.

`SWARM_LIE="sign flip:32"` in the environment of `swarm peer`: from step 32 on it lies so, and prints when it
began and how many microbatches it has answered. Unset, a peer is as honest as any: the product knows of
nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from peers.events import Note
from peers.ports import Answer, Request
from peers.stage import server
from peers.stage.server import StagePeer
from scripts.bench.adversary import ADDED, ANSWERS, SUMS, begin
from swarm.errors import Refused

LIE = "SWARM_LIE"
BEGAN, ANSWERED = "lies from step", "has answered"
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
    liar.actions._transport.limit_upload(TRICKLE_BPS)  # type: ignore[attr-defined]


def send_no_part(liar: StagePeer) -> None:
    _serve(liar, "part", _never)


async def _never(request: Request) -> Answer:
    await request.accept()
    return await asyncio.get_running_loop().create_future()


def _serve(liar: StagePeer, method: str, handler: Callable[..., object]) -> None:
    liar.actions._transport.serve(method, handler, max_body_bytes=1 << 24)  # type: ignore[arg-type]


HOLDING_UP: dict[str, Callable[[StagePeer], None]] = {
    "refuser": refuse,
    "never answers": never_answer,
    "tarpit": trickle,
    "sends no part": send_no_part,
}
LIES = (*ANSWERS, *ADDED, *SUMS, *HOLDING_UP)


class MaybeLying(StagePeer):
    """A peer that lies if its environment says so."""

    async def run(self) -> None:
        name, _, step = os.environ.get(LIE, "").rpartition(":")
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
        told = -1
        while True:
            if self.microbatches.answered != told:
                told = self.microbatches.answered
                self._emit(Note(text=f"{ANSWERED} {told}"))
            await asyncio.sleep(0.05)


server.StagePeer = MaybeLying  # type: ignore[misc]
