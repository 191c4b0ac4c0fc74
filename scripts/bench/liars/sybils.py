"""Many identities of one process, which answer nothing: for `adversary_processes.py`.

"sybils: silent": each is a p2pd of its own, takes every call, and never answers one. "sybils: nobody home":
each is a record, with the address of one port that takes connections and says nothing; 100 of them cost
nothing but records. All claim a fast device and line, to have joined first, and the version of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator
from typing import Any

from peers.clock import unix_s
from peers.events import Note
from peers.net.dht_protocol import Entry
from peers.net.identity import Identity, with_peer_id
from peers.net.p2pd import Daemon, DaemonOptions
from peers.net.p2pd_control import DaemonControl
from peers.net.signed_records import record_keys, seal_record
from peers.net.timings import DEFAULT_TIMINGS
from peers.net.transport import NetTransport
from peers.ports import Answer, Request
from peers.stage.server import StagePeer
from swarm.records import PeerRecord

SYBILS = ("sybils: silent", "sybils: nobody home")
COUNT = "SWARM_SYBILS"
BEGAN, TAKEN = "sybils announce themselves at step", "sybils were called"
"""How their lines begin."""
READY = "sybils are up"
RENEW_S = 12.0
LIFE_S = 30.0
STARTED_AT_A_TIME = 4


class Sybils:
    """The identities that a peer carries, which is none itself."""

    def __init__(self, peer: StagePeer, directory: Any, name: str, step: int) -> None:
        """`directory`: that of the peer's node, through whose p2pd all records are stored."""
        self._run, self._emit, self._directory = peer.core.run, peer.core.emit, directory
        self._silent, self._step = name == SYBILS[0], step
        self._count = int(os.environ.get(COUNT, "100"))
        self._called = 0

    async def run(self, left: asyncio.Event) -> None:
        """Start them, announce them once the run is at a step, and again and again until this is `left`."""
        os.nice(10)  # in life they are another machine's
        async with contextlib.AsyncExitStack() as stack:
            homes = await stack.enter_async_context(self._silent_ones() if self._silent else self._nobodies())
            self._emit(Note(text=READY))
            while (at := self._version()) < self._step and not left.is_set():
                await asyncio.sleep(0.2)
            self._emit(Note(text=f"{BEGAN} {at}"))
            while not left.is_set():
                await self._announce(homes)
                self._emit(Note(text=f"{TAKEN} {self._called} times"))
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(left.wait(), RENEW_S)

    def _version(self) -> int:
        return max((record.version for record in self._directory.peers()), default=0)

    async def _announce(self, homes: dict[Identity, tuple[str, ...]]) -> None:
        version, expires = self._version(), unix_s() + LIFE_S
        for number, (identity, addresses) in enumerate(homes.items()):
            record = PeerRecord(
                peer=identity.peer_id, run=self._run.id, stage=number % self._run.S, state="serving",
                version=version, speed=50.0, bandwidth_bps=1e9, max_inflight=8, movable=False, since=1.0,
                addresses=addresses,
            )  # fmt: skip
            entry = Entry(record.peer, seal_record(record, expires, identity), expires)
            for key in record_keys(record, 0):
                await self._directory.storage.store(key, entry)

    @contextlib.asynccontextmanager
    async def _nobodies(self) -> AsyncIterator[dict[Identity, tuple[str, ...]]]:
        open_ones = list[asyncio.StreamWriter]()

        async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._called += 1
            open_ones.append(writer)

        server = await asyncio.start_server(take, "127.0.0.1", 0)
        address = f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"
        identities = [Identity.generate() for _ in range(self._count)]
        try:
            yield {one: with_peer_id((address,), one.peer_id) for one in identities}
        finally:
            server.close()
            for writer in open_ones:
                writer.transport.abort()

    @contextlib.asynccontextmanager
    async def _silent_ones(self) -> AsyncIterator[dict[Identity, tuple[str, ...]]]:
        daemons, transports = list[Daemon](), list[NetTransport]()

        async def start(daemon: Daemon) -> None:
            await daemon.ready()
            control = DaemonControl(daemon.control_path, DEFAULT_TIMINGS.control_s)
            transports.append(SilentTransport(control, daemon.identity, self._note_call))
            await transports[-1].start()
            await control.attach()

        try:
            left = itertools.repeat(None, self._count)
            while batch := list(itertools.islice(left, STARTED_AT_A_TIME)):
                new = [Daemon.spawn(DaemonOptions(host="127.0.0.1", direct=False)) for _ in batch]
                daemons += new
                await asyncio.gather(*map(start, new))
            yield {one.identity: with_peer_id(one.addresses, one.peer_id) for one in daemons}
        finally:
            for daemon in daemons:
                daemon.expect_end()
            for daemon in daemons:
                daemon.close_now()

    def _note_call(self) -> None:
        self._called += 1


class SilentTransport(NetTransport):
    """Takes every call, and answers none."""

    def __init__(self, control: DaemonControl, identity: Identity, note: Any) -> None:
        super().__init__(control, identity)
        self._note = note

    def _find(self, method: str, body_bytes: int) -> Any:
        self._note()
        return self._never

    async def _never(self, request: Request) -> Answer:
        await request.accept()
        return await asyncio.get_running_loop().create_future()
