"""Calls between peers over kept-open libp2p streams. Fulfils `peers.ports.Transport`.

One stream per (caller, callee) pair, opened by the caller at its first call and shared by all later
ones; `connection` has what happens on it. Here: dialling, serving, and which peer may have how much.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice

from peers.clock import now_s
from peers.net.bandwidth import CALLS_PER_S, SMALL_BYTES, Allowance, Line, Traffic
from peers.net.body_buffers import flat
from peers.net.charter.doorkeeper import SHOW_METHOD, Doorkeeper
from peers.net.connection import ClientConnection, Connection, ServedCall, ServerConnection
from peers.net.direct.paths import METHOD as DIRECT_METHOD
from peers.net.direct.paths import DirectOptions, DirectPaths
from peers.net.identity import CIRCUIT, AddressBook, Identity, endpoint_of
from peers.net.p2pd import most_connections
from peers.net.p2pd_control import ControlError, DaemonControl, check_response, stream_peer
from peers.net.timings import DEFAULT_TIMINGS, NetTimings
from peers.ports import Answer, Buffer, Handler
from peers.waiting import TaskKeeper, happens, within
from swarm.charter import READS
from swarm.errors import (
    BadAnswer,
    Busy,
    Leaving,
    NotAdmitted,
    PeerFault,
    PeerGone,
    PeerSilent,
    Refused,
    SwarmError,
    short,
)
from swarm.ids import PeerId
from swarm.policy.backoff import Backoff
from swarm.wire import frames

logger = logging.getLogger(__name__)

PROTOCOL = "/swarm/calls/1"
MAX_LINKS = 2048
"""Streams from callers, all together: 0.2 kB each while idle, and a file descriptor."""
MAX_LINKS_PER_PEER = 3
"""A caller needs one, another while calls move to a better path, a third when it redials a broken one."""
SEEN_FOR_ROOM = 8
"""Streams of which one makes room: to look at all for each that comes would take half a millisecond."""
STUCK_S = 5.0
"""Whose stream takes nothing for so long makes way: the slowest line takes a chunk of a body in 4 s."""
MAX_WAITING_BYTES = 256 * 1024
"""Of frames that a stream does not take, beyond which strangers are told nothing more: half a GB on all."""
MAX_HANDLERS_PER_PEER = frames.MAX_PENDING
_FLUSH_S = 1.0
_LOG_EVERY_S, _MOST_LOGGED = 60.0, 10.0


class Dialer:
    """The streams to peers that we call: one each, opened when it is needed, on the best path there is."""

    def __init__(
        self, control: DaemonControl, timings: NetTimings, traffic: Traffic, tasks: TaskKeeper,
        door: Doorkeeper,
    ) -> None:  # fmt: skip
        self.control, self.addresses = control, AddressBook()
        self.closed = ""
        """Why no stream can be opened."""
        self.links: dict[PeerId, ClientConnection] = {}
        self.bypassed: set[ClientConnection] = set()
        """Streams that finish what was begun on them: there is a better path now."""
        self.direct: DirectPaths | None = None
        """Beside p2pd, if that is wanted."""
        self._timings, self._traffic, self._tasks, self._door = timings, traffic, tasks, door
        self._dials: dict[PeerId, asyncio.Task[ClientConnection]] = {}
        self._shortens: dict[PeerId, asyncio.Task[None]] = {}
        """A direct connection is looked for."""
        self._no_direct = Backoff(first_s=timings.direct_again_s, longest_s=timings.direct_again_most_s)
        """A direct connection was looked for in vain, or broke: what stands between may stay."""
        self._back = asyncio.Event()
        """Our p2pd runs, or never will again."""
        self._back.set()

    def pause(self, why: str, *, for_good: bool) -> None:
        """Open nothing from now on. Calls wait for `resume`, unless it is `for_good`."""
        self.closed = why
        self._back.clear()
        if for_good:
            self._back.set()

    def resume(self) -> None:
        """A new p2pd took the place of the one that died."""
        self.closed = ""
        self._back.set()

    async def link_to(self, peer: PeerId, body_bytes: int = 0) -> ClientConnection:
        """The stream to a peer, a new one if need be; concurrent calls share the attempt. Raises PeerGone.

        A body waits while a path past both p2pds is looked for: nothing passes what p2pd has queued, so on a
        slow line the question for that path would come too late, behind the first bodies.
        """
        link = self.links.get(peer)
        if link is None or not link.usable:
            link = await self._opened(peer)
        self._shorten(link, body_bytes)
        if body_bytes > SMALL_BYTES and peer in self._shortens:
            await asyncio.wait({self._shortens[peer]}, timeout=self._timings.direct_s)
            link = self.links.get(peer, link)
            if link.lost_because is not None:
                raise link.lost_because
        return link

    async def _opened(self, peer: PeerId) -> ClientConnection:
        """A new stream, or that which is being opened. Raises PeerGone."""
        if not await happens(self._back, self._timings.revival_s) or self.closed:
            raise PeerGone(peer, f"cannot be reached: {self.closed}")
        dial = self._dials.get(peer)
        if dial is None:
            dial = self._dials[peer] = self._tasks.create_task(self._open(peer))
            dial.add_done_callback(lambda done: self._dialled(peer, done))
        return await asyncio.shield(dial)

    def _dialled(self, peer: PeerId, dial: asyncio.Task[ClientConnection]) -> None:
        del self._dials[peer]
        if not dial.cancelled() and dial.exception() is None and not self.closed:
            self.links[peer] = dial.result()
            if dial.result().relayed:
                self._tasks.create_task(self._bypass(dial.result()))

    def _shorten(self, link: ClientConnection, body_bytes: int) -> None:
        """Look for a path past both p2pds, if the pair moves enough for that, and not again at once."""
        now, line = now_s(), link.line
        if self.direct is None or link.direct or self._no_direct.in_backoff(link.peer, now=now):
            return
        if line.sent_bytes + line.received_bytes + body_bytes >= self.direct.options.after_bytes:
            self._no_direct.failed(link.peer, now=now)  # until it is there
            task = self._shortens[link.peer] = self._tasks.create_task(self._take_direct(link, self.direct))
            task.add_done_callback(lambda _: self._shortens.pop(link.peer))

    async def _take_direct(self, link: ClientConnection, direct: DirectPaths) -> None:
        peer = link.peer
        try:
            endpoints = map(endpoint_of, (await self.control.connections(peer)).get(peer, ()))
            hosts = dict.fromkeys(end.host for end in endpoints if end is not None and end.ip)
            better = await direct.dial(link, list(hosts))
            better.closed.add_done_callback(lambda _: self._drop(better))
            try:
                await self._introduce(better, now_s() + self._timings.direct_s)
            except BaseException:
                better.fail(PeerGone(peer, "could not show what admits us"))
                raise
            self._no_direct.answered(peer)
            self._move(link, better, self._timings.punched_after_s[0])
        except (SwarmError, OSError, asyncio.TimeoutError) as error:
            logger.debug("no direct connection to peer %s: %s", short(peer), error)

    def _move(self, link: ClientConnection, better: ClientConnection, pause_s: float) -> None:
        """Make new calls on the better one, and end the other with its last call."""
        peer = link.peer
        if self.links.get(peer) is not link or self.closed:
            better.fail(PeerGone(peer, "another link was opened meanwhile"))
            return
        self.links[peer] = better
        self.bypassed.add(link)
        link.closed.add_done_callback(lambda _: self.bypassed.discard(link))
        self._tasks.create_task(self._outlast(link, pause_s))

    async def _outlast(self, link: ClientConnection, pause_s: float) -> None:
        """End a stream with its last call."""
        while link.pending:
            await asyncio.sleep(pause_s)
        link.fail(PeerGone(link.peer, "a direct path was found"))

    async def _bypass(self, relayed: ClientConnection) -> None:
        """Leave the relay when libp2p has punched a hole: a stream stays on the path it was opened on."""
        peer = relayed.peer
        with contextlib.suppress(ControlError, PeerFault):
            for pause_s in self._timings.punched_after_s:
                await asyncio.sleep(pause_s)
                if self.links.get(peer) is not relayed:
                    return
                if await self.control.is_direct(peer):
                    self._move(relayed, await self._open(peer), pause_s)
                    return

    async def _open(self, peer: PeerId) -> ClientConnection:
        link: ClientConnection | None = None
        dial_s, addresses = self._timings.dial_s, self.addresses.of(peer)
        deadline = now_s() + dial_s
        try:
            if addresses:
                await self.control.connect(peer, addresses, dial_s)
            hidden = any(CIRCUIT in address for address in addresses)
            relayed = hidden and not await self.control.is_direct(peer)
            link = await self.control.open_stream(
                lambda request: ClientConnection(peer, request, self._timings), peer, PROTOCOL
            )
            assert link is not None
            link.line, link.relayed = self._traffic.of(peer), relayed
            check_response(await within(link.opened, deadline - now_s()))
            await self._introduce(link, deadline)
        except BaseException as error:
            fault = error if isinstance(error, PeerFault) else PeerGone(peer, "the call was given up")
            if isinstance(error, asyncio.TimeoutError):
                self._hang_up(peer)
                fault = PeerGone(peer, f"cannot be reached: no connection within {dial_s:g} s")
            elif isinstance(error, ControlError):
                fault = PeerGone(peer, f"cannot be reached: {self.closed or error.text}")
            if link is not None:
                link.fail(fault)
            if isinstance(error, ControlError | asyncio.TimeoutError):
                raise fault from None
            raise
        opened = link
        link.closed.add_done_callback(lambda _: self._drop(opened))
        return link

    async def _introduce(self, link: ClientConnection, deadline: float) -> None:
        """Show what admits us, if we have to."""
        if credential := self._door.credential:
            with contextlib.suppress(Refused):  # what it is for is refused too, and says why
                left_s = deadline - now_s()
                await within(link.call(SHOW_METHOD, credential, (), 0), left_s)

    def _drop(self, link: ClientConnection) -> None:
        if self.links.get(link.peer) is link:
            del self.links[link.peer]
        if link.direct:
            self._no_direct.failed(link.peer, now=now_s())
        if isinstance(link.lost_because, PeerSilent):
            self._hang_up(link.peer)

    def _hang_up(self, peer: PeerId) -> None:
        """Have the next dial make a new connection.

        On the one that fell silent TCP sends again ever more rarely: 30 s after a cut of 30 s has healed.
        """
        if not self.closed:
            self._tasks.create_task(self.control.disconnect(peer))


class NetTransport:
    """Calls over the p2pd of `control`."""

    def __init__(
        self, control: DaemonControl, signer: Identity, *, timings: NetTimings = DEFAULT_TIMINGS,
        direct: DirectOptions | None = None, door: Doorkeeper | None = None,
    ) -> None:  # fmt: skip
        """`direct`: None: all passes p2pd. `door`: which peers may call and be called; None: all."""
        self.signer, self.peer_id = signer, signer.peer_id
        self.on_gone: Callable[[PeerId], None] | None = None
        """Told when the last stream that a peer had opened to us ended: it died, or left."""
        self.door = door or Doorkeeper()
        self.refusal, self.invited = self.door.refusal, self.door.invited
        self.door.on_change.append(self.drop_refused)
        self._timings = timings
        self.lines = Traffic(most_peers=MAX_LINKS)
        """See `peers.ports.Transport`."""
        self._tasks = TaskKeeper()
        self._most_links = min(MAX_LINKS, most_connections())
        self._dialer = Dialer(control, timings, self.lines, self._tasks, self.door)
        self.addresses = self._dialer.addresses
        if direct is not None:
            self._dialer.direct = DirectPaths(signer, direct, timings, self._make_callee)
        self._methods: dict[str, tuple[Handler, int]] = {SHOW_METHOD: (self.door.serve_show, 0)}
        self._logs_from = defaultdict[str, float](float)
        """When a failure of each method's handler may be logged: a stranger may have one fail without end."""
        self._says = Allowance(_MOST_LOGGED / _LOG_EVERY_S, _MOST_LOGGED)
        """Of peers that do what they may not."""
        self._callers: dict[PeerId, list[ServerConnection]] = defaultdict(list)
        self._incoming: dict[ServerConnection, None] = {}
        self._server: asyncio.AbstractServer | None = None

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to take incoming streams. Raises SetupError: the port for direct ones cannot be had."""
        loop = asyncio.get_running_loop()
        if self._dialer.direct is not None:
            self._dialer.direct.listen()
            self.serve(DIRECT_METHOD, self._dialer.direct.grant)
        self._server = await loop.create_unix_server(
            self._make_callee, str(self._dialer.control.streams_path)
        )
        await self._dialer.control.serve_streams(PROTOCOL)

    async def close(self) -> None:
        """Stop serving, let written answers arrive, end everything else. Pending calls get PeerGone."""
        self._dialer.pause("we are closing", for_good=True)
        if self._server is not None:
            self._server.close()
        if self._dialer.direct is not None:
            await self._dialer.direct.close()
        await self._tasks.close()
        links = self._open_links()
        for link in self._incoming:
            link.finish()
        if self._incoming:
            await asyncio.wait([link.closed for link in self._incoming], timeout=_FLUSH_S)
        for link in links:
            link.fail(PeerGone(link.peer, self._dialer.closed))
            await link.closed
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

    def daemon_died(self, *, for_good: bool) -> None:
        """Our p2pd ended: every stream is broken. New calls wait for another one, unless it is `for_good`."""
        self._dialer.pause("our own p2pd ended", for_good=for_good)
        for served in self._incoming:
            served.excuse()
        for link in self._open_links():
            link.fail(PeerGone(link.peer, self._dialer.closed))

    async def daemon_is_back(self) -> None:
        """A new p2pd took the place of the one that died. Methods and addresses stay as they were."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        await self.start()
        self._dialer.resume()

    def limit_upload(self, most_bps: float) -> None:
        """Send no more than so many bits a second, over all links from now on."""
        self.lines.limiter.keep_to(most_bps)

    def drop_refused(self) -> None:
        """Close the streams of peers that are refused now."""
        for link in self._open_links():
            if why := self.refusal(link.peer, "", isinstance(link, ServerConnection)):
                link.fail(PeerGone(link.peer, why))
                self._tasks.create_task(self._dialer.control.disconnect(link.peer))

    def _open_links(self) -> list[Connection]:
        return [*self._dialer.links.values(), *self._dialer.bypassed, *self._incoming]

    # -- calling --------------------------------------------------------------------------------

    async def call(
        self, peer: PeerId, method: str, header: bytes, body: Sequence[Buffer] = (), *,
        max_answer_bytes: int = 0, deadline_s: float | None = None,
    ) -> Answer:  # fmt: skip
        """See `peers.ports.Transport.call`. The buffers must not change until this returns."""
        if why := self.refusal(peer, method, False):
            raise PeerGone(peer, why)
        views = [flat(part) for part in body]

        async def running() -> Answer:
            link = await self._dialer.link_to(peer, sum(view.nbytes for view in views))
            return await link.call(method, header, views, max_answer_bytes)

        if deadline_s is None:
            return await running()
        try:
            return await within(running(), deadline_s)
        except asyncio.TimeoutError:
            raise PeerSilent(peer, f"no answer to {method!r} within {deadline_s:.4g} s") from None

    # -- serving --------------------------------------------------------------------------------

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int = 0) -> None:
        """See `peers.ports.Transport.serve`."""
        self._methods[method] = (handler, max_body_bytes)

    def _make_callee(self, peer: PeerId = "") -> ServerConnection:
        """Our end of a stream of this peer, or of that which p2pd names when it opens the stream."""

        def met(link: ServerConnection, message: bytes) -> tuple[PeerId, Line]:
            return self._met(link, peer or stream_peer(message))

        link = ServerConnection(met, self._called, self._timings)
        link.on_rest = self._slowed
        self._incoming[link] = None
        link.closed.add_done_callback(lambda _: self._caller_left(link))
        return link

    def _met(self, link: ServerConnection, peer: PeerId) -> tuple[PeerId, Line]:
        links = self._callers[peer]
        links.append(link)
        if len(links) > MAX_LINKS_PER_PEER:
            self._end(links[0])  # now, not when it has ended: any number may come before that
        if why := self._dialer.closed or self.refusal(peer, "", True):
            link.fail(PeerGone(peer, why))
        elif len(self._incoming) > self._most_links:
            self._make_room(link)
        return peer, self.lines.of(peer)

    def _make_room(self, newest: ServerConnection) -> None:
        """Of the next few streams end the longest silent one, of a stranger without calls if there is any."""
        few = self._next_few(newest)
        self._end(min(few, key=lambda one: (self.invited(one.peer), one.busy, one.last_byte_at)))

    def _next_few(self, newest: ServerConnection) -> list[ServerConnection]:
        """Some streams, others each time."""
        few = list(islice((link for link in self._incoming if link is not newest), SEEN_FOR_ROOM))
        for link in few:  # to the end
            self._incoming[link] = self._incoming.pop(link)
        return few

    def _end(self, least: ServerConnection) -> None:
        """End a stream for others. Its caller lives, and opens another when it has to."""
        del self._incoming[least]
        self._forget_caller(least)
        least.fail(PeerGone(least.peer, "others need its place"))

    def _require_room(self, link: ServerConnection, size: int) -> None:
        """Have room for an answer that strangers may ask for: of the next few streams one that takes nothing
        is ended for it, of a stranger if there is one. Raises Busy: there is none, or not for this caller.
        """
        now, line = asyncio.get_running_loop().time(), link.line
        if link.waiting_bytes > MAX_WAITING_BYTES:
            raise Busy("you have not read what you were told", retry_after_s=1.0)
        if not size:
            return
        rests = line.rests(now=now) and not self.invited(link.peer)
        if not (rests or line.unread_bytes or line.may_be_given(size)):
            few = [one for one in self._next_few(link) if one.stuck_s(now) >= STUCK_S]
            for stuck in sorted(few, key=lambda one: (self.invited(one.peer), -one.stuck_s(now)))[:1]:
                self._end(stuck)
        if rests or not line.may_be_given(size):
            raise Busy("others, or you, have not read what they were given", retry_after_s=1.0)

    def _forget_caller(self, link: ServerConnection) -> bool:
        """Whether a stream was the last one of its caller."""
        links = self._callers.get(link.peer, [])
        if link not in links:
            return False
        links.remove(link)
        if not links:
            del self._callers[link.peer]
        return not links

    def _caller_left(self, link: ServerConnection) -> None:
        self._incoming.pop(link, None)
        if self._forget_caller(link) and self.on_gone is not None and not self._dialer.closed:
            self.on_gone(link.peer)
        if isinstance(link.lost_because, BadAnswer):
            self._log_abuse(link, f"closed a stream that broke the protocol: {link.lost_because.text}")

    def _slowed(self, link: Connection) -> None:
        why = "all that do no work say more than they may together"
        if link.line.owes(now=asyncio.get_running_loop().time()):
            why = f"it sends more than {CALLS_PER_S:g} calls, or 1 MB of headers, a second"
        self._log_abuse(link, f"peer {short(link.peer)} is slowed down: {why}")

    def _log_abuse(self, link: Connection, text: str) -> None:
        """Once a minute for each peer, and ten times for all, so that strangers cannot fill the log."""
        now = now_s()
        if now - link.line.logged_at >= _LOG_EVERY_S and self._says.take_if_there(1.0, now=now):
            link.line.logged_at = now
            logger.warning("%s", text)

    def _called(self, link: ServerConnection, served: ServedCall) -> None:
        """A CALL arrived: start its handler. Raises Refused, Leaving or Busy."""
        if why := self.refusal(link.peer, served.method, True):
            raise NotAdmitted(why)
        (handler, limit), size = self._methods.get(served.method, (None, 0)), sum(served.body_sizes)
        if handler is None:
            raise Refused(f"no such method: {served.method!r}")
        if size > limit:
            raise Refused(f"a body of {size} bytes; {served.method!r} takes {limit}")
        if self._dialer.closed:
            raise Leaving(self._dialer.closed)
        if link.line.handling >= MAX_HANDLERS_PER_PEER:
            raise Busy(f"{MAX_HANDLERS_PER_PEER} calls of yours are being worked on")
        if not link.line.may_have_done(len(served.header)):
            raise Busy("calls of yours with too long headers are being worked on")
        link.line.handling += 1
        link.line.holds(len(served.header))
        self._tasks.create_task(self._serve(link, served, handler))

    async def _serve(self, link: ServerConnection, served: ServedCall, handler: Handler) -> None:
        """Run the handler and send what becomes of it. Goes on when the caller is gone: the work counts.

        A handler's bug ends its call, not the peer: the caller hears of it.
        """
        try:
            answer = await handler(served)
            body, to_strangers = [flat(part) for part in answer.body], served.method in READS
            if to_strangers and link.awaits(served):
                self._require_room(link, sum(part.nbytes for part in body))
            link.answer(served, answer.header, body, to_strangers=to_strangers)
        except SwarmError as refusal:
            link.answer_error(served, refusal)
        except Exception as bug:
            if now_s() >= self._logs_from[served.method]:
                self._logs_from[served.method] = now_s() + _LOG_EVERY_S
                logger.exception("the handler of %r failed for peer %s", served.method, short(served.peer))
            link.answer_error(served, Refused(f"internal error: {type(bug).__name__}: {bug}"[:500]))
        finally:
            link.line.handling -= 1
            link.line.holds(-len(served.header))
