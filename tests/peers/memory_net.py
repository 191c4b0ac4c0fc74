"""Many peers in one event loop: the ports' Transport and Directory without sockets, with faults.

What a loop can observe is what it would observe with `peers.net`: the same errors for the same
reasons, headers before bodies, answers lost or late, peers dead or hung, links cut. Heartbeats are
not simulated; where the real transport would find out by silence, this one waits `silence_s`.

    network = MemoryNetwork(silence_s=0.05)
    a, b = network.add("a"), network.add("b")
    b.transport.serve("echo", handler, max_body_bytes=100)
    await a.transport.call("b", "echo", b"hello")
    network.fail("b")            # killed: handlers stop, callers get PeerGone at once
    network.hang("b")            # stopped: callers get PeerSilent after silence_s; resume() ends it
    network.drop_answer("b", "echo", nth=2)
    network.partition({"a"}, {"b"}); network.heal()
    await network.close()
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from peers.net.fault_injection import Fault, Faults
from peers.ports import Answer, Buffer, Handler, NetworkPath
from peers.waiting import within
from swarm.errors import BadAnswer, PeerGone, PeerSilent, Refused, SetupError, SwarmError, from_wire
from swarm.ids import PeerId, Stage
from swarm.records import PeerRecord

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 1024
"""As in the real framing."""


def _size(body: Sequence[Buffer]) -> int:
    return sum(memoryview(part).nbytes for part in body)


def _flat(part: Buffer) -> memoryview:
    view = memoryview(part)
    return view.cast("B") if view.nbytes else memoryview(b"")


@dataclass(eq=False)
class _Call:
    """One call on its way. `result` is what the caller waits for."""

    caller: PeerId
    callee: PeerId
    method: str
    body: list[memoryview]
    result: asyncio.Future[Answer]
    abandoned: bool = False


class MemoryRequest:
    """Fulfils `peers.ports.Request`."""

    def __init__(self, network: MemoryNetwork, call: _Call, header: bytes) -> None:
        self._network, self._call = network, call
        self.peer = call.caller
        self.header = header
        self.body_sizes: Sequence[int] = tuple(part.nbytes for part in call.body)

    async def accept(self) -> list[memoryview]:
        """The body, copied, so that both sides may write to theirs.

        Raises:
            PeerGone: the caller died or gave the call up first.
        """
        await asyncio.sleep(0)
        await self._network.until_awake(self._call.callee)
        if self._call.abandoned or self._network.is_dead(self._call.caller):
            raise PeerGone(self._call.caller, "went away before its body arrived")
        if self._network.is_cut(self._call.caller, self._call.callee):
            await asyncio.sleep(self._network.silence_s)
            raise PeerSilent(self._call.caller, "its body did not arrive in time")
        return [memoryview(bytearray(part)) for part in self._call.body]


class MemoryTransport:
    """Fulfils `peers.ports.Transport`."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId) -> None:
        self._network = network
        self.peer_id = peer_id
        self.handlers: dict[str, tuple[Handler, int]] = {}
        self.calls: Counter[str] = Counter()
        """How often each method of this peer was called."""
        self.sent_bytes: Counter[PeerId] = Counter()
        self.received_bytes: Counter[PeerId] = Counter()
        self.lines: dict[PeerId, NetworkPath] = {}

    def serve(self, method: str, handler: Handler, *, max_body_bytes: int = 0) -> None:
        self.handlers[method] = (handler, max_body_bytes)

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Nothing to learn: everybody is reachable by id."""

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
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(f"header of {len(header)} bytes; the limit is {MAX_HEADER_BYTES}")
        views = [_flat(part) for part in body]
        running = self._network.deliver(self.peer_id, peer, method, header, views)
        if deadline_s is None:
            answer = await running
        else:
            try:
                answer = await within(running, deadline_s)
            except asyncio.TimeoutError:
                raise PeerSilent(peer, f"no answer to {method!r} within {deadline_s:g} s") from None
        if _size(answer.body) > max_answer_bytes:
            raise BadAnswer(peer, f"an answer of {_size(answer.body)} bytes; at most {max_answer_bytes} fit")
        self.sent_bytes[peer] += len(header) + _size(views)
        self.received_bytes[peer] += len(answer.header) + _size(answer.body)
        return answer


class MemoryDirectory:
    """Fulfils `peers.ports.Directory`. Always fresh: what was announced is seen at once."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId) -> None:
        self._network = network
        self._peer_id = peer_id

    lag_s = 0.0
    watched: frozenset[Stage] | None = None
    """What `watch` was told; everything is seen all the same."""

    def watch(self, stages: Collection[Stage] | None) -> None:
        self.watched = None if stages is None else frozenset(stages)

    def peers(self) -> Sequence[PeerRecord]:
        return self._network.records_seen_by(self._peer_id)

    def at(self, stage: Stage) -> Sequence[PeerRecord]:
        return [record for record in self.peers() if record.stage == stage]

    def find(self, peer: PeerId) -> PeerRecord | None:
        return next((record for record in self.peers() if record.peer == peer), None)

    async def survey(self) -> Sequence[PeerRecord]:
        return await self.refresh()

    async def refresh(self, stages: Collection[Stage] | None = None) -> Sequence[PeerRecord]:
        await asyncio.sleep(0)
        await self._network.until_awake(self._peer_id)
        return self.peers()

    async def announce(self, record: PeerRecord) -> None:
        await asyncio.sleep(0)
        await self._network.until_awake(self._peer_id)
        self._network.records[self._peer_id] = record

    async def withdraw(self) -> None:
        await asyncio.sleep(0)
        record = self._network.records.get(self._peer_id)
        if record is not None and not self._network.is_dead(self._peer_id):
            self._network.records[self._peer_id] = msgspec.structs.replace(record, state="left")

    async def publish_manifest(self, text: str, run_id: str) -> None:
        self._network.manifests[run_id] = text

    async def fetch_manifest(self, run_id: str) -> str:
        await asyncio.sleep(0)
        if run_id not in self._network.manifests:
            raise SetupError(f"no manifest of run {run_id} was found")
        return self._network.manifests[run_id]


