"""The ends of a stream on an event loop: `connection_state` with a socket, timers and futures."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import cast

from peers.net.bandwidth import BandwidthEstimator
from peers.net.connection_state import (
    Answered,
    BodyEnded,
    Called,
    ClientState,
    ConnectionState,
    Event,
    Incoming,
    Opened,
    ServerState,
)
from peers.net.timings import DEFAULT_TIMINGS, NetTimings
from peers.ports import Answer
from swarm.errors import BadAnswer, PeerFault, PeerGone, SwarmError
from swarm.ids import PeerId
from swarm.wire import frames
from swarm.wire.frames import FrameError

_HIGH_WATER_BYTES = 2 * frames.CHUNK_BYTES


class Connection(asyncio.BufferedProtocol):
    """What both ends share."""

    state: ConnectionState

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.closed = self._loop.create_future()
        """Done when the connection is gone."""
        self._transport: asyncio.Transport | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._turn: asyncio.TimerHandle | None = None
        self._said_end = self._ended = False

    @property
    def peer(self) -> PeerId:
        return self.state.peer

    def _handle(self, event: Event) -> None:
        raise NotImplementedError

    def _lost(self) -> None:
        """The link is over, once."""

    # -- what the loop says ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES, low=frames.CHUNK_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.state.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.state.received(nbytes, now=self._loop.time())
        self.advance()

    def pause_writing(self) -> None:
        self.state.pause_writing(now=self._loop.time())

    def resume_writing(self) -> None:
        self.state.resume_writing()
        self.advance()

    def eof_received(self) -> bool:
        self.fail(PeerGone(self.peer, "the connection broke"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(PeerGone(self.peer, "the connection broke"))
        if not self.closed.done():
            self.closed.set_result(None)

    def _tick(self) -> None:
        self._ticker = None
        self.state.tick(now=self._loop.time())
        self.advance()

    # -- what follows from it -------------------------------------------------------------------

    def advance(self) -> None:
        """Carry out what the state says. After each change of it."""
        state = self.state
        if state.over:
            self._end()  # before the callers that wait hear of it
        while state.events:
            self._handle(state.events.popleft())
        self._write()
        if state.over:
            self._end()
        elif self._ticker is None and state.ticking:
            self._ticker = self._loop.call_later(state.timings.tick_s, self._tick)

    def _write(self) -> None:
        transport, state = self._transport, self.state
        if transport is None:
            return
        while frame := state.next_frame(now=self._loop.time()):
            for part in frame:
                transport.write(part)
        if state.outbox.turn_at is not None and self._turn is None:
            wait_s = state.outbox.turn_at - self._loop.time()
            self._turn = self._loop.call_later(max(0.0, wait_s), self._turn_comes)
        if state.finished and not self._said_end and not transport.is_closing():
            self._said_end = True
            with contextlib.suppress(OSError, RuntimeError):
                transport.write_eof()

    def _turn_comes(self) -> None:
        self._turn = None
        self.advance()

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        for timer in (self._ticker, self._turn):
            if timer is not None:
                timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        elif not self.closed.done():
            self.closed.set_result(None)
        self._lost()

    def fail(self, fault: PeerFault) -> None:
        """Drop the connection now; whatever waits on it gets this fault."""
        self.state.fail(fault)
        self.advance()

    def finish(self) -> None:
        """Let everything queued go out, then tell the other end that nothing follows."""
        self.state.finish()
        self.advance()


class ClientConnection(Connection):
    """The end that calls."""

    def __init__(self, peer: PeerId, request: bytes, timings: NetTimings = DEFAULT_TIMINGS) -> None:
        """`request` asks p2pd to open the stream; `opened` gets p2pd's answer."""
        super().__init__()
        self.state: ClientState = ClientState(timings, now=self._loop.time())
        self.state.peer = peer
        self.opened: asyncio.Future[bytes] = self._loop.create_future()
        self.relayed = False
        """It passes a third peer."""
        self._request = request
        self._answers: dict[int, asyncio.Future[Answer]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._transport is not None
        self._transport.write(self._request)

    async def call(
        self, method: str, header: bytes, body: Sequence[memoryview], max_answer_bytes: int
    ) -> Answer:
        """Send, wait, and if the caller is cancelled, say so to the other end."""
        if self.state.over:
            raise PeerGone(self.peer, "the connection broke")
        call = self.state.call(method, header, body, max_answer_bytes, now=self._loop.time())
        self._answers[call] = answer = self._loop.create_future()
        self.advance()
        try:
            return await answer
        finally:
            if self._answers.pop(call, None) is not None:
                self.state.abort(call)
                self.advance()

    def _handle(self, event: Event) -> None:
        if isinstance(event, Opened):
            if not self.opened.done():
                self.opened.set_result(event.message)
            self.state.introduce(self.peer, self.state.estimator, now=self._loop.time())
        elif isinstance(event, Answered):
            answer = self._answers.pop(event.call, None)
            if answer is None or answer.done():
                return
            if isinstance(event.answer, SwarmError):
                answer.set_exception(event.answer)
            else:
                answer.set_result(event.answer)

    def _lost(self) -> None:
        if not self.opened.done():
            assert self.state.lost_because is not None
            self.opened.set_exception(self.state.lost_because)
            self.opened.exception()  # seen: the task that dials may be gone


class ServedCall:
    """A call as its handler sees it: fulfils `peers.ports.Request`."""

    def __init__(self, link: ServerConnection, call: Incoming) -> None:
        self.peer = link.peer
        self.method = call.header.method
        self.header = call.header.header
        self.body_sizes: Sequence[int] = call.header.body_sizes
        self.call = call
        self._link = link

    async def accept(self) -> list[memoryview]:
        """Receive the body. Raises as `ServerState.accept` does."""
        return await self._link.accept(self.call)


class ServerConnection(Connection):
    """The end that is called."""

    def __init__(
        self,
        on_open: Callable[[ServerConnection, bytes], tuple[PeerId, BandwidthEstimator]],
        on_call: Callable[[ServerConnection, ServedCall], None],
        timings: NetTimings = DEFAULT_TIMINGS,
    ) -> None:
        """`on_open`: which peer p2pd's message introduces. `on_call` starts a handler, or raises why not."""
        super().__init__()
        self.state: ServerState = ServerState(timings, now=self._loop.time())
        self._on_open, self._on_call = on_open, on_call
        self._bodies: dict[int, asyncio.Future[None]] = {}

    def _handle(self, event: Event) -> None:
        if isinstance(event, Opened):
            try:
                peer, estimator = self._on_open(self, event.message)
            except FrameError as error:
                self.state.fail(BadAnswer(self.peer, str(error)))
            else:
                self.state.introduce(peer, estimator, now=self._loop.time())
        elif isinstance(event, Called):
            try:
                self._on_call(self, ServedCall(self, event.call))
            except SwarmError as refusal:
                self.state.answer_error(event.call, refusal)
        elif isinstance(event, BodyEnded):
            body = self._bodies.pop(event.call.number, None)
            if body is not None and not body.done():
                if event.error is not None:
                    body.set_exception(event.error)
                else:
                    body.set_result(None)

    async def accept(self, call: Incoming) -> list[memoryview]:
        """The body of a call, complete."""
        sink = self.state.accept(call, now=self._loop.time())
        self.advance()
        if sink.left:
            body = self._bodies[call.number] = self._loop.create_future()
            call.awaited = True
            try:
                await body
            finally:
                call.awaited = False
                self._bodies.pop(call.number, None)
        return sink.buffers

    def answer(self, served: ServedCall, header: bytes, body: Sequence[memoryview]) -> None:
        """Send the result. Raises ValueError if it is over a limit of the framing."""
        self.state.answer(served.call, header, body)
        self.advance()

    def answer_error(self, served: ServedCall, error: SwarmError) -> None:
        self.state.answer_error(served.call, error)
        self.advance()
