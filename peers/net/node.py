"""A peer's place in the network: p2pd, calls and directory, started together and ended together.

daemon = Daemon.spawn(options, identity_path=path)    # at once, before slow imports
async with Node(run_id=run.id, join=addresses, daemon=daemon) as node:
    node.transport.serve(...)
    await node.directory.announce(...)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from peers.clock import now_s
from peers.net import nat
from peers.net.charter.doorkeeper import Doorkeeper
from peers.net.direct.memory import AVAILABLE
from peers.net.direct.paths import DirectOptions
from peers.net.directory import NetDirectory
from peers.net.identity import CIRCUIT, by_peer, endpoint_of, host_part, is_public, with_peer_id
from peers.net.p2pd import Daemon, DaemonOptions
from peers.net.p2pd_control import ControlError, DaemonControl, ShortOfFiles
from peers.net.timings import DEFAULT_TIMINGS, NetTimings
from peers.net.transport import NetTransport
from peers.system import shortage
from peers.waiting import TaskKeeper
from swarm.errors import SetupError, SwarmError, Unreachable
from swarm.ids import PeerId, RunName
from swarm.manifest import Run

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 30.0
STABLE_S = 20.0
"""A p2pd that ran for so long did well: the next death is the first of a row again."""
OBSERVERS = 4
"""Public peers that have to see us at one address before libp2p believes it, and lets holes be punched."""
MAX_RELAYED = 2
"""Relayed addresses that we announce: each makes our record 100 bytes longer."""
MAX_UNANSWERED = 4
"""Probes in a row."""
SEEN_EVERY_S = 60.0
"""Between two questions where we are seen, longer in a large run; ten times as much once that changed."""

_KILLED = "See that nothing kills it (memory, antivirus), and start this program again"
_SHORT = "Mend that, and start this program again"


class Deaths:
    """How long to wait before p2pd is started again, and when not to. Pure: times are given by the caller."""

    def __init__(self, most: int) -> None:
        self._most, self._row, self._began_s = most, 0, float("-inf")

    def pause_s(self, *, now: float) -> float | None:
        """p2pd died, or did not start: wait so long, and start it then; None: give up."""
        if now - self._began_s > STABLE_S:
            self._row = 0
        self._row += 1
        if self._row > self._most:
            return None
        pause_s = 0.0 if self._row == 1 else min(LONGEST_PAUSE_S, 0.25 * 2 ** (self._row - 2))
        self._began_s = now + pause_s
        return pause_s


def direct_options(options: DaemonOptions) -> DirectOptions | None:
    """Where direct connections are taken. A peer that cannot be dialled takes none, but dials others."""
    if not options.direct:
        return None
    host = None if options.reachable is False else host_part(options.host).rpartition("/")[2]
    memory = options.memory and AVAILABLE
    return DirectOptions(host=host, port=options.direct_port, outside=options.outside, memory=memory)


class Node:
    """Use with `async with`. Attributes are there once it is entered."""

    daemon: Daemon
    transport: NetTransport
    directory: NetDirectory
    control: DaemonControl

    def __init__(
        self, *, options: DaemonOptions | None = None, identity_path: Path | None = None,
        join: Sequence[str] = (), run_id: str | None = None, daemon: Daemon | None = None,
        timings: NetTimings = DEFAULT_TIMINGS, charters: Path | None = None,
    ) -> None:  # fmt: skip
        """`join`: addresses of peers to join at, ending in `/p2p/<id>`; none for the first peer of a swarm.

        `run_id`: or `NAME@FINGERPRINT`, which is looked up; it is the id once this is entered. `charters`: a
        folder for the highest charters that were seen.

        `daemon`: one that was spawned before; else `options` and `identity_path` say how to start it. Without
        options it is of a program that asks at a run and is not asked itself.
        A p2pd that ends, or hangs, without being asked to is started again, on the same identity and port:
        calls under way fail with PeerGone, new ones wait. After `timings.revivals` deaths in a row the task
        that entered the node is interrupted, and leaves it with a SetupError.
        """
        self._given, self._options, self._identity_path = daemon, options, identity_path
        self._join = tuple(join)
        self.run_id = run_id
        self.door = Doorkeeper()
        """Decides which peers are admitted; the transport and the directory ask it."""
        self._charters = charters
        self._timings, self._deaths = timings, Deaths(timings.revivals)
        self._reviving: asyncio.Task[None] | None = None
        self._tasks = TaskKeeper()
        self._unanswered = 0
        """Probes in a row that p2pd did not answer."""
        self._relayed_at_s = 0.0
        """When we last had a relay, or needed none."""
        self._asks_at_s, self._moved = 0.0, False
        """When to ask where we are seen, and whether that was elsewhere than where we are announced."""
        self._owner: asyncio.Task[object] | None = None
        self._fatal: SetupError | None = None
        self._started: list[str] = []
        self._listening: tuple[str, ...] = ()

    async def __aenter__(self) -> Node:
        if self._given is None:
            by_peer(self._join)  # what is no peer's address fails here
            options = self._options or DaemonOptions(host=nat.listening_host("", self._join))
            self._given = Daemon.spawn(options, identity_path=self._identity_path)
        self.daemon = self._given
        try:
            self._owner = asyncio.current_task()
            await self._start(self.daemon)
            self._tasks.create_task(self._probe())
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(self, daemon: Daemon) -> None:
        daemon.on_death = self._daemon_died
        await daemon.ready()
        self.control = DaemonControl(daemon.control_path, self._timings.control_s)
        try:
            await self._run_on(daemon, self._timings.relay_s)
            relays = daemon.options.relays
            if not self.addresses:  # another p2pd, that is told only of relays that take us
                relays = await nat.those_that_take_us(daemon.options, relays, self._timings.reserve_s)
                if relays:
                    daemon.close_now()
                    daemon.options = replace(daemon.options, relays=relays)
                    daemon = await self._spawn_again(daemon)
                    await self._run_on(daemon, self._timings.relay_s)
            if not self.addresses:
                raise Unreachable(
                    "nobody can dial this machine, and none of these peers relays for it: "
                    f"{', '.join(daemon.options.relays)}. Forward its port and say so with --announce, or "
                    "join at a peer that relays: those that can be dialled do, but for --no-relay"
                )
            direct = direct_options(daemon.options)
            self.transport = NetTransport(
                self.control, daemon.identity, timings=self._timings, direct=direct, door=self.door
            )
            self._started.append("transport")
            await self.transport.start()
            dial_back = nat.DialBack(self.control, self._relays, self._is_relay, lambda: self.addresses)
            self.transport.serve(nat.METHOD, dial_back.serve)
            await self.control.attach()
            name = RunName.parse(self.run_id) if self.run_id is not None else None
            self.directory = NetDirectory(
                self.control, daemon.identity, self.run_id if name is None else None, join=self._join,
                addresses=self.transport.addresses, timings=self._timings, door=self.door,
                charters=self._charters,
            )  # fmt: skip
            self._started.append("directory")
            await self.directory.start()
            if name is not None:
                self.run_id = await self.directory.find_run(name)
        except ControlError as error:
            advice = _SHORT if isinstance(error, ShortOfFiles) else _KILLED
            raise SetupError(f"p2pd fails right after its start: {error.text}. {advice}") from None

    async def _run_on(self, daemon: Daemon, relay_s: float) -> None:
        """Use this p2pd from now on, once it is known where others reach it."""
        self.daemon, self.control.path = daemon, daemon.control_path
        await self._await_addresses(relay_s)

    def _daemon_died(self) -> None:
        if "transport" in self._started:
            self.transport.daemon_died(for_good=self._timings.revivals == 0)
        if "directory" not in self._started:
            return  # `_start` fails by itself
        # Until another one runs the directory says what it knew, and remembers what to announce.
        self.directory.storage.online = False
        if self._reviving is None or self._reviving.done():
            self._reviving = self._tasks.create_task(self._revive())

    async def _revive(self) -> None:
        """Put a new p2pd in the place of the dead one; again, with pauses, if it dies too."""
        why, advice = "it ended again and again", _KILLED
        while (pause_s := self._deaths.pause_s(now=now_s())) is not None:
            await asyncio.sleep(pause_s)
            try:
                await self._replace_daemon()
            except (SwarmError, OSError) as error:
                short = shortage(error)
                why = error.text if isinstance(error, SwarmError) else short or str(error)
                advice = _SHORT if short or os.strerror(errno.EMFILE) in why else _KILLED
                logger.warning("an attempt to start p2pd again failed: %s", why)
            except Exception as bug:  # the attempts are few, and the last one ends us loudly
                why = f"{type(bug).__name__}: {bug}"
                logger.exception("an attempt to start p2pd again failed")
            if self.daemon.alive and self.directory.storage.online:
                logger.warning("p2pd was started again (pid %s)", self.daemon.pid)
                return
        logger.error("p2pd could not be started again: %s", why)
        self.transport.daemon_died(for_good=True)
        text = f"p2pd, which connects this process to the others, could not be started again: {why}. {advice}"
        self.end(SetupError(text))

    def end(self, why: SetupError) -> None:
        """Interrupt the task that entered this, and have it leave with an error."""
        if self._owner is not None and self._fatal is None:
            self._fatal = why
            self._owner.cancel()

    async def _replace_daemon(self) -> None:
        """A new p2pd, of the same identity and on the same port, for the dead one."""
        dead = self.daemon
        await self.control.detach()
        dead.close_now()  # if it did not start, its identity is still locked
        if self._moved:
            anew, self._moved = replace(dead.options, announce=(), seen_at="", reachable=None), False
            found, words = await nat.settled(anew, self._join, "auto", needed=False)
            logger.warning("this machine is seen at another address: %s", words)
            dead.options = found if found.announce or found.relays else dead.options
        daemon = await self._spawn_again(dead)
        await self._run_on(daemon, self._timings.revival_relay_s)
        await self.transport.daemon_is_back()
        await self.control.attach()
        self.directory.move(self.addresses)
        await self.directory.daemon_is_back()

    async def _spawn_again(self, dead: Daemon) -> Daemon:
        """On the port that it had; on another one if that is taken and the user did not choose it."""
        options, self.daemon = dead.options, dead
        had = [options.port] if options.port else [p.port for p in map(endpoint_of, self._listening) if p]
        chosen = bool(options.port) and not options.any_port
        path, key = dead.identity_path, dead.identity
        for choice in had if chosen else [*had[:1], 0]:
            try:
                there = replace(options, port=choice, any_port=not chosen)
                daemon = self.daemon = Daemon.spawn(there, identity_path=path, identity=key)
                daemon.on_death = self._daemon_died
                await daemon.ready()
            except SetupError as error:
                self.daemon.close_now()
                if chosen or not choice or "already in use" not in error.text:
                    raise
            else:
                return daemon
        raise AssertionError("unreachable")

    async def _probe(self) -> None:
        """A p2pd that lives and answers nothing is as bad as a dead one, and its end is not announced."""
        self._relayed_at_s = now_s()
        while True:
            await asyncio.sleep(self._timings.probe_every_s)
            try:
                await self._probe_once()
            except (SwarmError, OSError) as error:
                logger.warning("a probe of p2pd failed: %s", error)
            except Exception:  # the next probe may do better; without any, a p2pd that hangs goes unnoticed
                logger.exception("a probe of p2pd failed")

    async def _probe_once(self) -> None:
        daemon, reviving = self.daemon, self._reviving
        if not daemon.alive or (reviving is not None and not reviving.done()):
            self._unanswered = 0
            return
        try:
            _, listening = await self.control.identify()
        except ShortOfFiles as error:
            logger.warning("cannot probe p2pd: %s", error.text)
            return
        except ControlError:
            self._unanswered += 1
            if self._unanswered >= MAX_UNANSWERED:
                logger.error("p2pd (pid %s) does not answer any more: it is killed", daemon.pid)
                daemon.kill()
                self._unanswered = 0
            return
        self._unanswered = 0
        now = now_s()
        if (before := daemon.options.seen_at) and now >= self._asks_at_s:
            self._moved = await nat.seen_at(self.transport, self._join, before) != before
            stretch = 10.0 if self._moved else self.directory.reader.stretch
            self._asks_at_s = now + SEEN_EVERY_S * stretch
            if self._moved:  # providers give other addresses, and laptops are carried into other networks
                daemon.kill()
        elif daemon.options.named and not before and now >= self._asks_at_s:
            self._asks_at_s, announce = now + SEEN_EVERY_S, await nat.looked_up(daemon.options)
            if announce != daemon.options.announce:
                logger.warning("the names to announce lead elsewhere now: %s", ", ".join(announce))
                daemon.options = replace(daemon.options, announce=announce)
                daemon.kill()
        elif not daemon.options.relays or any(CIRCUIT in address for address in listening):
            self._relayed_at_s = now
            self._move(listening)
        elif now - self._relayed_at_s > self._timings.relayless_s:
            self._relayed_at_s = now
            await self._take_other_relays(daemon)

    async def _await_addresses(self, relay_s: float) -> None:
        """Ask where p2pd listens. If we cannot be dialled, wait until a relay takes us, at most `relay_s`.

        Where holes can be punched, wait until p2pd is ready for it too.
        """
        relays = self.daemon.options.relays
        began = now_s()
        end = began + relay_s
        punches = len(relays) >= OBSERVERS
        unmet = set(by_peer(relays)) if punches else set()
        ready = end if punches else began
        while True:
            _, self._listening = await self.control.identify()
            if unmet and unmet <= (await self.control.connections()).keys():
                unmet, ready = set(), now_s() + 2 * (now_s() - began) + self._timings.notice_s
            elif unmet and self.addresses:
                ready = min(ready, now_s() + self._timings.observers_s)
            if now_s() > end or (now_s() >= ready and (self.addresses or not relays)):
                break
            await asyncio.sleep(0.1)
        if punches:
            # A hole is punched when a relayed connection is made, then or never. p2pd has made some by
            # itself, for its table of peers, before it could. No call uses them yet.
            for peer, ends in (await self.control.connections()).items():
                if all(CIRCUIT in end for end in ends):
                    with contextlib.suppress(SwarmError):  # it is gone already
                        await self.control.disconnect(peer)

    def _move(self, listening: tuple[str, ...]) -> None:
        """Relays come and go: announce ourselves where we are now."""
        before, self._listening = self.addresses, listening
        if self.addresses != before and self.daemon.options.relays:
            self.directory.move(self.addresses)

    async def _take_other_relays(self, daemon: Daemon) -> None:
        """All of ours are gone. p2pd cannot be told of new ones: another one is started."""
        known = dict.fromkeys([*daemon.options.relays, *self._join, *self._relays()])
        try:
            relays = await nat.relaying(self.transport, self.control, list(known)[: 2 * nat.MAX_TOLD])
            relays = await nat.those_that_take_us(daemon.options, relays, self._timings.reserve_s)
            if not relays or not daemon.alive:
                return
            _, listening = await self.control.identify()
        except (SwarmError, OSError) as error:  # of what they start, as when files or memory are short
            logger.warning("no other relays could be tried: %s", error)
            return
        if any(CIRCUIT in address for address in listening):
            self._move(listening)  # one took us again while we tried others
            return
        logger.warning("no relay has us any more: others are tried")
        daemon.options = replace(daemon.options, relays=relays)
        daemon.kill()

    def _is_relay(self) -> bool:
        return self.daemon.options.be_relay and self.daemon.options.reachable is True

    def _relays(self) -> list[str]:
        """Public addresses of peers that may relay for others, one of each.

        Ours, if it is one, then those that our user named; those that we met come last: identities are free.
        """
        own = self.addresses if self._is_relay() else ()
        met = self.directory.storage.met_addresses() if "directory" in self._started else []
        public = filter(is_public, [*own, *self._join, *met])
        return [f"{places[0]}/p2p/{peer}" for peer, places in by_peer(public).items()]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
        if self._fatal is not None and kind is asyncio.CancelledError:
            getattr(self._owner, "uncancel", lambda: None)()  # from Python 3.11 on
            raise self._fatal from None

    async def close(self) -> None:
        """End p2pd and every task, and remove its directory. Idempotent."""
        started, self._started = self._started, []
        await self._tasks.close()
        try:
            if "transport" in started:
                await self.transport.close()
            if "directory" in started:
                await self.directory.close()
                self.daemon.expect_end()  # with its last lasting client
                await self.control.detach()
        finally:
            self.daemon.close_now()

    async def manifest(self) -> Run:
        """The run, from the directory. Raises SetupError: no node has its manifest."""
        assert self.run_id is not None
        return await self.directory.fetch_manifest(self.run_id)

    # -- id and addresses -----------------------------------------------------------------------

    @property
    def peer_id(self) -> PeerId:
        return self.daemon.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others can join at or dial us: announced ones first, each ending in `/p2p/<id>`.

        If we cannot be dialled, those of the relays only: the others are of a home network like many.
        """
        if self.daemon.options.relays:
            relayed = [address for address in self._listening if CIRCUIT in address]
            return with_peer_id(sorted(relayed)[:MAX_RELAYED], self.peer_id)
        return with_peer_id(self.daemon.options.announce or self._listening, self.peer_id)
