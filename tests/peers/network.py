"""The simulated network on a calm day: one latency, nothing lost but on order, and a directory without lag.

network = CalmNetwork(silence_s=0.05)
a, b = network.join("a"), network.join("b")
b.transport.serve("echo", handler, max_body_bytes=100)
await a.transport.call("b", "echo", b"hello")
network.kill("b")            # its handlers stop where they are, callers get PeerGone
network.stop("b")            # callers get PeerSilent after silence_s; go_on() ends it
network.drop_answer("b", "echo", nth=2)
network.cut({"a"}, {"b"}); network.heal()
network.ban("b", at="a")     # as if a had a charter that bans b
await network.close()
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

from peers.ports import Answer
from peers.sim.dice import Dice
from peers.sim.directory import Dht, SimDirectory
from peers.sim.lines import Lines
from peers.sim.loop import WORLD, Process, VirtualLoop
from peers.sim.network import SILENCE_S, Network, SimTransport, _Call
from peers.waiting import fail
from swarm.errors import BadAnswer, PeerGone, SwarmError
from swarm.ids import PeerId
from swarm.records import PeerRecord
from tests.peers.ordered_faults import Fault, Faults


def calm(latency_s: float) -> Lines:
    """Lines that take a message as long, whatever its size."""
    return Lines(latency_s, latency_s, math.inf)


@dataclass(frozen=True)
class End:
    """What one peer has of the network."""

    process: Process
    transport: SimTransport
    directory: SimDirectory

    @property
    def peer_id(self) -> PeerId:
        return self.process.name


class CalmNetwork(Network):
    """All peers of a test, in its own loop. `latency_s`: one way, of each call and each answer."""

    def __init__(self, *, silence_s: float = SILENCE_S, latency_s: float = 0.0) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "mark the test `virtual_time`"
        super().__init__(loop, Dice(1), calm(latency_s), silence_s, breaks_s=(0.0, 0.0))
        self.dht = Dht(loop, Dice(1), lag_s=(0.0, 0.0), ask_s=(0.0, 0.0))
        self.peers: dict[PeerId, End] = {}
        self._processes: list[Process] = []
        self._faults: dict[PeerId, Faults] = {}
        self._fault_of: dict[_Call, Fault] = {}
        self._shut_out: dict[PeerId, set[PeerId]] = {}
        """Whom each peer refuses, by the charter that it knows."""

    def join(self, peer: PeerId) -> End:
        """A new peer. One that was killed may come again under its id, as a new process would."""
        if peer in self.peers and not self.is_dead(peer):
            raise ValueError(f"{peer} is already there")
        self.expire(peer)
        process = Process(peer)
        self._processes.append(process)
        self._faults[peer] = Faults()
        directory = SimDirectory(self.dht, process)
        for entry in self.dht.entries.values():
            directory.will_bring(0.0, entry)
        end = self.peers[peer] = End(process, self.add(process), directory)
        return end

    def is_dead(self, peer: PeerId) -> bool:
        return not self.peers[peer].process.alive

    # -- answers on order -------------------------------------------------------------------------

    def drop_answer(self, peer: PeerId, method: str, nth: int = 1) -> None:
        """`peer` does the work of its n-th next call of `method`, and the answer is lost."""
        self._faults[peer].drop_answer(method, nth)

    def delay_answer(self, peer: PeerId, method: str, delay_s: float, nth: int = 1) -> None:
        """The answer of `peer` to its n-th next call of `method` leaves `delay_s` later."""
        self._faults[peer].delay_answer(method, delay_s, nth)

    def corrupt_answer(self, peer: PeerId, method: str, nth: int = 1) -> None:
        """The caller of the n-th next call of `method` sees BadAnswer."""
        self._faults[peer].corrupt_answer(method, nth)

    def _arrive(self, call: _Call) -> None:
        fault = self._faults[call.callee.peer_id].next_for(call.method)
        if fault is not None:
            self._fault_of[call] = fault
        super()._arrive(call)

    def _answer(self, call: _Call, outcome: Answer | SwarmError) -> None:
        fault = self._fault_of.pop(call, None)
        if fault is None:
            super()._answer(call, outcome)
        elif fault.kind == "drop":
            self.loop.call_later(self.silence_s, self._silent, call, context=WORLD)
        elif fault.kind == "delay":
            self.loop.call_later(fault.delay_s, super()._answer, call, outcome)
        else:
            fail(call.result, BadAnswer(call.callee.peer_id, "its answer breaks the protocol"))

    # -- bans ---------------------------------------------------------------------------------------

    def ban(self, banned: PeerId, at: PeerId) -> None:
        """One peer hears of a ban: from now on it answers and calls the banned one no more, and believes no
        record of it. What was under way between them ends, as `NetTransport.drop_refused` ends it."""
        end, other = self.peers[at], self.peers[banned]
        self._shut_out.setdefault(at, set()).add(banned)
        learn = end.directory._learn

        def learns(entry: Any) -> None:
            if entry.record.peer not in self._shut_out[at]:
                learn(entry)

        end.directory._learn = learns  # type: ignore[method-assign]
        end.directory.forget(banned)
        for call in list(self._open.values()):
            names = call.caller.peer_id, call.callee.peer_id
            if set(names) == {at, banned}:
                fail(call.result, PeerGone(names[1], "not admitted: the owner of the run banned it"))
        for one, gone in ((end, banned), (other, at)):
            if one.transport.on_gone is not None and one.process.alive:
                self.loop.call_soon(one.transport.on_gone, gone, context=one.process.context)

    async def call(self, caller: SimTransport, peer: PeerId, *rest: Any) -> Answer:
        if peer in self._shut_out.get(caller.peer_id, ()):
            raise PeerGone(peer, "not admitted: the owner of the run banned it")
        return await super().call(caller, peer, *rest)

    async def _handle(self, call: _Call) -> None:
        if call.caller.peer_id in self._shut_out.get(call.callee.peer_id, ()):
            fail(call.result, PeerGone(call.callee.peer_id, "the stream broke"))
            return
        await super()._handle(call)

    # -- directory --------------------------------------------------------------------------------

    @property
    def records(self) -> dict[PeerId, PeerRecord]:
        """What is announced now."""
        now_s = self.loop.now_s
        return {peer: entry.record for peer, entry in self.dht.entries.items() if entry.expires > now_s}

    def announce(self, record: PeerRecord) -> None:
        """Have its peer announce a record at once."""
        self.peers[record.peer].directory._renew(record)

    def expire(self, peer: PeerId) -> None:
        """The record of `peer` runs out now."""
        self.dht.forget(peer)

    async def close(self) -> None:
        """End all processes: those that live may clean up, of those that are dead nothing is left."""
        tasks = [task for process in self._processes if process.alive for task in process.tasks]
        for process in self._processes:
            process.go_on(self.loop)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for process in self._processes:
            process.end()
