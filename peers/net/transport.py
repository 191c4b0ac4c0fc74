"""Calls between peers over kept-open libp2p streams. Fulfils `peers.ports.Transport`.

One stream per (caller, callee) pair, opened by the caller at its first call and shared by all later
ones; `links` has what happens on it. Here: dialling, serving, and who may have how much.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from peers.net.bandwidth import BandwidthEstimator
from peers.net.body_buffers import flat
from peers.net.connection import DEFAULT_TIMINGS, ClientConnection, ServedCall, ServerConnection
from peers.net.connection_state import LinkTimings
from peers.net.fault_injection import Faults
from peers.net.p2pd import CIRCUIT
from peers.net.p2pd_control import ControlError, DaemonControl, check_response, stream_peer
from peers.net.rate_limit import RateLimiter
from peers.ports import Answer, Buffer, Handler, NetworkPath
from peers.waiting import happens, within
from swarm.errors import (
    BadAnswer,
    Busy,
    PeerFault,
    PeerGone,
    PeerSilent,
    Refused,
    SwarmError,
    from_wire,
    short,
)
from swarm.ids import PeerId
from swarm.wire import frames

logger = logging.getLogger(__name__)

PROTOCOL = "/swarm/calls/1"
DIAL_S = 4.0
"""For connecting and opening a stream; a round trip around the world takes 0.3 s, and TLS some of them.
Who is cut off should not be noticed later than by silence."""
REVIVAL_S = 10.0
"""How long a call waits for our own p2pd to be started again; that takes 0.3 s. Nobody else is to blame."""
MAX_LINKS = 2048
"""Streams from callers, all together: 0.2 kB each while idle, and a file descriptor."""
MAX_LINKS_PER_PEER = 2
"""A caller needs one; it may redial before we notice that its first one broke."""
MAX_HANDLERS_PER_PEER = frames.MAX_PENDING
PUNCH_LOOKS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""When to look, each time after the last, whether libp2p has found a direct way besides a relayed one."""
_FLUSH_S = 1.0
_LOG_EVERY_S = 60.0


class _LocalCall:
    """A call of a peer to itself. Fulfils `peers.ports.Request`."""

    def __init__(self, peer: PeerId, header: bytes, body: Sequence[memoryview]) -> None:
        self.peer, self.header = peer, header
        self.body_sizes: Sequence[int] = [part.nbytes for part in body]
        self._body = body

    async def accept(self) -> list[memoryview]:
        return [memoryview(bytearray(part)) for part in self._body]


