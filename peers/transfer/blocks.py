"""Blocks of a run's data between its trainers and keepers: for those that no address has any more.

    block   AskBlock → Ack + the block's bytes

Any peer may give a block, since the index has its Merkle node. Only what is on this machine is given:
nothing is fetched for others. Which peers are asked, in which order: docs/design.md, *Work that is counted*.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from peers.clock import now_s, unix_s
from peers.events import Emit, Trouble
from peers.incoming import Given
from peers.ports import Answer, Directory, Request, Transport
from peers.storage.blocks import Blocks
from peers.transfer.client import FIRST_SHARE
from swarm.errors import BadAnswer, Busy, NotNow, PeerFault, Refused, SetupError, SwarmError, count, short
from swarm.ids import PeerId
from swarm.manifest import Run
from swarm.merkle import block_levels
from swarm.policy.backoff import Backoff
from swarm.policy.timeouts import most_s
from swarm.records import NO_STAGE, PeerRecord
from swarm.wire.messages import Ack, AskBlock, pack, unpack, unpack_answer

MAX_ASKED = 16
"""For one block, one after the other: one that has it not says so in a round trip."""
FIRST_REST_S, LONGEST_REST_S = 5.0, 300.0
"""Backoff of a peer that cannot be reached, or gave wrong bytes."""
MAX_GIVEN, MAX_EACH = 8, 2
"""Blocks in memory that are on their way, to all and to one: 32 MiB."""
EACH_S, AHEAD_S = 0.25, 4.0
"""A caller gets a block so often (134 Mbit/s), and so long ahead at once."""
RETRY_S = 1.0

T = TypeVar("T")


class BlockExchange:
    """Gives blocks of data, and has them asked for."""

    def __init__(
        self,
        run: Run, transport: Transport, directory: Directory, data: Iterable[Blocks], emit: Emit, *,
        gives: bool = True,
    ) -> None:  # fmt: skip
        """`gives`: others may ask here."""
        self._run, self._transport, self._directory, self._emit = run, transport, directory, emit
        self._loop = asyncio.get_running_loop()
        self._backoff = Backoff(first_s=FIRST_REST_S, longest_s=LONGEST_REST_S)
        self._in_vain = Counter[PeerId]()
        """How often each was asked since it gave something: one that is busy for ever is not at fault."""
        self._data = {blocks.tree.root.hex(): blocks for blocks in data}
        """By the root of their tree."""
        self._given = Given(MAX_EACH, MAX_GIVEN)
        self._paid: dict[PeerId, float] = {}
        """Until when the blocks that each caller got are paid for by time."""
        # Threads of the loop may all wait for blocks, some of them for each other's.
        self._reader = ThreadPoolExecutor(1, "blocks")
        for blocks in self._data.values():
            blocks.others = self.ask
        if gives:
            transport.serve("block", self._serve)

    async def announce(self, addresses: tuple[str, ...]) -> None:
        """Let others find this trainer, until this is cancelled."""
        record = PeerRecord(
            peer=self._transport.peer_id, run=self._run.id, stage=NO_STAGE, state="feeding", version=0,
            movable=False, device="disk", addresses=addresses, since=unix_s(),
        )  # fmt: skip
        try:
            await self._directory.announce(record)
            await asyncio.Future()
        finally:
            await self._directory.withdraw()

    # -- asking, in threads -------------------------------------------------------------------------

    def ask(self, blocks: Blocks, number: int) -> tuple[bytes, list[bytes]]:
        """See `peers.storage.blocks.Others`."""
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            raise NotNow("a block of the data went from the cache: it is fetched again")
        node, size, said = blocks.node(number), blocks.size_of(number), dict[PeerId, SwarmError]()
        sources, may_come = self._wait(self._sources(f"{blocks.tree.root.hex()} {number}"))
        for peer in sources:
            try:
                data = self._wait(self._fetch(peer, blocks.tree.root.hex(), number, size))
                if len(data) != size or (levels := block_levels(data))[-1] != node:
                    text = f"gave other bytes as block {number} of the data than the index has"
                    raise BadAnswer(peer, text)
                self._backoff.answered(peer)
                self._in_vain.pop(peer, None)
                return data, levels
            except SwarmError as error:
                said[peer] = error
                self._in_vain[peer] += 1
                may_come |= isinstance(error, NotNow)
                if isinstance(error, PeerFault):
                    self._backoff.failed(peer, now=now_s())
                    may_come |= error.silent  # for as long as its record is there
                if isinstance(error, BadAnswer):
                    self._loop.call_soon_threadsafe(self._emit, Trouble(text=error.text))
        told = [
            error.text if isinstance(error, PeerFault) else f"peer {short(peer)}: {error.text}"
            for peer, error in said.items()
        ]
        text = "; ".join([f"{count(len(said), 'peer')} of the run asked", *told])
        raise NotNow(text, retry_after_s=RETRY_S) if may_come else Refused(text)

    def _wait(self, awaited: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(awaited, self._loop).result()

    async def _sources(self, block: str) -> tuple[list[PeerId], bool]:
        """Peers to ask, trainers that the run names first, then those that were asked in vain least often;
        each asker in an order of its own for each block, so that no source gives all. And whether there are
        others.
        """
        now, me, named = now_s(), self._transport.peer_id, self._run.admission.trainers
        records = self._directory.at(NO_STAGE) or await self._directory.refresh({NO_STAGE})
        feeding = [r.peer for r in records if r.state == "feeding" and (r.peer in named or not named)]
        there = {*feeding, *(r.peer for r in records if r.state == "keeping")} - {me}
        for peer in set(self._in_vain) - there:  # an identity costs nothing
            self._in_vain.pop(peer, None)
        awake = [peer for peer in there if not self._backoff.in_backoff(peer, now=now)]

        def rank(peer: PeerId) -> tuple[bool, int, bytes]:
            own = hashlib.sha256(f"{block} {me} {peer}".encode()).digest()
            return peer not in named, self._in_vain[peer], own

        asked = sorted(awake, key=rank)[:MAX_ASKED]
        return asked, len(asked) < len(there)

    async def _fetch(self, peer: PeerId, root: str, number: int, size: int) -> bytes:
        question = pack(AskBlock(run=self._run.id, root=root, number=number))
        answer = await self._transport.call(
            peer, "block", question, max_answer_bytes=size, deadline_s=self._limit_s(peer, size)
        )
        unpack_answer(peer, answer.header, Ack)
        return b"".join(answer.body)

    def _limit_s(self, peer: PeerId, size: int) -> float:
        """How long a block may take: of a stranger that gave nothing yet longer each time."""
        line = self._transport.lines.get(peer)
        if (line is None or not line.bandwidth_bps) and peer not in self._run.admission.trainers:
            return min(1.0, FIRST_SHARE * 2 ** min(self._in_vain[peer], 9)) * most_s(size)
        return most_s(size, line_bps=line.bandwidth_bps if line else 0.0)

    # -- giving -------------------------------------------------------------------------------------

    async def _serve(self, request: Request) -> Answer:
        asked, peer = unpack(request.header, AskBlock, self._run.id), request.peer
        trainers = self._run.admission.trainers
        if trainers and peer not in trainers:
            raise Refused("only trainers that the run names get its data from others")
        blocks = self._data.get(asked.root)
        size = 0 if blocks is None else blocks.size_of(asked.number)
        if blocks is None or not size:
            raise Refused("this peer has no such data")
        if self._paid.get(peer, 0.0) - now_s() > AHEAD_S:
            raise Busy("you were given other blocks", retry_after_s=RETRY_S)
        self._given.hold(peer, room := np.empty(size, np.uint8))
        try:
            data = await self._loop.run_in_executor(self._reader, blocks.held, asked.number)
        except SetupError as error:
            raise Refused(error.text) from None
        if data is None:
            raise Refused(f"block {asked.number} of the data is not here")
        room[:] = np.frombuffer(data, np.uint8)
        now = now_s()
        self._paid = {caller: until for caller, until in self._paid.items() if until > now}
        self._paid[peer] = max(now, self._paid.get(peer, now)) + EACH_S
        return Answer(pack(Ack()), [room.data])
