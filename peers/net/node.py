"""A peer's place in the network: p2pd, calls and directory, started together and ended together.

daemon = Daemon.spawn(options, identity_path=path)    # at once, before slow imports
async with Node(run_id=run.id, join=addresses, daemon=daemon) as node:
    node.transport.serve(...)
    await node.directory.announce(...)
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from peers.net.daemon import Daemon, DaemonOptions, split_peer_id, to_multiaddr, with_peer_id
from peers.net.faults import Faults
from peers.net.identity import Identity
from swarm.errors import SetupError
from swarm.ids import PeerId

if TYPE_CHECKING:  # hivemind is imported while p2pd starts
    from peers.net.control import AttachedP2P, DaemonControl
    from peers.net.directory import NetDirectory
    from peers.net.transport import NetTransport

logger = logging.getLogger(__name__)


class Node:
    """Use with `async with`. Attributes are there once it is entered."""

    transport: NetTransport
    directory: NetDirectory
    control: DaemonControl

    def __init__(
        self,
        *,
        options: DaemonOptions | None = None,
        identity_path: Path | None = None,
        join: Sequence[str] = (),
        run_id: str | None = None,
        daemon: Daemon | None = None,
        silence_s: float | None = None,
        refresh_s: float | None = None,
        faults: Faults | None = None,
        on_death: Callable[[], None] | None = None,
        revivals: int = 3,
    ) -> None:
        """`join`: addresses of peers to join at, ending in `/p2p/<id>`; none for the first peer of a swarm.

        `daemon`: one that was spawned before; else `options` and `identity_path` say how to start it.
        A p2pd that ends although nobody asked it to is started again, `revivals` times at most: calls fail
        with PeerGone meanwhile. `on_death` is called when that does not help.
        """
        self.daemon = daemon
        self._options = options or DaemonOptions()
        self._identity_path = identity_path
        self._join = tuple(join)
        self._run_id = run_id
        self._silence_s, self._refresh_s, self._faults = silence_s, refresh_s, faults
        self._on_death = on_death
        self._revivals = revivals
        self._reviving: asyncio.Task[None] | None = None
        self._p2p: AttachedP2P | None = None
        self._started: list[str] = []
        self._listening: tuple[str, ...] = ()

    async def __aenter__(self) -> Node:
        try:
            for address in self._join:
                split_peer_id(address)
            if self.daemon is None:
                self.daemon = Daemon.spawn(self._options, identity_path=self._identity_path)
            await self._start(self.daemon)
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(self, daemon: Daemon) -> None:
        # p2pd needs 0.15 s to start; importing hivemind's client takes 0.1 s of them.
        from peers.net import links, transport
        from peers.net.control import AttachedP2P, ControlError, DaemonControl
        from peers.net.directory import REFRESH_S, NetDirectory

        daemon.on_death = self._daemon_died
        await daemon.ready()
        self.control = DaemonControl(daemon.control_path)
        try:
            peer_id, self._listening = await self.control.identify()
            assert peer_id == daemon.peer_id
            self.transport = transport.NetTransport(
                self.control,
                peer_id,
                daemon.directory / "streams.sock",
                silence_s=self._silence_s or links.SILENCE_S,
                faults=self._faults,
            )
            self._started.append("transport")
            await self.transport.start()
            self.directory = NetDirectory(
                await self._attach(AttachedP2P, daemon),
                self.control,
                daemon.identity,
                self._run_id,
                join=self._join,
                learn=self.transport.learn,
                refresh_s=self._refresh_s or REFRESH_S,
            )
            self._started.append("directory")
            await self.directory.start()
        except ControlError as error:
            raise SetupError(f"p2pd fails right after its start: {error.text}") from None

    async def _attach(self, kind: type[AttachedP2P], daemon: Daemon) -> AttachedP2P:
        self._p2p = await kind.attach(daemon.control_path, daemon.directory / "client.sock")
        return self._p2p

    def _daemon_died(self) -> None:
        if "transport" in self._started:
            self.transport.daemon_died()
        if self._revivals > 0 and "directory" in self._started:
            self._revivals -= 1
            self._reviving = asyncio.get_running_loop().create_task(self._revive())
        elif self._on_death is not None:
            self._on_death()

    async def _revive(self) -> None:
        """Put a new p2pd, of the same identity and on the same port, in the place of the dead one."""
        from peers.net.control import AttachedP2P, ControlError, DaemonControl

        dead = self.daemon
        assert dead is not None
        try:
            if self._p2p is not None:
                await self._p2p.close()
            port = next((int(a.split("/tcp/")[1].split("/")[0]) for a in self._listening if "/tcp/" in a), 0)
            daemon = self.daemon = Daemon.spawn(
                dataclasses.replace(dead.options, port=dead.options.port or port),
                identity_path=dead.identity_path,
                identity=dead.identity,
            )
            daemon.on_death = self._daemon_died
            await daemon.ready()
            self.control = DaemonControl(daemon.control_path)
            _, self._listening = await self.control.identify()
            await self.transport.daemon_is_back(self.control, daemon.directory / "streams.sock")
            await self.directory.daemon_is_back(await self._attach(AttachedP2P, daemon), self.control)
        except (SetupError, ControlError) as error:
            logger.error("p2pd could not be started again: %s", error.text)
            if self._on_death is not None:
                self._on_death()
        else:
            logger.warning("p2pd was started again (pid %s)", daemon.pid)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End p2pd and every task, and remove its directory. Idempotent."""
        started, self._started = self._started, []
        if self._reviving is not None:
            self._reviving.cancel()
            await asyncio.gather(self._reviving, return_exceptions=True)
        try:
            if "transport" in started:
                await self.transport.close()
            if "directory" in started:
                await self.directory.close()
            if self._p2p is not None:
                p2p, self._p2p = self._p2p, None
                assert self.daemon is not None
                self.daemon.expect_end()
                await p2p.close()
        finally:
            if self.daemon is not None:
                self.daemon.close_now()

    # -- who and where --------------------------------------------------------------------------

    @property
    def peer_id(self) -> PeerId:
        assert self.daemon is not None
        return self.daemon.peer_id

    @property
    def identity(self) -> Identity:
        assert self.daemon is not None
        return self.daemon.identity

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others can join at or dial us: announced ones first, each ending in `/p2p/<id>`."""
        assert self.daemon is not None
        announced = tuple(to_multiaddr(address) for address in self.daemon.options.announce)
        return with_peer_id(announced or self._listening, self.peer_id)

    async def current_addresses(self) -> tuple[str, ...]:
        """`addresses` as p2pd sees them now: relays and mapped ports may have come since the start."""
        _, self._listening = await self.control.identify()
        return self.addresses

    # -- diagnostics ----------------------------------------------------------------------------

    async def peer_count(self) -> int:
        """How many peers p2pd is connected to."""
        return await self.control.peer_count()

    @property
    def p2pd_pid(self) -> int | None:
        """Of the p2pd process, for diagnostics and for tests that kill it."""
        return self.daemon.pid if self.daemon is not None else None

    @property
    def socket_dir(self) -> Path | None:
        """The private directory of p2pd's sockets; gone after `close`."""
        return self.daemon.directory if self.daemon is not None else None

    @property
    def alive(self) -> bool:
        """Whether p2pd runs."""
        return self.daemon is not None and self.daemon.alive


def own_address(towards: str = "192.0.2.1") -> str:
    """The address of this machine on the interface that leads to `towards`; sends nothing."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect((towards, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