class NetTransport:
    """Calls over the p2pd that listens at `control_path`; incoming streams come to `streams_path`."""

    def __init__(
        self,
        control: DaemonControl,
        peer_id: PeerId,
        streams_path: Path,
        *,
        timings: LinkTimings = DEFAULT_TIMINGS,
        dial_s: float = DIAL_S,
        faults: Faults | None = None,
    ) -> None:
        self.peer_id = peer_id
        self.calls: Counter[str] = Counter()
        """How often each method of ours was called."""
        self._control, self._streams_path = control, streams_path
        self._timings, self._dial_s, self._faults = timings, dial_s, faults
        self._methods: dict[str, tuple[Handler, int]] = {}
        self._addresses: dict[PeerId, tuple[str, ...]] = {}
        self._links: dict[PeerId, ClientConnection] = {}
        self._dials: dict[PeerId, asyncio.Task[ClientConnection]] = {}
        self._callers: dict[PeerId, list[ServerConnection]] = defaultdict(list)
        self._incoming: set[ServerConnection] = set()
        self._handlers: set[asyncio.Task[None]] = set()
        self._handling: Counter[PeerId] = Counter()
        self._locals: set[asyncio.Task[Answer]] = set()
        self._hanging_up: set[asyncio.Task[None]] = set()
        self._straightening: set[asyncio.Task[None]] = set()
        self._bypassed: set[ClientConnection] = set()
        """Relayed streams that finish what was begun on them."""
        self._server: asyncio.AbstractServer | None = None
        self._sent: Counter[PeerId] = Counter()
        self.on_gone: Callable[[PeerId], None] | None = None
        """Told when the last stream that a peer had opened to us ended: it died, or left."""
        self._received: Counter[PeerId] = Counter()
        self._estimators: dict[PeerId, BandwidthEstimator] = {}
        self._limiter: RateLimiter | None = None
        self._logged: dict[PeerId, float] = {}
        self._closed: str = ""
        self._back = asyncio.Event()
        """Our p2pd runs, or never will again."""
        self._back.set()

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to take incoming streams."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._make_callee, str(self._streams_path))
        await self._control.serve_streams(PROTOCOL, self._streams_path)

    async def close(self) -> None:
        """Stop serving, let written answers arrive, end everything else. Pending calls get PeerGone."""
        self._closed = "we are closing"
        self._back.set()
        if self._server is not None:
            self._server.close()
        await _cancel([*self._dials.values(), *self._handlers, *self._locals, *self._straightening])
        outgoing = [*self._links.values(), *self._bypassed]
        for link in outgoing:
            link.fail(PeerGone(link.peer, self._closed))
        incoming = list(self._incoming)
        for link in incoming:
            link.finish()
        if incoming:
            await asyncio.wait([link.closed for link in incoming], timeout=_FLUSH_S)
        for link in incoming:
            link.fail(PeerGone(link.peer, self._closed))
        for link in [*incoming, *outgoing]:
            await link.closed
        await _cancel(self._hanging_up)
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

    def daemon_died(self, *, for_good: bool) -> None:
        """Our p2pd ended: every stream is broken. New calls wait for another one, unless it is `for_good`."""
        self._closed = "our own p2pd ended"
        self._back.clear()
        if for_good:
            self._back.set()
        for link in [*self._links.values(), *self._bypassed, *self._incoming]:
            link.fail(PeerGone(link.peer, self._closed))

    async def daemon_is_back(self, control: DaemonControl, streams_path: Path) -> None:
        """A new p2pd took the place of the one that died. Methods and addresses stay as they were."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        self._control, self._streams_path, self._closed = control, streams_path, ""
        await self.start()
        self._back.set()

    def limit_upload(self, most_bps: float) -> None:
        """Send no more than so many bits a second, over all links from now on."""
        self._limiter = RateLimiter(most_bps)
        for link in [*self._links.values(), *self._incoming]:
            link.state.limiter = self._limiter

    # -- calling --------------------------------------------------------------------------------

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Where to dial the peer from now on (multiaddrs, with or without `/p2p/...`)."""
        self._addresses[peer] = tuple(addresses)

    async def call(
        self,
        peer: PeerId,
        method: str,
        header: bytes,
        body: Sequence[Buffer] = (),
        *,
        max_answer_bytes: int = 0,
        deadline_s: float | None = None,
    ) -> Answer:
        """See `peers.ports.Transport.call`. The buffers must not change until this returns."""
        views = [flat(part) for part in body]
        if peer == self.peer_id:
            running = self._call_locally(method, header, views, max_answer_bytes)
        else:
            running = self._call_remotely(peer, method, header, views, max_answer_bytes)
        if deadline_s is None:
            return await running
        try:
            return await within(running, deadline_s)
        except asyncio.TimeoutError:
            raise PeerSilent(peer, f"no answer to {method!r} within {deadline_s:g} s") from None

    async def _call_remotely(
        self, peer: PeerId, method: str, header: bytes, body: Sequence[memoryview], max_answer_bytes: int
    ) -> Answer:
        link = self._links.get(peer)
        if link is None or not link.state.usable:
            link = await self._dial(peer)
        return await link.call(method, header, body, max_answer_bytes)

    async def _dial(self, peer: PeerId) -> ClientConnection:
        """A new link; concurrent calls share the attempt."""
        if not await happens(self._back, REVIVAL_S) or self._closed:
            raise PeerGone(peer, f"cannot be reached: {self._closed}")
        dial = self._dials.get(peer)
        if dial is None:
            dial = asyncio.get_running_loop().create_task(self._open(peer))
            self._dials[peer] = dial
            dial.add_done_callback(lambda done: self._dialled(peer, done))
        return await asyncio.shield(dial)

    def _dialled(self, peer: PeerId, dial: asyncio.Task[ClientConnection]) -> None:
        del self._dials[peer]
        if not dial.cancelled() and dial.exception() is None and not self._closed:
            self._links[peer] = dial.result()
            if dial.result().relayed:
                task = asyncio.get_running_loop().create_task(self._straighten(dial.result()))
                self._straightening.add(task)
                task.add_done_callback(self._straightening.discard)

    async def _straighten(self, relayed: ClientConnection) -> None:
        """Leave the relay when libp2p has punched a hole: a stream stays on the way it was opened on."""
        peer = relayed.peer
        with contextlib.suppress(ControlError, PeerFault):
            for pause_s in PUNCH_LOOKS_S:
                await asyncio.sleep(pause_s)
                if self._links.get(peer) is not relayed:
                    return
                if await self._control.is_direct(peer):
                    link = await self._open(peer)
                    if self._links.get(peer) is not relayed or self._closed:
                        link.fail(PeerGone(peer, "another link was opened meanwhile"))
                        return
                    self._links[peer] = link
                    self._bypassed.add(relayed)
                    relayed.closed.add_done_callback(lambda _: self._bypassed.discard(relayed))
                    while relayed.state.pending:
                        await asyncio.sleep(pause_s)
                    relayed.fail(PeerGone(peer, "a direct way was found"))
                    return

    async def _open(self, peer: PeerId) -> ClientConnection:
        link: ClientConnection | None = None
        try:
            addresses = self._addresses.get(peer, ())
            deadline = asyncio.get_running_loop().time() + self._dial_s
            if addresses:
                await self._control.connect(peer, addresses, self._dial_s)
            hidden = any(CIRCUIT in address for address in addresses)
            relayed = hidden and not await self._control.is_direct(peer)
            link = await self._control.open_stream(
                lambda request: ClientConnection(peer, request, self._timings), peer, PROTOCOL
            )
            assert link is not None
            link.state.estimator, link.state.limiter = self._estimator_of(peer), self._limiter
            link.relayed = relayed
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            check_response(await within(link.opened, left))
        except ControlError as error:
            fault: PeerFault = PeerGone(peer, f"cannot be reached: {self._closed or error.text}")
        except asyncio.TimeoutError:
            fault = PeerGone(peer, f"cannot be reached: no connection within {self._dial_s:g} s")
            self._hang_up(peer)
        except PeerFault as error:
            fault = error
        except BaseException:
            if link is not None:
                link.fail(PeerGone(peer, "the call was given up"))
            raise
        else:
            opened = link
            link.closed.add_done_callback(lambda _: self._drop(opened))
            return link
        if link is not None:
            link.fail(fault)
        raise fault

    def _drop(self, link: ClientConnection) -> None:
        self._sent[link.peer] += link.state.sent_bytes
        self._received[link.peer] += link.state.received_bytes
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        if isinstance(link.state.lost_because, PeerSilent):
            self._hang_up(link.peer)

    def _hang_up(self, peer: PeerId) -> None:
        """Have the next dial make a new connection.

        On the one that fell silent TCP sends again ever more rarely: 30 s after a cut of 30 s has healed.
        """
        if self._closed:
            return

        async def disconnect() -> None:
            with contextlib.suppress(ControlError):
                await self._control.disconnect(peer)

        task = asyncio.get_running_loop().create_task(disconnect())
        self._hanging_up.add(task)
        task.add_done_callback(self._hanging_up.discard)

    async def _call_locally(
        self, method: str, header: bytes, body: Sequence[memoryview], max_answer_bytes: int
    ) -> Answer:
        frames.pack_call(1, method, header, [part.nbytes for part in body])  # the same limits as elsewhere
        task = asyncio.get_running_loop().create_task(self._handle_locally(method, bytes(header), body))
        self._locals.add(task)
        task.add_done_callback(self._local_done)
        try:
            # Shielded: a caller that gives up does not stop the handler, as from afar.
            answer = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise PeerGone(self.peer_id, self._closed or "the handler was cancelled") from None
            raise
        total = sum(flat(part).nbytes for part in answer.body)
        if total > max_answer_bytes:
            raise BadAnswer(self.peer_id, f"an answer of {total} bytes; at most {max_answer_bytes} fit")
        return answer

    def _local_done(self, task: asyncio.Task[Answer]) -> None:
        self._locals.discard(task)
        if not task.cancelled():
            task.exception()  # seen: the caller may be gone

    async def _handle_locally(self, method: str, header: bytes, body: Sequence[memoryview]) -> Answer:
        self.calls[method] += 1
        handler, refusal = self._find(method, sum(part.nbytes for part in body))
        try:
            if handler is None:
                raise refusal
            answer = await handler(_LocalCall(self.peer_id, header, body))
            return Answer(bytes(answer.header), [memoryview(bytearray(flat(part))) for part in answer.body])
        except SwarmError as error:
            raise from_wire(self.peer_id, error.to_wire()) from error
        except Exception as error:
            raise self._bug(method, self.peer_id, error) from error

    # -- serving --------------------------------------------------------------------------------

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int = 0) -> None:
        """See `peers.ports.Transport.serve`."""
        self._methods[method] = (handler, max_body_bytes)

    def _find(self, method: str, body_bytes: int) -> tuple[Handler | None, SwarmError]:
        """The handler; or None and why not."""
        handler, limit = self._methods.get(method, (None, 0))
        if handler is None:
            return None, Refused(f"no such method: {method!r}")
        if body_bytes > limit:
            return None, Refused(f"a body of {body_bytes} bytes; {method!r} takes {limit}")
        return handler, Refused("")

    def _make_callee(self) -> ServerConnection:
        link = ServerConnection(self._introduced, self._called, self._timings)
        link.state.limiter = self._limiter
        self._incoming.add(link)
        link.closed.add_done_callback(lambda _: self._caller_left(link))
        return link

    def _introduced(self, link: ServerConnection, message: bytes) -> tuple[PeerId, BandwidthEstimator]:
        """p2pd names the peer that opened the stream."""
        peer = stream_peer(message)
        links = self._callers[peer]
        links.append(link)
        if len(links) > MAX_LINKS_PER_PEER:
            links[0].fail(PeerGone(peer, "opened another stream"))
        if self._closed or len(self._incoming) > MAX_LINKS:
            link.state.fail(PeerGone(peer, self._closed or "too many streams are open"))
        return peer, self._estimator_of(peer)

    def _caller_left(self, link: ServerConnection) -> None:
        self._incoming.discard(link)
        links = self._callers.get(link.peer, [])
        if link in links:
            links.remove(link)
            self._sent[link.peer] += link.state.sent_bytes
            self._received[link.peer] += link.state.received_bytes
        if not links:
            self._callers.pop(link.peer, None)
            if self.on_gone is not None and not self._closed:
                self.on_gone(link.peer)
        if isinstance(link.state.lost_because, BadAnswer):
            self._log_abuse(link.peer, link.state.lost_because.text)

    def _log_abuse(self, peer: PeerId, text: str) -> None:
        """Once a minute for each peer, so that a stranger cannot fill the log."""
        now = asyncio.get_running_loop().time()
        if now - self._logged.get(peer, -_LOG_EVERY_S) < _LOG_EVERY_S:
            return
        if len(self._logged) >= MAX_LINKS:
            self._logged.clear()
        self._logged[peer] = now
        logger.warning("closed a stream that broke the protocol: %s", text)

    def _called(self, link: ServerConnection, served: ServedCall) -> SwarmError | None:
        """A CALL arrived: start its handler, or say why not."""
        self.calls[served.method] += 1
        handler, refusal = self._find(served.method, sum(served.body_sizes))
        if handler is None:
            return refusal
        if self._handling[link.peer] >= MAX_HANDLERS_PER_PEER:
            return Busy(f"{MAX_HANDLERS_PER_PEER} calls of yours are being worked on")
        self._handling[link.peer] += 1
        task = asyncio.get_running_loop().create_task(self._serve(link, served, handler))
        self._handlers.add(task)
        task.add_done_callback(lambda done: self._served(link.peer, done))
        return None

    def _served(self, peer: PeerId, task: asyncio.Task[None]) -> None:
        self._handlers.discard(task)
        self._handling[peer] -= 1
        if not self._handling[peer]:
            del self._handling[peer]
        if not task.cancelled() and task.exception() is not None:
            logger.error("bug while answering a call", exc_info=task.exception())

    async def _serve(self, link: ServerConnection, served: ServedCall, handler: Handler) -> None:
        """Run the handler and send what becomes of it. Goes on when the caller is gone: the work counts."""
        fault = self._faults.next_for(served.method) if self._faults is not None else None
        try:
            answer = await handler(served)
            if fault is not None and fault.kind == "delay":
                await asyncio.sleep(fault.delay_s)
            if fault is not None and fault.kind == "drop":
                link.lose_answer(served)
            elif fault is not None and fault.kind == "corrupt":
                link.corrupt_answer(served)
            else:
                link.answer(served, answer.header, [flat(part) for part in answer.body])
        except SwarmError as refusal:
            link.answer_error(served, refusal)
        except Exception as bug:  # noqa: BLE001  a handler's bug ends its call, not the peer
            link.answer_error(served, self._bug(served.method, served.peer, bug))

    def _bug(self, method: str, caller: PeerId, error: Exception) -> Refused:
        """What a caller hears of a bug of ours."""
        logger.error("the handler of %r failed for peer %s", method, short(caller), exc_info=error)
        return Refused(f"internal error: {type(error).__name__}: {error}"[:500])

    # -- diagnostics ----------------------------------------------------------------------------

    @property
    def sent_bytes(self) -> Counter[PeerId]:
        """Bytes put on streams, frames included, by the peer at the other end."""
        return self._count(self._sent, "sent_bytes")

    @property
    def received_bytes(self) -> Counter[PeerId]:
        """Bytes taken from streams, by the peer at the other end."""
        return self._count(self._received, "received_bytes")

    def _count(self, past: Counter[PeerId], attribute: str) -> Counter[PeerId]:
        total = Counter(past)
        for link in [*self._links.values(), *self._bypassed, *self._incoming]:
            total[link.peer] += getattr(link.state, attribute)
        return total

    def _estimator_of(self, peer: PeerId) -> BandwidthEstimator:
        """The one that looks at the line to `peer`; of too many the oldest is forgotten."""
        estimator = self._estimators.setdefault(peer, BandwidthEstimator())
        if len(self._estimators) > MAX_LINKS:
            del self._estimators[next(iter(self._estimators))]
        return estimator

    @property
    def lines(self) -> dict[PeerId, NetworkPath]:
        """What is known of the lines to others."""
        lines = {peer: estimator.line for peer, estimator in self._estimators.items()}
        if self._limiter is None:
            return lines
        # Measured is what comes; what goes is no wider than its limit, and who plans should know.
        most_bps = self._limiter.limit_bps
        return {
            peer: NetworkPath(rtt_s=line.rtt_s, bandwidth_bps=min(line.bandwidth_bps, most_bps))
            for peer, line in lines.items()
        }

    @property
    def links(self) -> tuple[int, int]:
        """How many streams are open: to peers that we call, and from peers that call us."""
        return len(self._links), len(self._incoming)


async def _cancel(tasks: Iterable[asyncio.Task[object]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