@dataclass(frozen=True)
class MemoryPeer:
    """What one peer gets of the network."""

    peer_id: PeerId
    transport: MemoryTransport
    directory: MemoryDirectory


class MemoryNetwork:
    """All peers, and the faults between them.

    `silence_s`: after how long a caller gives up a hung peer or a lost answer.
    `record_ttl_s`: how long the record of a dead or hung peer stays visible.
    `latency_s`: one way, added to each call and each answer.
    """

    def __init__(
        self, *, silence_s: float = 0.05, record_ttl_s: float = 20.0, latency_s: float = 0.0
    ) -> None:
        self.silence_s, self.record_ttl_s, self.latency_s = silence_s, record_ttl_s, latency_s
        self.peers: dict[PeerId, MemoryPeer] = {}
        self.records: dict[PeerId, PeerRecord] = {}
        self.manifests: dict[str, str] = {}
        self.on_deliver: Callable[[PeerId, PeerId, str], None] | None = None
        """Called as (caller, callee, method) for each call that reaches its callee."""
        self._faults: dict[PeerId, Faults] = {}
        self._dead: dict[PeerId, float] = {}
        self._hung: dict[PeerId, tuple[float, asyncio.Event]] = {}
        self._cuts: list[tuple[frozenset[PeerId], frozenset[PeerId]]] = []
        self._calls: set[_Call] = set()
        self._handling: dict[asyncio.Task[None], _Call] = {}

    def add(self, peer_id: PeerId) -> MemoryPeer:
        """A new peer. One that failed may be added again under its id, as a new process would."""
        if peer_id in self.peers and peer_id not in self._dead:
            raise ValueError(f"{peer_id} is already there")
        self._dead.pop(peer_id, None)
        self.records.pop(peer_id, None)
        self._faults[peer_id] = Faults()
        peer = MemoryPeer(peer_id, MemoryTransport(self, peer_id), MemoryDirectory(self, peer_id))
        self.peers[peer_id] = peer
        return peer

    # -- faults ---------------------------------------------------------------------------------

    def fail(self, peer: PeerId) -> None:
        """SIGKILL: its handlers stop where they are, its callers get PeerGone at once.

        Its own calls never return. The loops of that peer are the test's: cancel them too.
        """
        self._dead[peer] = asyncio.get_running_loop().time()
        self._hung.pop(peer, None)
        for task, call in list(self._handling.items()):
            if call.callee == peer:
                task.cancel()
        for call in list(self._calls):
            if call.callee == peer and not call.result.done():
                call.result.set_exception(PeerGone(peer, "the connection broke"))
            elif call.caller == peer:
                call.abandoned = True

    def hang(self, peer: PeerId) -> None:
        """SIGSTOP: nothing comes out of it until `resume`; callers give up after `silence_s`."""
        self._hung.setdefault(peer, (asyncio.get_running_loop().time(), asyncio.Event()))
        loop = asyncio.get_running_loop()
        for call in list(self._calls):
            if call.callee == peer:
                loop.call_later(self.silence_s, self._silent, call)

    def resume(self, peer: PeerId) -> None:
        """SIGCONT."""
        hung = self._hung.pop(peer, None)
        if hung is not None:
            hung[1].set()

    def partition(self, left: Iterable[PeerId], right: Iterable[PeerId]) -> None:
        """Cut every link between the two groups: calls pending or new end in PeerSilent after `silence_s`."""
        self._cuts.append((frozenset(left), frozenset(right)))
        loop = asyncio.get_running_loop()
        for call in list(self._calls):
            if self.is_cut(call.caller, call.callee):
                loop.call_later(self.silence_s, self._silent, call)

    def heal(self) -> None:
        """Undo all partitions."""
        self._cuts.clear()

    def drop_answer(self, peer: PeerId, method: str, nth: int = 1) -> None:
        """`peer` does the work of its n-th next call of `method`, and the answer is lost."""
        self._faults[peer].drop_answer(method, nth)

    def delay_answer(self, peer: PeerId, method: str, delay_s: float, nth: int = 1) -> None:
        """The answer of `peer` to its n-th next call of `method` leaves `delay_s` later."""
        self._faults[peer].delay_answer(method, delay_s, nth)

    def corrupt_answer(self, peer: PeerId, method: str, nth: int = 1) -> None:
        """The caller of the n-th next call of `method` sees BadAnswer."""
        self._faults[peer].corrupt_answer(method, nth)

    def is_dead(self, peer: PeerId) -> bool:
        return peer in self._dead

    def is_cut(self, a: PeerId, b: PeerId) -> bool:
        return any((a in x and b in y) or (a in y and b in x) for x, y in self._cuts)

    async def until_awake(self, peer: PeerId) -> None:
        """Returns at once for a healthy peer, after `resume` for a hung one, never for a dead one."""
        while peer in self._dead:
            await asyncio.get_running_loop().create_future()
        while peer in self._hung:
            await self._hung[peer][1].wait()

    # -- calls ----------------------------------------------------------------------------------

    async def deliver(
        self, caller: PeerId, callee: PeerId, method: str, header: bytes, body: list[memoryview]
    ) -> Answer:
        """Bring a call to its callee and wait for the answer. Used by MemoryTransport."""
        await asyncio.sleep(self.latency_s)
        await self.until_awake(caller)
        if callee not in self.peers or callee in self._dead:
            raise PeerGone(callee, "cannot be reached")
        loop = asyncio.get_running_loop()
        call = _Call(caller, callee, method, body, loop.create_future())
        self._calls.add(call)
        try:
            if callee in self._hung or self.is_cut(caller, callee):
                loop.call_later(self.silence_s, self._silent, call)
            else:
                self._start(call, header)
            answer = await call.result
            await self.until_awake(caller)
            return answer
        except asyncio.CancelledError:
            call.abandoned = True
            raise
        finally:
            self._calls.discard(call)
            if call.result.done() and not call.result.cancelled():
                call.result.exception()

    def _start(self, call: _Call, header: bytes) -> None:
        if self.on_deliver is not None:
            self.on_deliver(call.caller, call.callee, call.method)
        transport = self.peers[call.callee].transport
        transport.calls[call.method] += 1
        fault = self._faults[call.callee].next_for(call.method)
        task = asyncio.get_running_loop().create_task(self._handle(transport, call, header, fault))
        self._handling[task] = call
        task.add_done_callback(lambda done: self._handling.pop(done, None))

    async def _handle(
        self, transport: MemoryTransport, call: _Call, header: bytes, fault: Fault | None
    ) -> None:
        outcome: Answer | SwarmError
        try:
            handler, max_body_bytes = transport.handlers.get(call.method, (None, 0))
            if handler is None:
                raise Refused(f"no such method: {call.method!r}")
            if _size(call.body) > max_body_bytes:
                raise Refused(f"a body of {_size(call.body)} bytes; {call.method!r} takes {max_body_bytes}")
            answer = await handler(MemoryRequest(self, call, bytes(header)))
            outcome = Answer(bytes(answer.header), [memoryview(bytearray(part)) for part in answer.body])
        except SwarmError as error:
            outcome = from_wire(call.callee, error.to_wire())
        except Exception as error:
            logger.exception("%s: the handler of %r failed", call.callee, call.method)
            outcome = Refused(f"internal error: {type(error).__name__}: {error}"[:500])
        await self.until_awake(call.callee)
        if fault is not None and fault.kind == "delay":
            await asyncio.sleep(fault.delay_s)
        if (fault is not None and fault.kind == "drop") or self.is_cut(call.caller, call.callee):
            await asyncio.sleep(self.silence_s)
            self._silent(call)
            return
        if fault is not None and fault.kind == "corrupt":
            outcome = BadAnswer(call.callee, "its answer breaks the protocol")
        await asyncio.sleep(self.latency_s)
        if call.result.done():
            return
        if isinstance(outcome, SwarmError):
            call.result.set_exception(outcome)
        else:
            call.result.set_result(outcome)

    def _silent(self, call: _Call) -> None:
        if not call.result.done():
            call.result.set_exception(
                PeerSilent(call.callee, f"no answer and no sign of life for {self.silence_s} s")
            )

    # -- directory ------------------------------------------------------------------------------

    def records_seen_by(self, viewer: PeerId) -> list[PeerRecord]:
        """Sorted by peer id; those of dead and hung peers until their time is up."""
        now = asyncio.get_running_loop().time()
        seen: list[PeerRecord] = []
        for peer, record in sorted(self.records.items()):
            since = self._dead.get(peer)
            if since is None and peer in self._hung:
                since = self._hung[peer][0]
            if since is None or now - since < self.record_ttl_s:
                seen.append(record)
        return seen

    def expire(self, peer: PeerId) -> None:
        """The record of `peer` runs out now."""
        self.records.pop(peer, None)

    async def close(self) -> None:
        """Cancel the handlers still running and wait for them."""
        tasks = list(self._handling)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
